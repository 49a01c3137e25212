"""What ``auto`` would bring on machines whose costs are known: recorded answers, replayed on a simulated clock.

``python benchmarks/auto_replay.py record --model smollm2 --unpack --suite SPEC --suite SPEC --limit 80 --out TEXTS``
``python benchmarks/auto_replay.py play TEXTS ROWS...``

``record`` answers the questions of suites by plain decoding, and keeps for each token of an answer what the layer draft
of ``auto`` chooses there and how confident it is. ``play`` lets ``auto`` plan rounds over these answers, where forwards
take what files of ``benchmarks/rows.py`` say, and prints for each file and suite the speedup over plain decoding, and
by what drafted the share of the time. Nothing is timed, so that a change of the planning by one percent shows at once,
and how it does on a processor that is not there.

Simpler than a real run: forwards take what the file says, exactly; a draft reads the target's keys and values, and goes
on with the recorded confidences after a wrong token; what a probe guesses is always wrong; answers are one after the
other, with ``--planning`` seconds for the planning of a round.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import harmonic_mean
from typing import Any, NamedTuple

import torch

from selfspec import Engine, SamplingParams
from selfspec.decoding.draft import Draft, LayerDraft, MtpDraft, NoDraft, Proposal, RunDraft, RunRound, TokenDraft
from selfspec.decoding.drafter import Feedback, Prefill
from selfspec.decoding.suffixes import common
from selfspec.files import replace_file
from selfspec.methods.auto.drafting import AutoDrafter
from selfspec.methods.auto.known import Experience
from selfspec.methods.auto.layer_drafts import LayerChoice
from selfspec.methods.auto.method import Auto
from selfspec.methods.auto.preparation import Assignment
from selfspec.model.kept import KeptSet
from selfspec.planning.acceptance_tables import LOW_BIT_CONFIDENCE, MATCH_LENGTH, PROBABILITY, AcceptanceRate
from selfspec.runtimes.costs.live import LiveCosts
from selfspec.runtimes.costs.rows import RowCosts
from selfspec.runtimes.precision import FULL_BITS, Precision
from selfspec.sampling.acceptance import EMPTY_TREE, Acceptance, TokenTree
from selfspec.types import PhaseSeconds
from selfspec_lab.bench.run.prompts import answer_suite
from selfspec_lab.bench.suites import read_suite
from selfspec_lab.widening import load_model

DELTA = 0.02
LONGEST_RUN = 64
"""Rounds of a run in one call."""
WRONG = -1
"""A token that is never right, as ids are not negative; others like it are below."""
FIRST = 3
"""Answers that are played before those that count, so that acceptance is known."""


class Text(NamedTuple):
    """A recorded answer; entry ``i`` of ``chosen`` and ``confidences`` is what the layer draft has for token ``i``."""

    prompt: list[int]
    answer: list[int]
    chosen: list[int]
    confidences: list[float]


class Machine(NamedTuple):
    """What forwards cost by their rows: of the target, and of the layer draft."""

    verify: RowCosts
    draft: RowCosts


# Recording


@torch.inference_mode()
def draft_choices(method: Auto, prompt: Sequence[int], answer: Sequence[int]) -> tuple[list[int], list[float]]:
    """What the layer draft chooses for each token of an answer after the text before it, and how confident it is."""
    trial, target = method._ready.trial, method.target
    assert trial is not None
    text = torch.tensor([*prompt, *answer[:-1]])
    model = target.at(trial.assignment.precision)
    layout = target.lay_out(target.new_sequence(len(text), len(text), len(text)), len(text))
    states = model.run(target.embed(text, layout), trial.assignment.kept.sublayers, layout).hidden_states
    best = model.logits(states[len(prompt) - 1 :]).float().softmax(-1).max(-1)
    return best.indices.tolist(), best.values.tolist()


def record(options: argparse.Namespace) -> dict[str, Any]:
    """Answers the suites, and keeps what the layer draft would have drafted."""
    sources = [read_suite(spec, limit=options.limit) for spec in options.suite]
    model, tokenizer = load_model(options.model, unpack=options.unpack)
    plain, auto = Engine(model, tokenizer, "autoregressive"), Engine(model, tokenizer, "auto")
    method = auto.method
    assert isinstance(method, Auto)
    trial = method._ready.trial
    precision = None if trial is None else trial.assignment.precision
    if not isinstance(precision, Precision):
        raise SystemExit("auto does not draft from low-bit weights on this model; record another one")
    params, found = SamplingParams(max_new_tokens=options.max_new_tokens), dict[str, list[Text]]()
    for source in sources:
        suite, texts = source.load(plain.encode, 0), found.setdefault(source.name, [])
        prompts, _ = answer_suite(suite, plain, params, chat=suite.chat and tokenizer.chat_template is not None)
        for prompt in prompts:
            if len(prompt.answer) > 1:
                own, answer = list(prompt.token_ids), list(prompt.answer)
                texts.append(Text(own, answer, *draft_choices(method, own, answer)))
        print(f"{source.name}: {len(texts)} answers", flush=True)
    return {"model": options.model, "bits": precision.mlp, "suites": found}


# Replaying


@dataclass
class Clock:
    """Simulated seconds. Planning a round and learning from it are two intervals, which take ``planning`` together."""

    planning: float
    now: float = 0.0

    def __call__(self) -> float:
        """The time, after a part of the planning."""
        self.now += self.planning / 4
        return self.now


@dataclass
class Replay:
    """Plays answers by drafters of ``auto``, whose experience lasts from answer to answer."""

    machine: Machine
    bits: int
    planning: float
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # by what drafted

    def __post_init__(self) -> None:
        self.clock = Clock(self.planning)
        self._experience = Experience(*map(AcceptanceRate, (MATCH_LENGTH, PROBABILITY, LOW_BIT_CONFIDENCE)))
        self._verify = LiveCosts(self.machine.verify)
        assignment = Assignment(KeptSet.full(2), Precision.of(self.bits))
        self._layers = LayerChoice(assignment, LiveCosts(self.machine.draft, self._verify))

    def speedup(self, text: Text) -> float:
        """Seconds of plain decoding ÷ those of this answer, both after its first token."""
        began, room = self.clock.now, len(text.answer) - 1
        prefill = Prefill(tuple(text.prompt), text.answer[0], probe=None, room=room)  # type: ignore[arg-type]
        layers = self._layers
        drafter = AutoDrafter(prefill, self._experience, self._verify, layers, DELTA, self.clock)
        written = 1
        while written < len(text.answer):
            draft = drafter.plan()
            if isinstance(draft, NoDraft | TokenDraft) and draft.follow is not None:
                feedback = self._run(draft, text, written)
            else:
                feedback = self._round(draft, text, written)
            drafter.learn(feedback)
            written += len(feedback.acceptance.token_ids)
        return room * self.machine.verify(1) / (self.clock.now - began)

    def _round(self, draft: Draft, text: Text, written: int) -> Feedback:
        """A round of its own."""
        tokens, confidences, forwards, guessed = list[int](), list[float](), list[int](), 0
        probes: tuple[int, ...] = ()
        if isinstance(draft, TokenDraft):
            tokens, probes = list(draft.token_ids), draft.probes
        elif isinstance(draft, LayerDraft):
            tokens, confidences, forwards, guessed = drafted_by_layers(draft, text, written)
        left = text.answer[written:]
        accepted = common(tokens, left[:-1])
        committed = tuple(left[: accepted + 1])
        took = PhaseSeconds(
            draft=sum(map(self.machine.draft, forwards)), verify=self.machine.verify(1 + len(tokens) + len(probes))
        )
        self._spend(draft, took.draft + took.verify)
        proposal = Proposal(
            torch.tensor(tokens, dtype=torch.long),
            TokenTree.chain(len(tokens)),
            confidences=tuple(confidences),
            guessed=guessed,
            forwards=tuple(forwards),
            probes=probes,
        )
        return _feedback(draft, proposal, committed, took)

    def _run(self, first: RunDraft, text: Text, written: int) -> Feedback:
        """Rounds that follow each other."""
        rounds, total, planned = list[RunRound](), 0.0, first
        while True:
            assert not isinstance(planned, MtpDraft)
            tokens, probes = (planned.token_ids, planned.probes) if isinstance(planned, TokenDraft) else ((), ())
            left = text.answer[written:]
            accepted = common(tokens, left[:-1])
            guess = ((WRONG, 0.05),) if accepted in probes else ()
            seconds = self.machine.verify(1 + len(tokens) + len(probes))
            rounds.append(RunRound(planned, tokens, tuple(left[: accepted + 1]), probes, guess, seconds=seconds))
            written += accepted + 1
            total += seconds
            self._spend(planned, seconds + self.planning / 4)
            if written == len(text.answer) or len(rounds) == LONGEST_RUN or planned.follow is None:
                break
            following = planned.follow(rounds[-1])
            if following is None or callable(following):
                break
            planned = following
        committed = tuple(token for each in rounds for token in each.token_ids)
        took = PhaseSeconds(select=self.planning / 4 * len(rounds), verify=total)
        nothing = Proposal(torch.empty(0, dtype=torch.long), EMPTY_TREE)
        return _feedback(first, nothing, committed, took, tuple(rounds))

    def _spend(self, draft: Draft, seconds: float) -> None:
        self.clock.now += seconds
        self.seconds[draft.name or "plain"] += seconds


def _feedback(
    draft: Draft, proposal: Proposal, committed: tuple[int, ...], took: PhaseSeconds, run: tuple[RunRound, ...] = ()
) -> Feedback:
    accepted = Acceptance(tuple(range(len(committed))), committed)
    return Feedback(draft, proposal, accepted, lambda: torch.empty(0), {}, took, None, run)


def drafted_by_layers(draft: LayerDraft, text: Text, written: int) -> tuple[list[int], list[float], list[int], int]:
    """Tokens of a layer draft and what follows it, its confidences, the rows of its forwards, its right guesses."""
    tokens, confidences, forwards, guessed = list[int](), list[float](), list[int](), 0
    limit = min(draft.limit, len(text.answer) - written - 1)
    ended = limit <= 0
    while not ended:
        guesses = [] if draft.guess is None else list(draft.guess(tokens))[: limit - len(tokens) - 1]
        forwards.append(1 + len(guesses))
        for row in range(1 + len(guesses)):
            place = written + len(tokens)
            is_right = tokens == text.answer[written:place]
            tokens.append(text.chosen[place] if is_right else WRONG - place)
            confidences.append(text.confidences[place])
            guessed += row > 0
            ended = (draft.stop is not None and draft.stop.stops(confidences[-1])) or len(tokens) == limit
            if ended or row == len(guesses) or guesses[row] != tokens[-1]:
                break
    if draft.append is not None and tokens:
        room = len(text.answer) - written - 1 - len(tokens)
        tokens += list(draft.append(tuple(tokens), confidences))[:room]
    return tokens, confidences, forwards, guessed


def machine_of(file: dict[str, Any], bits: int) -> Machine:
    """The costs in a file of ``benchmarks/rows.py``, of the model and of its draft with weights of ``bits``."""

    def costs(own: int) -> RowCosts:
        by_rows = {int(rows): each["median"] for rows, each in file["seconds"][str(own)].items()}
        return RowCosts(tuple(by_rows), tuple(by_rows.values()))

    return Machine(costs(FULL_BITS), costs(bits))


def replayed(recorded: dict[str, Any], machine: Machine, planning: float) -> Iterator[str]:
    """Lines of what came of each suite."""
    for name, texts in recorded["suites"].items():
        replay = Replay(machine, recorded["bits"], planning)
        for text in texts[:FIRST]:
            replay.speedup(Text(*text))
        replay.seconds.clear()
        speedups = [replay.speedup(Text(*text)) for text in texts]
        total = sum(replay.seconds.values())
        shares = ", ".join(f"{name} {own / total:.0%}" for name, own in sorted(replay.seconds.items()))
        yield f"  {name}: {harmonic_mean(speedups):.3f}, worst {min(speedups):.2f}, of the time {shares}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Records, or replays and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording, playing = commands.add_parser("record"), commands.add_parser("play")
    recording.add_argument("--model", default="smollm2")
    recording.add_argument("--unpack", action="store_true")
    recording.add_argument("--suite", action="append", required=True, help="as of selfspec bench run")
    recording.add_argument("--limit", type=int, help="most questions of each category")
    recording.add_argument("--max-new-tokens", type=int, default=128)
    recording.add_argument("--out", type=Path, required=True)
    playing.add_argument("texts", type=Path)
    playing.add_argument("rows", type=Path, nargs="+", help="files of benchmarks/rows.py")
    playing.add_argument("--planning", type=float, default=5e-4, help="seconds of planning a round")
    options = parser.parse_args(arguments)
    if options.command == "record":
        replace_file(options.out, json.dumps(record(options)))
        return
    recorded = json.loads(options.texts.read_text(encoding="utf-8"))
    for path in options.rows:
        print(f"{path.stem}:")
        print(
            *replayed(
                recorded, machine_of(json.loads(path.read_text(encoding="utf-8")), recorded["bits"]), options.planning
            ),
            sep="\n",
        )


if __name__ == "__main__":
    main()
