"""What a draft model is worth: its acceptance and its cost, measured, and the speedup that follows from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from selfspec import Engine, Prompt
from selfspec.methods.objective import expected_tokens
from selfspec.model.kept import KeptSet
from selfspec.runtimes.target import Target
from selfspec_lab.bench.verify_rows import row_forwards
from selfspec_lab.export.selection import MOST_DRAFTED
from selfspec_lab.export.whole import Text, agreeing
from selfspec_lab.measuring import StepBytes, interleaved_samples

WORTHWHILE = 1.1
"""Speedup under which a draft model is hardly worth its memory."""

_CONTEXT = 64
_REPEATS = 7


@dataclass(frozen=True)
class Expectation:
    """The speedup that rounds of ``k`` draft tokens promise over plain decoding.

    Attributes:
        acceptance: ``a``, the share of the target's greedy tokens that the draft model predicts as the first choice.
        tokens: number of tokens that this is measured on.
        cost: ``c``, seconds of a draft step ÷ seconds of a step of the target.
        read: bytes that a draft step reads ÷ those of a step of the target.
        verification: ``v`` by ``k``, seconds of the forward over ``k + 1`` rows ÷ those of a step.
    """

    acceptance: float
    tokens: int
    cost: float
    read: float
    verification: Mapping[int, float]

    def speedup(self, length: int) -> float:
        """``(1 + a + … + a^k) / (k c + v)`` for ``k`` draft tokens a round."""
        return float(expected_tokens(self.acceptance, length)) / (length * self.cost + self.verification[length])

    @property
    def best_length(self) -> int:
        """The ``k`` with the highest speedup."""
        return max(self.verification, key=self.speedup)

    @property
    def best(self) -> float:
        """The highest speedup."""
        return self.speedup(self.best_length)


def write_texts(engine: Engine, prompts: Sequence[Prompt], max_new_tokens: int) -> list[Text]:
    """Prompts with the target's greedy output."""
    encoded = [engine.encode(prompt) for prompt in prompts]
    return [(ids, engine.generate(ids, max_new_tokens=max_new_tokens).token_ids) for ids in encoded]


def expect(target: Target, draft: Target, texts: Sequence[Text]) -> Expectation:
    """Measures a draft model beside the target.

    Times are of selfspec's runtime for both models: one sequence, after 64 tokens, forwards of all kinds in turns, of
    each the shortest.

    Args:
        target: the model.
        draft: the draft model, on the same device.
        texts: what the target wrote, and the draft was not tuned on.
    """
    everything = KeptSet.full(draft.sublayer_count)
    tokens = sum(len(written) for _, written in texts)
    right = sum(agreeing(draft, everything, before, written) for before, written in texts)
    seconds = _seconds(target, draft, texts[0][0])
    rows = range(1, MOST_DRAFTED + 2)
    # Fewer rows cost no more than more of them, since they could be filled up.
    least = {count: min(seconds["target", more] for more in rows if more >= count) for count in rows}
    verification = {count - 1: least[count] / least[1] for count in rows[1:]}
    read = _step_bytes(draft) / _step_bytes(target)
    return Expectation(right / tokens, tokens, seconds["draft", 1] / least[1], read, verification)


def _step_bytes(model: Target) -> int:
    return StepBytes(model).target_step(_CONTEXT)


@torch.inference_mode()
def _seconds(target: Target, draft: Target, token_ids: Sequence[int]) -> dict[tuple[str, int], float]:
    """Seconds of forwards by model and rows."""
    context = min(_CONTEXT, target.context_limit - MOST_DRAFTED - 1)
    verifications = row_forwards(target, token_ids, context, range(1, MOST_DRAFTED + 2))
    tasks = {("target", rows): task for rows, task in verifications.items()}
    tasks |= {("draft", rows): task for rows, task in row_forwards(draft, token_ids, context, (1,)).items()}
    samples = interleaved_samples(tasks, target.device, repeats=_REPEATS, warm_up=2)
    return {name: min(seconds) for name, seconds in samples.items()}
