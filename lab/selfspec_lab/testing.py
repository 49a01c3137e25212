"""What a test of a method, or an experiment with one, begins with: a text in the cache, and its states."""

from collections.abc import Sequence as Many

import torch

from selfspec.decoding.draft import Draft, NoDraft
from selfspec.decoding.drafter import Drafter, FixedDrafter, Needs, Prefill
from selfspec.decoding.output import Output
from selfspec.decoding.prompt import Chunk, read_chunks
from selfspec.decoding.request import Failed, Request, Sequence
from selfspec.runtimes.kernel_build import KernelBuildError
from selfspec.runtimes.kernels import find, row_limit
from selfspec.runtimes.target import Target
from selfspec.sampling.processors import ScoreProcessor
from selfspec.sampling.rules import Greedy, Rule


@torch.inference_mode()
def read_text(
    target: Target,
    token_ids: Many[int],
    needs: Needs | None = None,
    *,
    max_new_tokens: int = 2,
    rule: Rule | None = None,
    processor: ScoreProcessor | None = None,
    chunk: int = 1024,
) -> tuple[Sequence, Prefill]:
    """Runs a text through the model, as a request with this prompt begins, for tests of methods and experiments.

    Args:
        target: the model.
        token_ids: the text, at least one token.
        needs: which states to keep, and how many rows a draft's siblings or a probe may have; nothing if not given.
        max_new_tokens: room for tokens after it.
        rule: how the next token is chosen; greedy if not given.
        processor: the logits processors; none if not given.
        chunk: most tokens to run at once.

    Returns:
        The sequence, whose pending token is the one that the target chose, and what a method is given to begin with.
    """
    sequence = Sequence(
        target,
        Request(
            token_ids,
            max_new_tokens,
            rule=rule or Greedy(),
            processor=processor or ScoreProcessor(),
            output=Output(max_new_tokens=max_new_tokens),
            method=_Reader(needs or Needs()),
        ),
    )
    while sequence.unread:
        start = sequence.cache.length
        for event in read_chunks(target, [Chunk(sequence, start, min(len(token_ids), start + chunk))]):
            if isinstance(event, Failed):
                raise event.error
    return sequence, sequence.prefill


class _Reader:
    """A method that drafts nothing and has the needs of another."""

    def __init__(self, needs: Needs) -> None:
        self.needs = needs

    def begin(self, prefill: Prefill) -> Drafter:
        return FixedDrafter(NoDraft())

    def plan(self, drafters: Many[Drafter]) -> list[Draft]:
        return [drafter.plan() for drafter in drafters]


def verifies_exactly(dtype: torch.dtype) -> bool:
    """Whether the kernels run every verification, so that its rows are bit for bit those of single steps.

    It is so in bfloat16, for models that the compiled runtime takes. In float32 rows differ by rounding.
    """
    try:
        return dtype == torch.bfloat16 and row_limit(dtype, attends=True) >= find().constants["VERIFIED"]
    except KernelBuildError:
        return False
