"""The training loop of one phase, with checkpoints to resume from."""

from __future__ import annotations

import io
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import replicas
from data import Mixer
from model import Llama, Shape, initial_weights
from optimizer import Optimizer, Rates, Trainable
from phases import Phase
from selfspec.files import replace_file

STEPS_BETWEEN_CHECKPOINTS = 25
_STEPS_BETWEEN_LOG_LINES = 20


@dataclass(frozen=True, slots=True)
class Settings:
    """Options that all phases of a run share.

    Attributes:
        shape: size of the model.
        rates: settings of the optimizer.
        seed: of the weights, the order of the text and the subsets.
        device: where to train.
        compiled: use ``torch.compile``.
        work: folder of the checkpoints and logs.
    """

    shape: Shape
    rates: Rates
    seed: int
    device: torch.device
    compiled: bool
    work: Path


def initial_checkpoint(settings: Settings) -> dict[str, Any]:
    """Return the state before the first step: initial weights, no optimizer state, nothing read."""
    weights = initial_weights(settings.shape, settings.seed)
    return {"masters": weights, "optimizer": None, "step": 0, "tokens": 0, "phase_step": 0, "seed": settings.seed}


def train_phase(phase: Phase, mixer: Mixer, start: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """Train one phase, or the rest of it.

    Args:
        phase: what to do.
        mixer: gives the rows.
        start: checkpoint of the phase before; the phase's own checkpoint in the work folder goes first.
        settings: of the run.

    Returns:
        the phase's last checkpoint: float32 ``masters`` by name, ``optimizer`` state, ``step`` counted over all phases,
        ``phase_step``, ``tokens`` read so far and ``seed``.
    """
    path = settings.work / f"{phase.name}.pt"
    checkpoint = torch.load(path, map_location="cpu") if path.exists() else start | {"phase_step": 0}
    if checkpoint["seed"] != settings.seed:
        raise ValueError(f"{path} was made with --seed {checkpoint['seed']}; give that seed or another --work folder")
    if checkpoint["phase_step"] >= phase.steps:
        return checkpoint
    trainable = Trainable(checkpoint["masters"], settings.device, torch.bfloat16)
    optimizer = Optimizer(trainable, settings.shape, settings.rates)
    if checkpoint["optimizer"] is not None:
        optimizer.restore(checkpoint["optimizer"])
    objective = phase.objective(Llama(settings.shape, trainable.leaves, settings.compiled), settings.compiled)
    done, step, tokens = (int(checkpoint[key]) for key in ("phase_step", "step", "tokens"))
    losses: dict[str, list[float]] = {}
    progress = tqdm(
        range(done, phase.steps), phase.name, phase.steps, initial=done, mininterval=5, disable=replicas.rank() > 0
    )
    for phase_step in progress:
        stage = phase.stage(phase_step)
        batch = mixer.batch(step, stage.rows, stage.length, phase.mixture)
        inputs, targets = (replicas.own_rows(part).to(settings.device) for part in batch)
        trainable.refresh()
        chooser = random.Random(f"subsets {settings.seed} {step}")
        for name, loss in objective.backward(inputs, targets, chooser).items():
            losses.setdefault(name, []).append(loss)
        replicas.average(list(trainable.gradients.values()))
        optimizer.step(phase.scale(phase_step))
        step, tokens = step + 1, tokens + stage.rows * stage.length
        if replicas.rank() == 0 and step % _STEPS_BETWEEN_LOG_LINES == 0:
            means = {name: round(sum(values) / len(values), 4) for name, values in losses.items()}
            progress.set_postfix(means)
            _log(settings.work / f"{phase.name}.jsonl", {"step": step, "tokens": tokens, **means})
            losses.clear()
        checkpoint = {
            "masters": trainable.masters,
            "optimizer": optimizer.state(),
            "step": step,
            "phase_step": phase_step + 1,
            "tokens": tokens,
            "seed": settings.seed,
        }
        due = (phase_step + 1) % STEPS_BETWEEN_CHECKPOINTS == 0 or phase_step + 1 == phase.steps
        if due and replicas.rank() == 0:
            save_checkpoint(checkpoint, path)
    return checkpoint


def _log(path: Path, record: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def save_checkpoint(checkpoint: dict[str, Any], path: Path) -> None:
    """Write a checkpoint; an interruption leaves the one before it."""
    content = io.BytesIO()
    torch.save(checkpoint, content)
    replace_file(path, content.getvalue())
