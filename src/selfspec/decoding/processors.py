"""Hugging Face logits processors on the several rows of a verification.

``generate`` hands a processor one row and the tokens before it. A verification has a row for each drafted token, each
with tokens before it of its own, so a processor that looks at them runs row by row; the others take all rows at once.
"""

import math
from collections.abc import Callable

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation import logits_process

from selfspec.errors import InvalidParameterError

IGNORE_CONTEXT = frozenset(
    {
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "TopHLogitsWarper",
        "MinPLogitsWarper",
        "TypicalLogitsWarper",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
        "SuppressTokensLogitsProcessor",
    }
)
"""Classes whose ``__call__`` does not read ``input_ids`` and treats every row for itself."""

REFUSED = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "runs the model itself, with a cache of its own",
    "ClassifierFreeGuidanceLogitsProcessor": "needs a batch of two rows for each sequence",
    "SynthIDTextWatermarkLogitsProcessor": "carries state from one call to the next, which rejected rows would corrupt",
    "WhisperNoSpeechDetection": "runs the model itself",
    "DiaClassifierFreeGuidanceLogitsProcessor": "needs a batch of two rows for each sequence",
    "DiaEOSChannelFilterLogitsProcessor": "reads the rows as channels of one position",
    "DiaEOSDelayPatternLogitsProcessor": "carries state from one call to the next, which rejected rows would corrupt",
}
"""Classes that cannot be evaluated on drafted rows, and why."""


class ScoreProcessor:
    """Applies logits processors to rows that share no context.

    A class that is not in ``IGNORE_CONTEXT``, a user's own for example, is called row by row with the row's
    ``input_ids``. It is called for rejected rows too, so it must not carry state from one call to the next.

    Args:
        processors: the processors in the order in which ``generate`` would apply them.

    Raises:
        InvalidParameterError: one of them cannot be evaluated on drafted rows.
    """

    def __init__(self, processors: LogitsProcessorList) -> None:
        for processor in processors:
            _refuse_stateful(processor)
        reads = [type(processor) not in _classes(IGNORE_CONTEXT) for processor in processors]
        first = reads.index(True) if True in reads else len(reads)
        self._reads_context = first < len(processors)
        self._on_all_rows: Callable[..., torch.Tensor] = LogitsProcessorList(processors[:first])
        self._row_by_row: Callable[..., torch.Tensor] = LogitsProcessorList(processors[first:])

    def __call__(self, logits: torch.Tensor, context: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """Processed scores, row for row what ``generate`` would compute.

        Args:
            logits: ``[n, vocab]`` in the model's dtype, one row per position to choose for; left as they are.
            context: gives for a row the tokens before the position it chooses for, long ``[1, length]``. Called only
                if a processor reads them.

        Returns:
            float32 ``[n, vocab]``.
        """
        # A processor may write into the scores it is given, so they are a copy, as they are in `generate`.
        scores = logits.to(torch.float32, copy=True)
        unread = torch.empty(len(scores), 0, dtype=torch.long, device=scores.device)
        scores = self._on_all_rows(unread, scores)
        if not self._reads_context:
            return scores
        return torch.cat([self._row_by_row(context(row), scores[row : row + 1]) for row in range(len(scores))])


def build_processors(
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
) -> LogitsProcessorList:
    """The processors of a request, in the order of ``GenerationMixin._get_logits_processor``.

    Args:
        temperature: 0 is greedy, which leaves only the repetition penalty, as ``do_sample=False`` does.
        top_k: keep the ``top_k`` tokens of highest score; ``None`` or 0 keeps all.
        top_p: keep the smallest set of tokens with this much probability; ``None`` or 1 keeps all.
        min_p: keep tokens with at least this share of the largest probability; ``None`` keeps all.
        repetition_penalty: factor above 0 against tokens of prompt and output; ``None`` or 1 is off.

    Returns:
        The processors, none for parameters that are off.

    Raises:
        InvalidParameterError: a parameter is out of range or of the wrong type.
    """
    _check_number("temperature", temperature, 0.0, math.inf)
    _check_number("top_p", top_p, 0.0, 1.0)
    _check_number("min_p", min_p, 0.0, 1.0)
    _check_number("repetition_penalty", repetition_penalty, 0.0, math.inf)
    if repetition_penalty == 0:
        raise InvalidParameterError("repetition_penalty is 0: give a factor above 0; 1 turns it off")
    if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 0):
        raise InvalidParameterError(f"top_k is {top_k!r}: give an integer, 0 or more; 0 keeps all tokens")

    processors = LogitsProcessorList()
    if repetition_penalty is not None and repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(float(repetition_penalty)))
    if temperature == 0:
        return processors
    if temperature != 1:
        processors.append(TemperatureLogitsWarper(float(temperature)))
    if top_k:
        processors.append(TopKLogitsWarper(top_k))
    if top_p is not None and top_p < 1:
        processors.append(TopPLogitsWarper(float(top_p)))
    if min_p is not None:
        processors.append(MinPLogitsWarper(float(min_p)))
    return processors


def _classes(names: frozenset[str]) -> tuple[type, ...]:
    """Those of the classes that the installed transformers has."""
    return tuple(getattr(logits_process, name) for name in names if hasattr(logits_process, name))


def _refuse_stateful(processor: LogitsProcessor) -> None:
    for name, reason in REFUSED.items():
        if any(base.__name__ == name for base in type(processor).__mro__):
            raise InvalidParameterError(
                f"{type(processor).__name__} {reason}: it cannot score drafted tokens; remove it, or use generate"
            )


def _check_number(name: str, value: float | None, lowest: float, highest: float) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InvalidParameterError(f"{name} is {value!r}: give a finite number")
    if not lowest <= value <= highest:
        wanted = f"{lowest:g} or more" if highest == math.inf else f"between {lowest:g} and {highest:g}"
        raise InvalidParameterError(f"{name} is {value!r}: give a number {wanted}")
