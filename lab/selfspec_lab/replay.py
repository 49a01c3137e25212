"""Replays stored rounds with a cost model: the time that the same rounds take on another machine.

A round is what drafted (shares of the attention and of the MLP sublayers), how many forwards it took, how many rows the
target verified, and how many tokens it committed. None of that depends on the clock. With seconds for every forward it
gives the speedup over plain decoding on any machine whose costs are known.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from selfspec.types import Round


class CostModel(Protocol):
    """What a forward takes on a machine."""

    @property
    def name(self) -> str:
        """The machine, the model and where the costs are from."""

    @property
    def selection(self) -> float:
        """Share of all decoding time that the method spends on selecting sublayers, 0 to 1."""

    def forward(self, attention: float, mlp: float, rows: int, context: int) -> float:
        """Seconds of one forward, embedding and LM head included.

        Args:
            attention: share of the attention sublayers that run, 0 to 1.
            mlp: share of the MLP sublayers that run, 0 to 1.
            rows: tokens of the forward, at least 1.
            context: tokens in the cache that they attend to.
        """


class Played(NamedTuple):
    """What is stored of a round to replay it.

    Attributes:
        attention: share of the attention sublayers that drafted, 0 to 1; 0 where no layers did.
        mlp: the same of the MLP sublayers.
        steps: draft forwards.
        rows: rows of the verification.
        tokens: tokens committed.
    """

    attention: float
    mlp: float
    steps: int
    rows: int
    tokens: int


def played(record: Round, *, dropped: bool = False) -> Played:
    """What is stored of a round.

    Args:
        record: the round.
        dropped: whether the draft ended with a token that was drafted, but not verified.
    """
    layers = record.kept is not None
    return Played(
        attention=round(record.attention_share or 0.0, 6),
        mlp=round(record.mlp_share or 0.0, 6),
        steps=record.drafted - record.guessed + dropped if layers else 0,
        rows=1 + record.candidates + record.probes,
        tokens=len(record.token_ids),
    )


def play(rounds: Sequence[Round], *, new_tokens: int = 0, longest: int | None = None) -> list[Played]:
    """What is stored of the rounds of an output.

    Args:
        rounds: in their order.
        new_tokens: that the output may have.
        longest: most tokens of a draft, where the token at which one ends before that is drafted, but not verified
            (``drop_unsure``); ``None`` where there is no such token.
    """
    left, found = new_tokens - 1, []  # the first token comes from the prefill
    for record in rounds:
        dropped = longest is not None and record.kept is not None and record.drafted < min(longest, left - 1)
        found.append(played(record, dropped=dropped))
        left -= len(record.token_ids)
    return found


def tokens_per_layer(rounds: Iterable[Played], layers: int) -> float:
    """DEL's eTPL of one output with rounds (appendix B.4): tokens ÷ loaded layers; ``1 / L`` for plain decoding.

    Args:
        rounds: of the output.
        layers: ``L``; every verification loads all of them.
    """
    tokens = loaded = 0.0
    for each in rounds:
        tokens += each.tokens
        loaded += layers * (1 + each.steps * (each.attention + each.mlp) / 2)
    return tokens / loaded


def replayed_seconds(rounds: Iterable[Played], prompt_tokens: int, cost: CostModel) -> float:
    """Seconds of all rounds of an output, the selection of sublayers included.

    Args:
        rounds: in their order.
        prompt_tokens: length of the prompt; the first token of the output comes from the prefill.
        cost: the machine.
    """
    context, total = prompt_tokens + 1, 0.0
    for each in rounds:
        for step in range(each.steps):
            total += cost.forward(each.attention, each.mlp, 1, context + step)
        total += cost.forward(1.0, 1.0, each.rows, context)
        context += each.tokens
    return total / (1.0 - cost.selection)


def plain_seconds(tokens: int, prompt_tokens: int, cost: CostModel) -> float:
    """Seconds of plain decoding of ``tokens`` tokens after the first one."""
    return sum(cost.forward(1.0, 1.0, 1, prompt_tokens + 1 + step) for step in range(tokens))


def replayed_speedup(rounds: Sequence[Played], prompt_tokens: int, cost: CostModel) -> float:
    """Plain decoding's seconds ÷ those of the rounds, for the tokens of the rounds; 1 without a round."""
    tokens = sum(each.tokens for each in rounds)
    return plain_seconds(tokens, prompt_tokens, cost) / replayed_seconds(rounds, prompt_tokens, cost) if rounds else 1.0
