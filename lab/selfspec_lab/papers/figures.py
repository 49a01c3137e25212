"""The figures of a table, prompt by prompt: by the clock here, and replayed on the paper's machine."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from selfspec_lab.bench.options import PLAIN
from selfspec_lab.bench.report.medians import decode_speed
from selfspec_lab.bench.report.read import Run
from selfspec_lab.bench.run.measurement import Measurement
from selfspec_lab.papers.costs import ProfileCost, RuleCost, roofline_cost, with_selection
from selfspec_lab.papers.tables import Reported, Table
from selfspec_lab.replay import CostModel, Played, play, replayed_speedup, tokens_per_layer

MACHINES = ("clock", "machine", "rule", "profile")
"""Speedups by the clock here, on the paper's GPU by roofline, by the papers' rule, and by this machine's profile."""


@dataclass(frozen=True)
class PromptFigures:
    """The figures of one method on one prompt, means over its seeds.

    Attributes:
        task: index of the column.
        prompt: key of the prompt.
        text: what the prompt is about. The turns of a question share it, and so do the tasks that ask about one text.
        speedups: by name in ``MACHINES``.
        rounds: number of rounds.
        tokens: tokens that they committed.
        drafted: draft tokens.
        accepted: those accepted.
        etpl: tokens per loaded layer.
        skipped: shares of the attention and of the MLP sublayers that drafts skipped, weighted by their steps; drafts
            of the whole model, as those before a first selection, are left out. ``None`` without any other.
        trace: of each seed the rounds: kept sublayers, rows, accepted tokens and committed tokens.
    """

    task: int
    prompt: str
    text: str
    speedups: Mapping[str, float]
    rounds: int
    tokens: int
    drafted: int
    accepted: int
    etpl: float
    skipped: tuple[float, float] | None
    trace: tuple[Any, ...]


def read_figures(run: Run, table: Table, model: Reported, column: int, task: int) -> dict[str, list[PromptFigures]]:
    """The figures of a run by method; prompts that plain decoding or the method failed on are left out.

    Args:
        run: the run of one task.
        table: the table.
        model: the paper's model, whose machine the rounds are replayed on.
        column: index of the task in the table.
        task: index of the task among those measured.
    """
    by_candidate: dict[str, dict[str, list[Measurement]]] = defaultdict(lambda: defaultdict(list))
    for each in run.measurements:
        if each.error is None and len(each.token_ids) > 1:
            by_candidate[each.candidate][each.prompt].append(each)
    new_tokens, layers = int(run.fields["options"]["max_new_tokens"]), run.sublayers // 2
    profile = ProfileCost.from_profile({"layers": layers, "rows": run.fields["rows"]})
    machine = roofline_cost(model.device or table.device, model.shape(column), bits=model.bits)
    texts = text_of([prompt["key"] for prompt in run.fields["prompts"]])
    found: dict[str, list[PromptFigures]] = {}
    for label, row in table.methods.items():
        costs: dict[str, CostModel] = {"machine": machine, "rule": RuleCost(), "profile": profile}
        settings = run.fields["settings"].get(label, {})
        found[label] = [
            _of_prompt(
                (task, prompt, texts[prompt]),
                samples,
                by_candidate[PLAIN][prompt],
                costs,
                row.method,
                settings,
                new_tokens,
                layers,
            )
            for prompt, samples in by_candidate[label].items()
            if prompt in by_candidate[PLAIN]
        ]
    return found


def text_of(keys: Sequence[str]) -> dict[str, str]:
    """The text that each prompt of a run is about, by key: its question, without the number of the turn.

    The turns of a question are numbered from 1, in order; those of HumanEval's keys are no turns.
    """
    turns: dict[str, list[str]] = defaultdict(list)
    for key in keys:
        stem, _, number = key.rpartition("/")
        turns[stem].append(number)
    questions = {stem for stem, found in turns.items() if found == [str(turn + 1) for turn in range(len(found))]}
    return {key: stem if (stem := key.rpartition("/")[0]) in questions else key for key in keys}


def _of_prompt(
    names: tuple[int, str, str],
    samples: Sequence[Measurement],
    plain: Sequence[Measurement],
    costs: Mapping[str, CostModel],
    method: str,
    settings: Mapping[str, Any],
    new_tokens: int,
    layers: int,
) -> PromptFigures:
    plain_speed = statistics.median(decode_speed(each) or 0.0 for each in plain)
    drops = settings.get("drop_unsure") and settings.get("dynamic_length", True)  # DEL-E has no threshold to fall below
    longest = int(settings["d_max"]) if drops else None
    rounds = [play(each.rounds or (), new_tokens=new_tokens, longest=longest) for each in samples]
    speedups = {"clock": statistics.fmean((decode_speed(each) or 0.0) / plain_speed for each in samples)}
    skipped = _skipped(each for own in rounds for each in own)
    for name, cost in costs.items():
        if name != "profile" and skipped is not None:  # an output that ended before a selection took no time for it
            cost = with_selection(cost, method)
        speedups[name] = statistics.fmean(
            replayed_speedup(own, each.prompt_token_count, cost) for own, each in zip(rounds, samples, strict=True)
        )
    records = [record for each in samples for record in each.rounds or ()]
    return PromptFigures(
        *names,
        speedups,
        rounds=len(records),
        tokens=sum(len(record.token_ids) for record in records),
        drafted=sum(record.drafted for record in records),
        accepted=sum(record.accepted for record in records),
        etpl=statistics.fmean(tokens_per_layer(each, layers) if each else 0.0 for each in rounds),
        skipped=skipped,
        trace=tuple(_trace(each) for each in samples),
    )


def _skipped(rounds: Iterable[Played]) -> tuple[float, float] | None:
    drafts = [each for each in rounds if each.steps and each.attention + each.mlp < 2]
    steps = sum(each.steps for each in drafts)
    if not steps:
        return None
    attention, mlp = (
        sum((1 - share) * each.steps for share, each in zip(shares, drafts, strict=True)) / steps
        for shares in ([each.attention for each in drafts], [each.mlp for each in drafts])
    )
    return attention, mlp


def _trace(sample: Measurement) -> tuple[Any, ...]:
    return tuple(
        (record.kept and record.kept.sublayers, record.candidates, record.accepted, record.token_ids)
        for record in sample.rounds or ()
    )


def pooled(figures: Sequence[PromptFigures], name: str, machine: str = "clock") -> float | None:
    """A figure of ``tables.FIGURES`` over some prompts; ``None`` without any, or where it is undefined.

    Args:
        figures: of one method.
        name: of the figure.
        machine: for a speedup, its name in ``MACHINES``.
    """
    if not figures:
        return None
    ways: dict[str, Callable[[], float | None]] = {
        "speedup": lambda: statistics.fmean(each.speedups[machine] for each in figures),
        "M": lambda: _ratio(sum(each.tokens for each in figures), sum(each.rounds for each in figures)),
        "acceptance": lambda: _ratio(sum(each.accepted for each in figures), sum(each.drafted for each in figures)),
        "etpl": lambda: statistics.fmean(each.etpl for each in figures),
        "attention_skipped": lambda: _mean_skipped(figures, 0),
        "mlp_skipped": lambda: _mean_skipped(figures, 1),
    }
    return ways[name]()


def _ratio(over: float, under: float) -> float | None:
    return over / under if under else None


def _mean_skipped(figures: Sequence[PromptFigures], which: int) -> float | None:
    shares = [each.skipped[which] for each in figures if each.skipped is not None]
    return statistics.fmean(shares) if shares else None
