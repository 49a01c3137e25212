"""Compares SWIFT here with the program of its authors, on the same weights: rounds, scores of sets, the search.

``git clone https://github.com/hemingkx/SWIFT CLONE`` has their code, and ``python benchmarks/referee_swift.py CLONE
--python PYTHON --model tiny --out FILE.json`` compares ``--paper swift-v1 --authors`` with it, on the CPU in float32.
``PYTHON`` is an interpreter of an environment with what their ``requirements.txt`` names: torch, transformers 4.37.1,
accelerate, bayesian-optimization 1.5.1 and sentencepiece.

Their program runs as it is up to its evaluation, by the values of their shell script, but in float32. Replaced are the
evaluation, which loads data sets and waits for a GPU, ``fastchat``'s reading of a dtype, and the tokenizer, as texts
are token ids and none of them ends an output. Their functions are wrapped, so that they say what they return.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import statistics
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from gguf_sides.process import Process
from selfspec import Engine
from selfspec.errors import ChangedPaperWarning
from selfspec.loading import load_model
from selfspec.loading.catalog import resolve_name
from selfspec.methods import swift_search
from selfspec.methods.api import Drafter, Feedback, LearnedState, Prefill
from selfspec.methods.layer_search import Point, generator_of, point_of, random_point
from selfspec.methods.skipping import alternately_skipped, evenly_skipped, free_sublayers
from selfspec.methods.swift import Swift
from selfspec_lab.bench.stamp import make_stamp, parse_and_check
from selfspec_lab.prompts import PROMPTS

SEED = 2024
"""Of their random candidates, as in their script."""

MORE_TOKENS = 64
"""Written here after the last compared round, so that no end of an output shortens a draft."""

OPTIONS = ("OPT_INTERVAL", "BAYES_INTERVAL", "MAX_OPT_ITER", "MAX_TOLERANCE_ITER", "MAX_SCORE")
OPTIONS += ("CONTEXT_WINDOW", "SKIP_RATIO")

_ALL = {"max-score": 1.0}, {"max_matchness": 1.0}
"""No score ends the search."""

SEARCHES: dict[str, tuple[dict[str, float], dict[str, float]]] = {
    "as published": ({}, {}),
    "any score": _ALL,
    "Bayesian": (
        {**_ALL[0], "bayes-interval": 5, "max-opt-iter": 150},
        {**_ALL[1], "bayesian_interval": 5, "max_optimization_steps": 151},
    ),
    "skips most": (
        {**_ALL[0], "bayes-interval": 5, "max-tolerance-iter": 60, "skip-ratio": 0.85},
        {**_ALL[1], "bayesian_interval": 5, "patience": 61, "skip_ratio": 0.85},
    ),
}
"""What differs from their script, and from the preset. Their program ends a search one step after its limit."""

ROUND = {
    "skipped": "set that drafts",
    "length": "where the draft stops",
    "drafted": "its tokens",
    "candidates": "candidates at each of them",
    "accepted": "accepted tokens",
    "next": "token after these",
}
"""What is compared of a round, and what the table calls it."""

STEP = {
    "bayesian": "random or Bayesian",
    "score": "score of the candidate",
    "kept": "set that is kept",
    "ended": "whether the search ends",
}
"""What is compared of a step of the search."""

Records = list[dict[str, Any]]


class Here:
    """Our method, watched: its rounds, and the steps of its search, which may be given their candidates."""

    def __init__(self, model: Any, tokenizer: Any, settings: Mapping[str, Any]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ChangedPaperWarning)
            self.engine = Engine(model, tokenizer, paper="swift-v1", authors=True, settings=dict(settings))
        assert isinstance(self.engine.method, Swift)
        self.method = self.engine.method
        self.rounds: Records = []
        self.steps: Records = []
        self._given: list[Point] | None = None
        self._begin, self._next = self.method.begin, self.method.search.next_candidate
        self._observe = self.method.search.observe
        self.method.begin = self._watched_begin  # type: ignore[method-assign]
        self.method.search.next_candidate = self._watched_next  # type: ignore[method-assign]
        self.method.search.observe = self._watched_observe  # type: ignore[method-assign]

    def skip(self, skipped: Sequence[int]) -> None:
        """Drafts with a given set from now on."""
        state = self.method.state()
        self.method.restore(LearnedState({**state.values, "skipped": list(skipped)}, state.tensors))

    def write(self, token_ids: Sequence[int], new_tokens: int, candidates: Sequence[Sequence[int]] | None) -> list[int]:
        """Writes after a text, and keeps rounds and steps; the search scores these sets, or its own for ``None``."""
        self.rounds, self.steps, free = [], [], free_sublayers(self.engine.target.layer_count)
        self._given = None if candidates is None else [point_of(skipped, free) for skipped in candidates]
        return list(self.engine.generate(list(token_ids), max_new_tokens=new_tokens, ignore_eos=True).token_ids)

    def _watched_begin(self, prefill: Prefill) -> Drafter:
        drafter: Any = self._begin(prefill)
        keep = drafter.keep

        def watched(feedback: Feedback) -> None:
            self.rounds.append(round_of(feedback))
            keep(feedback)

        drafter.keep = watched
        return drafter

    def _watched_next(self) -> Point | None:
        if self._given == []:
            return None
        suggest, bayesian = swift_search.suggest_point, []
        with mock.patch.object(swift_search, "suggest_point", lambda *known: bayesian.append(1) or suggest(*known)):
            own = self._next()
        if own is None:
            return None
        self.steps.append({"bayesian": bool(bayesian)})
        return own if self._given is None else self._given.pop(0)

    def _watched_observe(self, point: Point, matchness: float) -> None:
        self._observe(point, matchness)
        search = self.method.search
        self.steps[-1] |= {"score": matchness, "kept": list(search.kept.skipped), "ended": search.finished}


def round_of(feedback: Feedback) -> dict[str, Any]:
    """A round of ours as their side describes theirs: tokens of each position, the path's first."""
    proposal, draft = feedback.proposal, feedback.draft
    candidates: list[list[int]] = [[] for _ in range(proposal.drafted)]
    for token, depth in zip(proposal.token_ids.tolist(), proposal.tree.depths[1:], strict=True):
        candidates[depth - 1].append(token)
    *accepted, following = feedback.acceptance.token_ids
    return {
        "skipped": list(draft.kept.skipped),  # type: ignore[union-attr]
        "candidates": candidates,
        "confidences": list(proposal.confidences),
        "accepted": accepted,
        "next": following,
    }


def with_parts(record: Mapping[str, Any]) -> dict[str, Any]:
    """A round with what is compared of it on its own: where the draft stopped, and the path."""
    drafted = [tokens[0] for tokens in record["candidates"]]
    return {**record, "length": len(drafted), "drafted": drafted}


def by_start(rounds: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Rounds by the number of output tokens before them."""
    written, found = 1, {}
    for each in rounds:
        found[written] = with_parts(each)
        written += len(each["accepted"]) + 1
    return found


def compare_rounds(here: Sequence[Mapping[str, Any]], there: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts what is equal in the rounds of both that begin after the same number of tokens.

    Returns:
        ``rounds`` of theirs, how many ``began`` here at the same token, in how many what is ``equal``, the largest
        difference of ``confidence`` of equal tokens, how many of theirs ``rejected`` a token and accepted one
        ``beside`` the path, and drafted and accepted tokens of both, round by round.
    """
    ours, theirs = by_start(here), by_start(there)
    common = [start for start in theirs if start in ours]
    pairs = [(ours[start], theirs[start]) for start in common]
    apart = [
        abs(one - other)
        for own, their in pairs
        if own["drafted"] == their["drafted"]
        for one, other in zip(own["confidences"], their["confidences"], strict=True)
    ]
    return {
        "rounds": len(theirs),
        "began": len(common),
        "equal": {part: sum(own[part] == their[part] for own, their in pairs) for part in ROUND},
        "confidence": max(apart, default=0.0),
        "rejected": sum(len(their["accepted"]) < their["length"] for their in theirs.values()),
        "beside": sum(their["accepted"] != their["drafted"][: len(their["accepted"])] for their in theirs.values()),
        "here": [[own["length"], len(own["accepted"])] for own, _ in pairs],
        "there": [[their["length"], len(their["accepted"])] for their in theirs.values()],
    }


def compare_text(text: str, written: Sequence[int], rounds: Records, there: Mapping[str, Any]) -> dict[str, Any]:
    """Compares a text of ours, and the rounds that wrote it, with theirs, which may be shorter."""
    token_ids = there["token_ids"]
    same = list(written[: len(token_ids)]) == token_ids
    return {"text": text, "same_text": same, **compare_rounds(rounds, there["rounds"])}


def compare_steps(here: Records, there: Records) -> dict[str, Any]:
    """Counts what is equal in the steps of both searches, which scored the same sets in the same order."""
    pairs = list(zip(here, there, strict=False))
    return {
        "steps": len(there),
        "taken": len(here),
        "equal": {part: sum(own.get(part) == their[part] for own, their in pairs) for part in STEP},
    }


def scores(steps: Records) -> dict[str, Any]:
    """The mean score of random and of Bayesian candidates of a search, its best score and its steps."""
    found: dict[str, Any] = {"steps": len(steps), "best": max((each["score"] for each in steps), default=None)}
    for name, kind in (("random", False), ("bayesian", True)):
        own = [each["score"] for each in steps if each["bayesian"] is kind]
        found[name] = statistics.fmean(own) if own else None
    return found


def texts_of(count: int) -> Iterator[tuple[str, str]]:
    """The first prompts of every domain by name, one of each domain after another."""
    for index, prompts in enumerate(zip(*(prompts[:count] for prompts in PROMPTS.values()), strict=True), start=1):
        yield from ((f"{domain} {index}", prompt) for domain, prompt in zip(PROMPTS, prompts, strict=True))


def given_sets(layers: int) -> dict[str, tuple[int, ...]]:
    """Sets of skipped sublayers for drafts without a search."""
    free = 2 * layers - 4
    random = [random_point(free, int(free * 0.45), generator_of(0, index)) for index in (1, 2)]
    return {
        "alternate": alternately_skipped(layers),
        "even": evenly_skipped(layers, 0.45),
        "all": tuple(range(2, 2 * layers - 2)),
        **{f"random {index}": tuple((point.nonzero()[0] + 2).tolist()) for index, point in enumerate(random, start=1)},
    }


def script_options(clone: Path) -> dict[str, float]:
    """The values of their shell script, by the options of their program."""
    text = (clone / "eval_llama.sh").read_text(encoding="utf-8")
    found = dict(re.findall(r"^([A-Z_]+)=([\d.]+)", text, re.MULTILINE))
    return {name.lower().replace("_", "-"): json.loads(found[name]) for name in OPTIONS}


def compare_drafts(side: Process, model: Any, tokenizer: Any, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rounds by given sets."""
    side.ask("start", options=script_options(options.clone), flags=[], seed=SEED)
    here = Here(model, tokenizer, {"max_optimization_steps": 0})
    for name, skipped in given_sets(here.engine.target.layer_count).items():
        here.skip(skipped)
        side.ask("skip", attention=[i // 2 for i in skipped if not i % 2], mlp=[i // 2 for i in skipped if i % 2])
        for text, prompt in texts_of(options.texts):
            token_ids = here.engine.encode(prompt)
            there = side.ask("write", token_ids=token_ids, rounds=options.rounds)
            written = here.write(token_ids, len(there["token_ids"]) + MORE_TOKENS, [])
            yield {"set": name, **compare_text(text, written, here.rounds, there)}


def compare_search(name: str, side: Process, model: Any, tokenizer: Any, options: argparse.Namespace) -> dict[str, Any]:
    """A search over all texts: theirs, ours with their candidates, and ours with its own."""
    changed, settings = SEARCHES[name]
    script = {**script_options(options.clone), **changed}
    side.ask("start", options=script, flags=["optimization", "bayes"], seed=SEED)
    here, own = Here(model, tokenizer, settings), Here(model, tokenizer, settings)
    texts: Records = []
    here_steps, there_steps, own_steps = Records(), Records(), Records()
    for text, prompt in texts_of(options.search_texts):
        token_ids = here.engine.encode(prompt)
        there = side.ask("write", token_ids=token_ids, rounds=options.rounds)
        new_tokens = len(there["token_ids"]) + MORE_TOKENS
        written = here.write(token_ids, new_tokens, [step["skipped"] for step in there["steps"]])
        own.write(token_ids, new_tokens, None)
        here_steps += here.steps
        there_steps += there["steps"]
        own_steps += own.steps
        texts.append(compare_text(text, written, here.rounds, there))
        if there_steps and there_steps[-1]["ended"]:
            break
    return {
        "search": name,
        **compare_steps(here_steps, there_steps),
        "scores": {"there": scores(there_steps), "here": scores(own_steps)},
        "texts": texts,
        "taken_steps": [[each["bayesian"], each["skipped"], each["score"]] for each in there_steps],
    }


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """What is equal, by model, and the scores of both searches with candidates of their own, in Markdown."""
    models = [result["model"] for result in results.values()]
    lines = [_row("equal", *models), _row(*["---"] * (1 + len(models)))]
    counts = [equal_counts(result) for result in results.values()]
    lines += [_row(what, *(f"{each[what][0]} of {each[what][1]}" for each in counts)) for what in counts[0]]
    lines += ["", _row("model", "search", "steps", "best score", "random candidates", "Bayesian candidates")]
    lines.append(_row(*["---"] * 6))
    for result in results.values():
        for each in result["searches"]:
            there, here = each["scores"]["there"], each["scores"]["here"]
            both = (f"{_score(there[part])}, {_score(here[part])}" for part in ("best", "random", "bayesian"))
            lines.append(_row(result["model"], each["search"], f"{there['steps']}, {here['steps']}", *both))
    rows = [row for result in results.values() for row in _texts(result)]
    counts_of = {part: sum(row[part] for row in rows) for part in ("rounds", "rejected", "beside")}
    lines += [
        "",
        f"Of the {counts_of['rounds']} rounds {counts_of['rejected']} reject a draft token, and {counts_of['beside']} "
        "accept one beside the path. Confidences of equal tokens differ by at most "
        f"{max(row['confidence'] for row in rows):.0e}.",
    ]
    return "\n".join(lines)


def _texts(result: Mapping[str, Any]) -> Records:
    return [*result["drafts"], *(text for each in result["searches"] for text in each["texts"])]


def equal_counts(result: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """How many of what is compared are equal, and how many there are, by its name in the table."""
    searches = result["searches"]
    found = {}
    for name, rows in (
        ("by given sets", result["drafts"]),
        ("while it searches", [text for each in searches for text in each["texts"]]),
    ):
        found[f"texts {name}"] = sum(row["same_text"] for row in rows), len(rows)
        for part, what in ROUND.items():
            rounds = sum(row["equal"][part] for row in rows), sum(row["rounds"] for row in rows)
            found[f"rounds {name}: {what}"] = rounds
    for part, what in STEP.items():
        found[f"steps of searches: {what}"] = (
            sum(each["equal"][part] for each in searches),
            sum(max(each["steps"], each["taken"]) for each in searches),
        )
    return found


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _score(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def commit_of(clone: Path) -> str | None:
    """The commit of a clone."""
    command = ["git", "-C", str(clone), "rev-parse", "HEAD"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return None


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs both and compares them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=Path, help="clone of hemingkx/SWIFT")
    parser.add_argument("--python", required=True, help="interpreter of an environment with transformers 4.37.1")
    parser.add_argument("--model", default="tiny", help="a Llama model")
    parser.add_argument("--texts", type=int, default=1, help="texts a domain for drafts by given sets")
    parser.add_argument("--search-texts", type=int, default=10, help="texts a domain for searches")
    parser.add_argument("--rounds", type=int, default=60, help="rounds a text")
    parser.add_argument("--searches", nargs="*", default=list(SEARCHES), choices=list(SEARCHES))
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parse_and_check(parser, arguments, writes=lambda given: given.out is not None)
    if not (options.clone / "evaluation_llama" / "inference_swift.py").is_file():
        parser.error(f"'{options.clone}' is no clone of hemingkx/SWIFT")
    model, tokenizer = load_model(options.model, dtype="float32", device="cpu", unpack=True)
    folder, clone = str(Path(str(resolve_name(options.model))).resolve()), str(options.clone.resolve())
    with Process("referee_sides.swift.Swift", 1, options.python, clone=clone, model=folder) as side:
        authors = {"commit": commit_of(options.clone), "versions": side.ask("describe")}
        result: dict[str, Any] = {"stamp": make_stamp(torch.device("cpu")), "model": options.model, "authors": authors}
        result |= {"drafts": list(compare_drafts(side, model, tokenizer, options)), "searches": []}
        for name in options.searches:
            print(f"search: {name}", file=sys.stderr)
            result["searches"].append(compare_search(name, side, model, tokenizer, options))
    print(table({options.model: result}))
    if options.out is not None:
        options.out.write_text(json.dumps(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
