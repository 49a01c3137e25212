"""Drafts for llama-cpp-python: ``Llama(path, draft_model=LlamaSuffixDecoding(), logits_all=True)``."""

import time
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from selfspec.bridges.bridge_options import BridgeOptions
from selfspec.bridges.drafts import Drafts
from selfspec.bridges.versions import check_engine
from selfspec.errors import InvalidParameterError

TESTED = "0.3.36"
"""The version of llama-cpp-python that this bridge was tested with."""

ROW_COUNTS = (1, 2, 4, 8, 16)

_CONTEXT = 64
"""Tokens in the cache before the rows that are measured."""


class LlamaSuffixDecoding:
    """A ``LlamaDraftModel`` that drafts what followed the longest repeated suffix, as many tokens as pay.

    It looks up the text and texts that have ended, learns from the growing text how likely its drafts are accepted, and
    from the time between two calls what a forward costs by its rows. One object serves one ``Llama``.

    Args:
        num_pred_tokens: most draft tokens of a round.
        **options: the other fields of ``BridgeOptions``; ``measure`` measures ``row_costs``.

    Raises:
        MissingPackageError: llama-cpp-python is not installed.
        InvalidSettingError: an argument is out of range.
    """

    def __init__(self, num_pred_tokens: int = 16, **options: Any) -> None:
        check_engine("llama-cpp-python", TESTED, "llama-cpp-python")
        self._options = BridgeOptions.of(num_pred_tokens, options)
        self.drafts = Drafts(self._options)
        import_module("llama_cpp.llama_speculative").LlamaDraftModel.register(type(self))

    def __call__(self, input_ids: npt.NDArray[np.intc], /, **_: Any) -> npt.NDArray[np.intc]:
        """The draft tokens after a text, ``[drafted]``; it is called before every forward but a prompt's.

        Args:
            input_ids: the text, the last token too, ``[length]``.
        """
        (drafted,) = self.drafts.draft([input_ids], [self._options.max_draft_tokens])
        return np.array(drafted, dtype=np.intc)

    def measure(self, llama: Any, row_counts: Sequence[int] = ROW_COUNTS, repeats: int = 3) -> dict[int, float]:
        """Measures what forwards of this model cost, and plans by that; it empties the model's cache.

        Args:
            llama: the ``Llama`` that drafts with this object.
            row_counts: numbers of rows, 1 among them.
            repeats: forwards of each, of which the fastest counts.

        Returns:
            Seconds by number of rows, to be given as ``row_costs`` another time.

        Raises:
            InvalidParameterError: ``llama`` was made without ``logits_all=True``, or its context is too short.
        """
        _check_logits(llama)
        if llama.n_ctx() < _CONTEXT + max(row_counts):
            raise InvalidParameterError(f"measure needs n_ctx of at least {_CONTEXT + max(row_counts)}")
        taken: dict[int, list[float]] = {rows: [] for rows in row_counts}
        llama.reset()
        llama.eval(_spread(llama, _CONTEXT))
        for _ in range(repeats):
            for rows in row_counts:
                began = time.perf_counter()
                llama.eval(_spread(llama, rows))
                taken[rows].append(time.perf_counter() - began)
                llama.n_tokens = _CONTEXT  # the next forward drops the rows after these
        llama.reset()
        costs = {rows: min(seconds) for rows, seconds in taken.items()}
        self._options = replace(self._options, row_costs=costs)
        self.drafts.use_costs(self._options)
        return costs


def _check_logits(llama: Any) -> None:
    """Refuses a ``Llama`` without ``logits_all``: with a draft model it fails at the first text beyond ``n_batch``.

    Raises:
        InvalidParameterError: it was made without ``logits_all=True``.
    """
    if llama.scores.shape[0] < llama.n_ctx():
        raise InvalidParameterError("a draft model needs the logits of every row; make Llama with logits_all=True")


def _spread(llama: Any, count: int) -> list[int]:
    """Tokens from all over the vocabulary, so that rows of a mixture have experts of their own."""
    return [llama.n_vocab() * (row + 1) // (count + 2) for row in range(count)]
