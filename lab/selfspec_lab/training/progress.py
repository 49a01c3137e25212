"""A training that is measured as it goes, and continued where it was interrupted."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from selfspec_lab.training.early_exit import EarlyExit

Point = dict[str, float]
"""Of a curve: step, tokens read, loss (its mean since the point before), agreement and perplexity."""


def train_resumable(
    exits: EarlyExit,
    tokens: torch.Tensor,
    held_out: torch.Tensor,
    every: int,
    work: Path | None,
    report: Callable[[Point], None],
) -> list[Point]:
    """Trains, and measures at the start, every some steps, and at the end.

    Args:
        exits: what is trained.
        tokens: long ``[tokens]``, to train on.
        held_out: long ``[tokens]``, to measure on.
        every: steps between measurements.
        work: folder of ``state.pt``, which is continued from and replaced at each point, and ``curve.jsonl``; ``None``
            keeps neither.
        report: gets each point.

    Returns:
        The points, those of interrupted runs included.

    Raises:
        InvalidParameterError: the state is of another training.
    """
    training, curve, losses = exits.training, list[Point](), list[float]()
    if work is not None and (work / "state.pt").exists():
        saved: dict[str, Any] = torch.load(work / "state.pt")
        exits.restore(saved["exits"])
        curve = saved["curve"]

    def add(step: int) -> None:
        loss = sum(losses) / len(losses) if losses else 0.0
        point = {"step": step, "tokens": step * training.rows * training.length, "loss": loss}
        curve.append(point | exits.measure(held_out))
        losses.clear()
        if work is not None:
            work.mkdir(parents=True, exist_ok=True)
            torch.save({"exits": exits.state(), "curve": curve}, work / "state.part")
            (work / "state.part").replace(work / "state.pt")
            lines = "".join(json.dumps(one) + "\n" for one in curve)
            (work / "curve.jsonl").write_text(lines, encoding="utf-8")
        report(curve[-1])

    def after(step: int, loss: float) -> None:
        losses.append(loss)
        if (step + 1) % every == 0 or step + 1 == training.steps:
            add(step + 1)

    if not curve:
        add(0)
    exits.train(tokens, after)
    return curve
