"""DEL's baselines: the grid search of a fixed exit layer and draft length (DEL, appendix B.3).

The paper runs every pair on ten calibration texts. While a draft is right its states are the target's, so the rounds of
every pair follow from one forward over a text (``exit_replay``): the search is exact and takes no decoding of its own.
The pair with the most tokens per loaded layer is chosen, which is what early exit gains where weights are read.
"""

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from selfspec import Engine, Prompt
from selfspec.errors import InvalidParameterError
from selfspec_lab.exit_replay import shadow_matches, static_rounds
from selfspec_lab.replay import tokens_per_layer

LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 18)
"""Draft lengths of the grid; DEL's longest is 18."""

_MOST_EXITS = 15


@dataclass(frozen=True)
class ExitChoice:
    """A fixed exit layer and draft length.

    Attributes:
        exit_layer: E.
        draft_length: γ.
        tokens_per_layer: eTPL on the calibration texts.
        plain: eTPL of plain decoding, ``1 / L``.
    """

    exit_layer: int
    draft_length: int
    tokens_per_layer: float
    plain: float

    @property
    def pays(self) -> bool:
        """Whether early exit loads fewer layers for a token than plain decoding, on this model."""
        return self.tokens_per_layer > self.plain


def grid(layers: int, lengths: Iterable[int] = LENGTHS) -> list[tuple[int, int]]:
    """The pairs of exit layer and draft length: every layer, at most 15 evenly spread ones, with every length.

    Raises:
        InvalidParameterError: the model has too few layers for a choice.
    """
    if layers < 3:
        raise InvalidParameterError(
            f"a model of {layers} layers has no choice of exit layer; use one of at least 3 layers"
        )
    exits = range(1, layers, -(-(layers - 1) // _MOST_EXITS))
    return [(exit_layer, length) for exit_layer in exits for length in lengths]


class ShadowText(NamedTuple):
    """An output, and where each exit layer would have drafted its tokens.

    Attributes:
        prompt_tokens: length of the prompt.
        matches: see ``exit_replay.shadow_matches``.
    """

    prompt_tokens: int
    matches: list[list[bool]]


def shadow_texts(engine: Engine, prompts: Sequence[Prompt], max_new_tokens: int) -> Iterator[ShadowText]:
    """Outputs of plain decoding with the tokens that every exit layer would have drafted.

    Args:
        engine: plain decoding.
        prompts: the prompts.
        max_new_tokens: length of the outputs; ends of sequences are ignored.
    """
    for prompt in prompts:
        output = engine.generate(prompt, max_new_tokens=max_new_tokens, ignore_eos=True)
        prompt_ids = engine.encode(prompt)
        yield ShadowText(len(prompt_ids), shadow_matches(engine.target, prompt_ids, output.token_ids))


def search_exit(engine: Engine, prompts: Sequence[Prompt], max_new_tokens: int) -> ExitChoice:
    """The pair with the most tokens per loaded layer over some calibration prompts, at least one.

    Args:
        engine: plain decoding.
        prompts: the calibration prompts.
        max_new_tokens: length of the outputs; 256 in the paper.

    Raises:
        InvalidParameterError: the model has too few layers for a choice.
    """
    layers = engine.target.layer_count
    pairs, texts = grid(layers), list(shadow_texts(engine, prompts, max_new_tokens))
    means = {
        pair: statistics.fmean(tokens_per_layer(static_rounds(text.matches, *pair, layers), layers) for text in texts)
        for pair in pairs
    }
    best = max(pairs, key=means.__getitem__)
    return ExitChoice(*best, means[best], 1 / layers)
