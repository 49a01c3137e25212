"""Random forwards that two runners run: prompts, rows, trees, drafts, rollbacks; whether they give the same.

Numbers may differ by rounding. The bound is relative to the largest logit of a row: the square root of the dtype's
machine epsilon (3.5e-4 for float32, 3.1e-2 for float16, 8.8e-2 for bfloat16), or, where a model carries rounding
further, ``_NOISES`` times as far as the reference's own logits move when each sublayer's output is rounded otherwise.
The token of the largest logit has to be the same, unless the reference has two that are as large to within ``_TIE``
epsilon, or within that distance.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from selfspec.model.forward import Forward, SequenceState
from selfspec.runtimes.logits import Logits
from selfspec.runtimes.runner import Runner

MOST_ROWS = 16
"""Of rows and trees; of longer prompts this many last rows are compared."""

_LONGEST, _LONG_SHARE = 640, 0.3
"""Tokens of a prompt, at most, and how many prompts are longer than ``_SHORT``."""

_SHORT = 48
_TIE = 16
"""Units of the last place within which two logits count as equal."""

_NOISES, _LARGEST_BOUND = 3.0, 0.5
"""Two computations, each with its rounding, are apart by up to twice the noise of one in the mean."""

_KINDS = ("step", "rows", "tree", "draft", "rows", "cut", "pair", "step")
"""The forwards after a prompt, in random order; ``rows`` and ``tree`` reject some of theirs."""


@dataclass(frozen=True)
class Stage:
    """The rows of one forward.

    Attributes:
        kind: what it is, for reasons.
        start: the committed slots before it; fewer than are in the cache where some are rolled back.
        token_ids: of the rows.
        paths: of each row of a tree the rows that it sees, ascending to itself; ``None`` for one after the other.
        sublayers: those that run.
        kept: the rows that are committed, ascending.
        pair: another sequence begins with the same tokens in the same forward.
    """

    kind: str
    start: int
    token_ids: tuple[int, ...]
    paths: tuple[tuple[int, ...], ...] | None
    sublayers: tuple[int, ...]
    kept: tuple[int, ...]
    pair: bool = False

    def __str__(self) -> str:
        return f"{self.kind} of {len(self.token_ids)} rows after {self.start} tokens"


def random_stages(vocabulary: int, sublayers: int, most: int, *, trees: bool, seed: int) -> list[Stage]:
    """One text with all kinds of forwards.

    Args:
        vocabulary: number of tokens.
        sublayers: number of sublayers of the model, even.
        most: cache slots that a text may take.
        trees: the model can verify trees.
        seed: of all choices.
    """
    draw, every = random.Random(seed), tuple(range(sublayers))
    room = MOST_ROWS * (len(_KINDS) + 1)
    longest = max(1, min(_LONGEST, most - room))
    length = draw.randint(1, longest if draw.random() < _LONG_SHARE else min(_SHORT, longest))
    rows = max(1, min(MOST_ROWS, (most - length) // (len(_KINDS) + 1)))

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(vocabulary) for _ in range(count))

    stages = [Stage("a prompt", 0, tokens(length), None, every, tuple(range(length)))]
    for kind in draw.sample(_KINDS, len(_KINDS)):
        count = 1 if kind == "step" else draw.randint(1, rows)
        start, stage = length, Stage(f"a {kind}", length, tokens(count), None, every, tuple(range(count)))
        if kind == "rows":
            stage = replace(stage, kind="a verification", kept=stage.kept[: draw.randint(1, count)])
        elif kind == "tree" and trees:
            paths = _random_tree(count, draw)
            stage = replace(stage, paths=paths, kept=draw.choice(paths))
        elif kind == "draft":
            some = tuple(sorted(draw.sample(every, draw.randint(1, sublayers))))
            stage = replace(stage, sublayers=some, kept=())
        elif kind == "cut":
            start = draw.randint(max(1, length - rows), length)
            stage = replace(stage, kind="rows after a rollback", start=start)
        elif kind == "pair":
            stage = replace(stage, kind="two sequences", pair=True)
        stages.append(stage)
        length = start + len(stage.kept)
    return stages


class Expected(NamedTuple):
    """What a reference gives in a forward.

    Attributes:
        logits: of the rows.
        noise: how far they move by other rounding, of the largest of a row.
    """

    logits: Logits
    noise: float = 0.0


@torch.inference_mode()
def run_stages(
    runner: Runner, stages: Sequence[Stage], slots: int, noise: torch.Generator | None = None
) -> Iterator[Logits]:
    """Runs the forwards of a text one after the other; the logits of up to ``MOST_ROWS`` last rows of each.

    Args:
        runner: a runner at any precision.
        stages: the forwards.
        slots: of the cache.
        noise: moves what each sublayer gives by up to a unit of the last place, as if it were rounded otherwise.
    """
    state = SequenceState(runner.new_cache(slots))
    for stage in stages:
        state.cache.length = stage.start
        yield _run(runner, stage, state, noise)
        state.cache.commit(stage.kept)


def expect(runner: Runner, stages: Sequence[Stage], slots: int) -> Iterator[Expected]:
    """What a reference gives in each forward of a text, and how far that is from what it gives with other rounding."""
    noise = torch.Generator().manual_seed(0)
    for logits, moved in zip(run_stages(runner, stages, slots), run_stages(runner, stages, slots, noise), strict=True):
        yield Expected(logits, _apart(moved.values.float(), logits.values.float()))


def _run(runner: Runner, stage: Stage, state: SequenceState, noise: torch.Generator | None = None) -> Logits:
    tokens, count = torch.tensor(stage.token_ids, device=state.cache.device), len(stage.token_ids)
    if stage.paths is None:
        forward = runner.lay_out(state, count, settled=stage.start == 0)
    else:
        depths, visible = [len(path) - 1 for path in stage.paths], _visibility(stage.paths).to(tokens.device)
        forward = runner.lay_out(state, count, depths=depths, visible=visible)
    if stage.pair:
        other = SequenceState(runner.new_cache(count))
        forward, tokens = Forward.join([runner.lay_out(other, count), forward]), torch.cat([tokens, tokens])
    return _logits(runner, tokens, stage.sublayers, forward, noise)


def _logits(
    runner: Runner,
    tokens: torch.Tensor,
    sublayers: Sequence[int],
    forward: Forward,
    noise: torch.Generator | None = None,
) -> Logits:
    states = runner.embed(tokens, forward)
    if noise is not None:
        epsilon = torch.finfo(states.dtype).eps
        for index in sublayers:
            states = runner.run(states, [index], forward).hidden_states
            drawn = 2 * torch.rand(states.shape, generator=noise) - 1
            states = (states.float() * (1 + epsilon * drawn.to(states.device))).to(states.dtype)
        sublayers = ()
    if len(tokens) <= 2 * MOST_ROWS:
        logits = runner.run(states, sublayers, forward, logits=True).logits
        assert logits is not None
        return logits
    last = runner.run(states, sublayers, forward).hidden_states[-MOST_ROWS:]
    return Logits(runner.logits(last, forward.widest))


@torch.inference_mode()
def has_independent_rows(runner: Runner) -> bool:
    """Whether the last of some rows has the logits, bit for bit, that it has alone after the others."""
    state = SequenceState(runner.new_cache(MOST_ROWS))
    tokens = torch.arange(MOST_ROWS, device=state.cache.device)
    every = range(len(runner.sublayers))
    together = _logits(runner, tokens, every, runner.lay_out(state, MOST_ROWS))
    state.cache.commit(range(MOST_ROWS - 1))
    alone = _logits(runner, tokens[-1:], every, runner.lay_out(state, 1))
    return torch.equal(together.values[-1], alone.values[0])


def difference(ours: Logits, reference: Expected) -> str | None:
    """What is wrong with the logits of rows beside those of a reference; ``None`` where they agree."""
    expected, found = reference.logits.values.float(), ours.values.float()
    if found.shape != expected.shape:
        return f"{list(found.shape)} logits, not {list(expected.shape)}"
    if not bool(found.isfinite().all()):
        return "logits are not finite"
    epsilon, carried = torch.finfo(reference.logits.values.dtype).eps, min(_LARGEST_BOUND, _NOISES * reference.noise)
    bound, apart = max(epsilon**0.5, carried), _apart(found, expected)
    if not apart <= bound:
        return f"logits differ by {apart:.1e} of the largest, more than {bound:.1e}"
    chosen = expected.gather(-1, ours.best[:, None])[:, 0]
    lead = float(((expected.amax(-1) - chosen) / expected.abs().amax(-1)).amax())
    if not lead <= max(min(epsilon**0.5, _TIE * epsilon), carried):
        return "another token has the largest logit"
    return None


def _apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    """How far logits ``[rows, vocab]`` are from those expected, at most, of the largest of their row."""
    return float(((found - expected).abs().amax(-1) / expected.abs().amax(-1)).amax())


def _random_tree(rows: int, draw: random.Random) -> tuple[tuple[int, ...], ...]:
    """The paths of the rows of a forest: each continues one of the four rows before it, or the text."""
    paths: list[tuple[int, ...]] = []
    for row in range(rows):
        parent = draw.randint(max(-1, row - 4), row - 1)
        paths.append((*(paths[parent] if parent >= 0 else ()), row))
    return tuple(paths)


def _visibility(paths: Sequence[Sequence[int]]) -> torch.Tensor:
    """Bool ``[rows, rows]``: a row sees those of its path."""
    visible = torch.zeros(len(paths), len(paths), dtype=torch.bool)
    for row, path in enumerate(paths):
        visible[row, list(path)] = True
    return visible
