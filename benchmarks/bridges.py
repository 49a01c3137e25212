"""Compares a bridge with what its engine has: ``python benchmarks/bridges.py --engine llama_cpp --model FILE``.

Greedy answers to three chat prompts, and to two code edits and an extraction whose answers repeat much of the prompt
(those of ``gguf_files.py``), with vLLM the three of a kind together too (``--together``). Candidates take turns:

- llama.cpp (``--model FILE``): ``none``, llama-cpp-python's prompt lookup with 2 and 10 tokens, the bridge;
- vLLM (``--model FOLDER``, float32): ``none``, its n-gram drafts with 2 and 10 tokens, the bridge.

``again`` is the bridge asked the same once more, so that it can copy its answer; before ``bridge`` it forgets texts.
What it has learned of costs and acceptance it keeps, and a first pass is not timed. Each engine is a process of
``--python``, which has the engine, ``selfspec`` and its numpy in its path. Prints the table; ``--out FILE`` writes
all samples, and for each text that differs from the one without drafts where, and by which margin of the logits.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoTokenizer

from gguf_sides.figures import spread
from gguf_sides.process import Process
from gguf_sides.questions import CHAT, EDITS, ask
from selfspec.files import replace_file
from selfspec_lab.bench.stamp import make_stamp, parse_and_check

KINDS = {"chat": CHAT, "edits": EDITS}
OWN = {"llama_cpp": ("lookup-2", "lookup-10"), "vllm": ("ngram-2", "ngram-10")}
FORGETS, AGAIN, NONE = "bridge", "again", "none"


class Answers(Protocol):
    """An engine with all its candidates."""

    about: dict[str, Any]

    def answer(self, candidate: str, prompts: list[list[int]]) -> dict[str, Any]:
        """Greedy outputs of prompts: their ``token_ids``, tokens ``after_first``, seconds, drafts."""

    def margin(self, token_ids: list[int], one: int, other: int) -> float | None:
        """How much higher one token's logit is; ``None`` where the engine does not say."""


class LlamaCpp:
    """Two processes: with and without the logits of all rows, which drafts need."""

    def __init__(self, options: argparse.Namespace, stack: contextlib.ExitStack, eos_ids: list[int]) -> None:
        self._length, self._eos_ids = options.max_new_tokens, eos_ids
        self._plain, self._drafting = (
            stack.enter_context(
                Process(
                    "bridge_sides.llama_cpp.Llama",
                    options.threads,
                    options.python,
                    path=str(options.model),
                    threads_of_forwards=options.threads,
                    drafts=drafts,
                )
            )
            for drafts in (False, True)
        )
        self.about = {**self._plain.ask("describe"), "row_seconds": self._drafting.ask("measure")}

    def answer(self, candidate: str, prompts: list[list[int]]) -> dict[str, Any]:
        """See ``Answers``; prompts one after the other."""
        if candidate == FORGETS:
            self._drafting.ask("forget")
        side = self._plain if candidate == NONE else self._drafting
        draft = "bridge" if candidate == AGAIN else candidate
        more = {"max_new_tokens": self._length, "eos_ids": self._eos_ids, "draft": draft}
        found = [side.ask("generate", token_ids=prompt, **more) for prompt in prompts]
        total = {name: sum(each[name] for each in found) for name in ("first", "rest", "drafted", "accepted", "rounds")}
        token_ids = [each["token_ids"] for each in found]
        return {"token_ids": token_ids, "after_first": sum(map(len, token_ids)) - len(token_ids), **total}

    def margin(self, token_ids: list[int], one: int, other: int) -> float | None:
        """See ``Answers``."""
        return float(self._drafting.ask("margin", token_ids=token_ids, one=one, other=other))


class Vllm:
    """A process for each candidate."""

    def __init__(self, options: argparse.Namespace, stack: contextlib.ExitStack, eos_ids: list[int]) -> None:
        self._length, self._eos_ids, self._together = options.max_new_tokens, eos_ids, options.together
        self._sides = {
            name: stack.enter_context(
                Process("bridge_sides.vllm.Vllm", options.threads, options.python, path=str(options.model), draft=name)
            )
            for name in (NONE, *OWN["vllm"], "bridge")
            if name in options.candidates or name == NONE
        }
        self.about: dict[str, Any] = self._sides[NONE].ask("describe")

    def answer(self, candidate: str, prompts: list[list[int]]) -> dict[str, Any]:
        """See ``Answers``; prompts one after the other, or together."""
        side = self._sides["bridge" if candidate == AGAIN else candidate]
        if candidate == FORGETS:
            side.ask("forget")
        groups = [prompts] if self._together else [[prompt] for prompt in prompts]
        found = [
            side.ask("generate", prompts=group, max_new_tokens=self._length, eos_ids=self._eos_ids) for group in groups
        ]
        names = ("after_first", "first", "rest", "drafted", "accepted", "rounds")
        total = {name: sum(each[name] for each in found) for name in names}
        if candidate == FORGETS:
            self.about["row_seconds"] = side.ask("row_costs")
        return {"token_ids": [ids for each in found for ids in each["token_ids"]], **total}

    def margin(self, token_ids: list[int], one: int, other: int) -> float | None:
        """Not known."""
        return None


def differences(answers: Answers, prompts: list[list[int]], token_ids: Any, plain: Any) -> list[dict[str, Any]]:
    """Where texts are not those without drafts: the first token, and how much higher the other one's logit was."""
    found = []
    for place, (prompt, own, other) in enumerate(zip(prompts, token_ids, plain, strict=True)):
        at = next((at for at, (one, two) in enumerate(zip(own, other, strict=False)) if one != two), None)
        if at is not None:
            margin = answers.margin([*prompt, *other[:at]], other[at], own[at])
            found.append({"prompt": place, "token": at, "margin": margin})
        elif len(own) != len(other):
            found.append({"prompt": place, "token": min(len(own), len(other)), "margin": None})
    return found


def compare(options: argparse.Namespace, answers: Answers, prompts: dict[str, list[list[int]]]) -> dict[str, Any]:
    """By kind of prompt and candidate what was measured in turns; the first pass does not count."""
    result: dict[str, Any] = {}
    for kind, asked in prompts.items():
        samples: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in options.candidates}
        last: dict[str, Any] = {}
        for turn in range(options.repeats + 1):
            for candidate in options.candidates:
                last[candidate] = found = answers.answer(candidate, asked)
                if turn:
                    samples[candidate]["tokens_per_second"].append(found["after_first"] / found["rest"])
                    samples[candidate]["first_seconds"].append(found["first"])
        plain = last[NONE]["token_ids"]
        result[kind] = {
            name: {
                **{figure: {**spread(values), "samples": values} for figure, values in samples[name].items()},
                **{count: last[name][count] for count in ("drafted", "accepted", "rounds")},
                "tokens": sum(map(len, last[name]["token_ids"])),
                "differs": differences(answers, asked, last[name]["token_ids"], plain),
            }
            for name in options.candidates
        }
    return result


def table(result: dict[str, Any]) -> str:
    """The figures as a table: tokens a second after the first, their ratio to none, and texts that are the same."""
    lines = ["| prompts | drafts | tokens/s (lowest to highest) | to none | seconds to first | texts that differ |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for kind, found in result["figures"].items():
        base = found[NONE]["tokens_per_second"]["median"]
        for name, own in found.items():
            rate, first = own["tokens_per_second"], own["first_seconds"]["median"]
            speed = f"{rate['median']:.2f} ({rate['lowest']:.2f} to {rate['highest']:.2f})"
            lines.append(
                f"| {kind} | {name} | {speed} | {rate['median'] / base:.2f} | {first:.2f} | {len(own['differs'])} |"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=sorted(OWN), required=True)
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file, or a folder for vLLM")
    parser.add_argument("--python", default=sys.executable, help="interpreter that has the engine")
    parser.add_argument("--candidates", type=lambda text: text.split(","), metavar="A,B")
    parser.add_argument("--only", choices=sorted(KINDS), help="prompts of one kind")
    parser.add_argument("--together", action="store_true", help="the prompts of a kind in one batch (vLLM)")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path)
    options = parse_and_check(parser, arguments, lambda given: given.out is not None)
    known = (NONE, *OWN[options.engine], FORGETS, AGAIN)
    options.candidates = options.candidates or list(known)
    if unknown := [name for name in options.candidates if name not in known]:
        parser.error(f"there is no {unknown[0]}; choose from {', '.join(known)}")
    if NONE not in options.candidates:
        parser.error(f"the candidates need {NONE}, with which texts are compared")
    file = options.model.is_file()
    if file == (options.engine == "vllm"):
        parser.error("--model must be a GGUF file for llama_cpp, and a folder for vllm")
    given = {"gguf_file": options.model.name} if file else {}
    tokenizer: Any = AutoTokenizer.from_pretrained(options.model.parent if file else options.model, **given)
    prompts = {kind: ask(tokenizer, texts) for kind, texts in KINDS.items() if options.only in (None, kind)}
    with contextlib.ExitStack() as stack:
        answers: Answers = (Vllm if options.engine == "vllm" else LlamaCpp)(options, stack, [tokenizer.eos_token_id])
        figures = compare(options, answers, prompts)
    shown = {name: value for name, value in vars(options).items() if name not in ("model", "python", "out")}
    result = {
        "model": options.model.name,
        "options": shown,
        **make_stamp(torch.device("cpu")),
        "engine": answers.about,
        "figures": figures,
    }
    print(table(result))
    if options.out:
        replace_file(options.out, (json.dumps(result, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
