"""What a table claims beyond its numbers: the order of its methods, and how a figure moves. Decided by paired tests."""

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from selfspec_lab.checks import Check, compare, not_applicable
from selfspec_lab.papers.costs import SELECTION
from selfspec_lab.papers.figures import PromptFigures
from selfspec_lab.papers.tables import Reported, Table

PLAIN = "plain decoding"

Figures = Mapping[str, Sequence[PromptFigures]]

Pair = tuple[PromptFigures | None, PromptFigures | None]
"""Figures of two methods on one prompt; ``None`` is plain decoding."""


class Order(NamedTuple):
    """Two methods of which the paper finds the first faster, with the logarithm of the ratio where it has one."""

    first: str
    second: str
    effect: float | None


def claimed_order(table: Table, model: Reported) -> list[Order]:
    """The pairs of methods that are in one order on all models of the paper; none of a picture without numbers.

    Plain decoding is one of the methods. A method's speedup on a model is the overall one, or the mean over the tasks.

    Args:
        table: the table.
        model: the paper's model whose ratios are given.
    """
    if table.order:
        return [Order(first, second, None) for first, second in table.order]
    speeds: dict[str, list[float | None]] = {
        label: [_overall(table, label, index) for index in range(len(table.models))] for label in table.methods
    } | {PLAIN: [1.0] * len(table.models)}
    orders = []
    for one, other in combinations(speeds, 2):
        each = list(zip(speeds[one], speeds[other], strict=True))
        ratios = [math.log(mine / theirs) for mine, theirs in each if mine is not None and theirs is not None]
        if len(ratios) < len(each):
            continue
        if all(ratio > 0 for ratio in ratios):
            orders.append(Order(one, other, ratios[table.models.index(model)]))
        elif all(ratio < 0 for ratio in ratios):
            orders.append(Order(other, one, -ratios[table.models.index(model)]))
    return orders


def _overall(table: Table, label: str, index: int) -> float | None:
    model = table.models[index]
    overall = table.reported(model, label, -1, "speedup")
    if overall is not None:
        return overall
    cells = [table.reported(model, label, column, "speedup") for column in range(len(table.tasks))]
    known = [cell for cell in cells if cell is not None]
    return statistics.fmean(known) if known else None


def judge_table(table: Table, model: Reported, figures: Figures, unable: Mapping[str, str]) -> list[Check]:
    """Decides the claims of a table.

    Args:
        table: the table.
        model: the paper's model with which outputs are compared.
        figures: by method those of all prompts of all tasks.
        unable: by method, why these outputs cannot show what it does.
    """
    checks = (
        []
        if table.trend == "size"
        else [check for order in claimed_order(table, model) for check in _judge_order(table, order, figures, unable)]
    )
    if table.trend == "attention":
        checks += _judge_attention(figures)
    return checks


def _judge_order(table: Table, order: Order, figures: Figures, unable: Mapping[str, str]) -> list[Check]:
    statement = f"{order.first} is faster than {order.second}"
    for label in order[:2]:
        if label in unable:
            return [not_applicable(statement, unable[label])]
    every = _pairs(order, figures)
    selecting = [label in table.methods and _selects(table, label) for label in order[:2]]
    pairs = [pair for pair in every if all(_selected(each) for each, asks in zip(pair, selecting, strict=True) if asks)]
    early = f"{len(every) - len(pairs)} prompts left out, whose outputs end before the first selection"
    if every and not pairs:
        return [not_applicable(statement, early)]
    if PLAIN in order[:2] and all(each is None or each.skipped is None for pair in pairs for each in pair):
        return [
            not_applicable(
                statement, "rows of a verification are nearly free in the cost model, so it cannot be slower"
            )
        ]
    different = [pair for pair in pairs if pair[0] is None or pair[1] is None or pair[0].trace != pair[1].trace]
    texts = _by_text(different)
    notes = [early] if len(pairs) < len(every) else []
    if len(texts) < len(different):
        notes.append(f"{len(different)} prompts of {len(texts)} texts, a mean for each")
    checks = []
    for machine, where in (("machine", "on the paper's machine"), ("clock", "by the clock here")):
        checks.append(
            compare(
                f"{statement}, {where}",
                [
                    statistics.fmean(math.log(_speed(one, machine) / _speed(other, machine)) for one, other in own)
                    for own in texts
                ],
                "; ".join(notes),
                effect=order.effect,
                same=len(pairs) - len(different),
                what="log of the ratio of speeds",
                counts=machine == "machine",
            )
        )
    return checks


def _by_text(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """The pairs of each text: what several prompts ask of one text is not independent."""
    texts: dict[str, list[Pair]] = {}
    for pair in pairs:
        text = next(each.text for each in pair if each is not None)
        texts.setdefault(text, []).append(pair)
    return list(texts.values())


def _pairs(order: Order, figures: Figures) -> list[Pair]:
    """The prompts that both methods have figures of."""
    by_prompt = [
        {(each.task, each.prompt): each for each in figures[label]} if label != PLAIN else None
        for label in (order.first, order.second)
    ]
    keys = set.intersection(*({*found} for found in by_prompt if found is not None))
    return [
        (by_prompt[0] and by_prompt[0][key], by_prompt[1] and by_prompt[1][key])  # type: ignore[misc]
        for key in sorted(keys)
    ]


def _selects(table: Table, label: str) -> bool:
    """Whether a method of the table chooses its sublayers while it generates."""
    return any(name in table.methods[label].method for name in SELECTION)


def _selected(figures: PromptFigures | None) -> bool:
    return figures is not None and figures.skipped is not None


def _speed(figures: PromptFigures | None, machine: str) -> float:
    return 1.0 if figures is None else figures.speedups[machine]


def _judge_attention(figures: Figures) -> list[Check]:
    """KnapSpec, figure 3: the lead of attention's skipped share over MLP's, at the longest and the shortest context."""
    checks = []
    for label in figures:
        by_task: dict[int, dict[str, float]] = {}
        for each in figures[label]:
            if each.skipped is not None:
                by_task.setdefault(each.task, {})[each.prompt] = each.skipped[0] - each.skipped[1]
        if len(by_task) < 2:
            continue
        shortest, longest = by_task[min(by_task)], by_task[max(by_task)]
        growth = [longest[prompt] - own for prompt, own in shortest.items() if prompt in longest]
        statement = f"{label} skips more attention, compared with MLP, at the longest context than at the shortest"
        checks.append(compare(statement, growth, what="growth of the lead", counts=label == "KnapSpec"))
    return checks
