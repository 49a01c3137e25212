"""Hugging Face logits processors on the rows of a verification.

``generate`` calls a processor with one row of scores and the tokens before it. A verification has one row per drafted
token, each with a context of its own. A processor that reads the context runs row by row; the others take all rows at
once.
"""

from collections.abc import Callable, Collection

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
from selfspec.sampling.penalties import LogitBias, MinTokens, OutputPenalties
from selfspec.types import SamplingParams

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
"""Classes whose ``__call__`` does not read ``input_ids`` and processes each row independently."""

REFUSED = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "runs the model itself, with a cache of its own",
    "ClassifierFreeGuidanceLogitsProcessor": "needs a batch of two rows for each sequence",
    "SynthIDTextWatermarkLogitsProcessor": "carries state from one call to the next, which rejected rows would corrupt",
    "WhisperNoSpeechDetection": "runs the model itself",
    "DiaClassifierFreeGuidanceLogitsProcessor": "needs a batch of two rows for each sequence",
    "DiaEOSChannelFilterLogitsProcessor": "reads the rows as channels of one position",
    "DiaEOSDelayPatternLogitsProcessor": "carries state from one call to the next, which rejected rows would corrupt",
}
"""Classes that cannot be evaluated on drafted rows, with the reason."""


class ScoreProcessor:
    """Applies logits processors to rows with different contexts.

    A class that is not in ``IGNORE_CONTEXT``, such as a user's own, is called row by row with the row's ``input_ids``.
    It is called for rejected rows too, so it must not carry state from one call to the next.

    Args:
        processors: the processors, in the order of ``generate``.

    Attributes:
        keeps_scores: there is no processor, so that scores are the logits in float32.
        temperature: scores are the logits in float32 divided by it; ``None`` where processors do anything else.

    Raises:
        InvalidParameterError: one of them cannot be evaluated on drafted rows.
    """

    def __init__(self, processors: LogitsProcessorList) -> None:
        for processor in processors:
            _refuse_stateful(processor)
        ignoring = (*_classes(IGNORE_CONTEXT), LogitBias)
        reads = [type(processor) not in ignoring for processor in processors]
        first = reads.index(True) if True in reads else len(reads)
        self._reads_context = first < len(processors)
        self.keeps_scores = not processors
        self.temperature = _only_temperature(processors)
        self._on_all_rows: Callable[..., torch.Tensor] = LogitsProcessorList(processors[:first])
        self._row_by_row: Callable[..., torch.Tensor] = LogitsProcessorList(processors[first:])

    def __call__(self, logits: torch.Tensor, context: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """Computes processed scores, for each row the same as ``generate``.

        Args:
            logits: ``[n, vocab]`` in the model's dtype, one row per position; not modified.
            context: returns for a row index the tokens before its position, long ``[1, length]``. Called only if a
                processor reads them.

        Returns:
            Processed scores, float32 ``[n, vocab]``.
        """
        # A processor may modify its scores in place, so it gets a copy, as in `generate`.
        scores = logits.to(torch.float32, copy=True)
        unread = torch.empty(len(scores), 0, dtype=torch.long, device=scores.device)
        scores = self._on_all_rows(unread, scores)
        if not self._reads_context:
            return scores
        return torch.cat([self._row_by_row(context(row), scores[row : row + 1]) for row in range(len(scores))])


def build_processors(
    params: SamplingParams,
    prompt_length: int = 0,
    end_ids: Collection[int] = (),
    mask: LogitsProcessor | None = None,
) -> LogitsProcessorList:
    """Builds the processors of a request, in the order of ``GenerationMixin._get_logits_processor`` and of vLLM.

    Greedy decoding has no temperature and no filters, as with ``do_sample=False``. The request's own processors follow.

    Args:
        params: the sampling parameters.
        prompt_length: tokens of the prompt, which penalties of the output do not count.
        end_ids: tokens that end the output.
        mask: forbids tokens, before the filters of sampling.

    Returns:
        The processors; none for a parameter at its neutral value.
    """
    processors = LogitsProcessorList()
    if params.logit_bias:
        processors.append(LogitBias(params.logit_bias))
    if params.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty)))
    if params.presence_penalty or params.frequency_penalty:
        processors.append(OutputPenalties(params.presence_penalty, params.frequency_penalty, prompt_length))
    if params.min_tokens and end_ids:
        processors.append(MinTokens(params.min_tokens, prompt_length, end_ids))
    if mask is not None:
        processors.append(mask)
    if params.samples:
        if params.temperature != 1:
            processors.append(TemperatureLogitsWarper(float(params.temperature)))
        if params.top_k:
            processors.append(TopKLogitsWarper(params.top_k))
        if params.top_p < 1:
            processors.append(TopPLogitsWarper(float(params.top_p)))
        if params.min_p:
            processors.append(MinPLogitsWarper(float(params.min_p)))
    processors.extend(params.logits_processors)
    return processors


def _only_temperature(processors: LogitsProcessorList) -> float | None:
    """What processors divide scores by, if they do nothing else."""
    if not processors:
        return 1.0
    first, *others = processors
    return float(first.temperature) if type(first) is TemperatureLogitsWarper and not others else None


def _classes(names: frozenset[str]) -> tuple[type, ...]:
    """The classes with these names that the installed transformers has."""
    return tuple(getattr(logits_process, name) for name in names if hasattr(logits_process, name))


def _refuse_stateful(processor: LogitsProcessor) -> None:
    for name, reason in REFUSED.items():
        if any(base.__name__ == name for base in type(processor).__mro__):
            raise InvalidParameterError(
                f"{type(processor).__name__} {reason}: it cannot score drafted tokens; remove it, or call generate "
                "without custom_generate"
            )
