"""Logits processors: Hugging Face's and our own, on the rows of a verification.

``generate`` calls a processor with one row of scores and the tokens before it. A verification has one row per drafted
token, each with a context of its own. A processor that reads the context runs row by row; the others take all rows at
once.
"""

from collections.abc import Callable, Collection, Iterable, Mapping

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
from selfspec.model import transfer
from selfspec.model.forward import ALL, Likely
from selfspec.runtimes import kernels
from selfspec.runtimes.changes import Changes
from selfspec.sampling.grammar import GrammarMask
from selfspec.types import SamplingParams

_MOST_TOP_K = 2**31 - 1

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


class LogitBias(LogitsProcessor):
    """Adds a constant to the logits of single tokens.

    Args:
        bias: what to add, by token id.
    """

    def __init__(self, bias: Mapping[int, float]) -> None:
        self._token_ids, self._values = list(bias), list(bias.values())

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Takes and returns scores, float ``[rows, vocab]``; does not read the tokens before them."""
        token_ids = transfer.send(self._token_ids, scores.device)
        return scores.index_add(1, token_ids, scores.new_tensor(self._values).expand(len(scores), -1))


class OutputPenalties(LogitsProcessor):
    """Makes tokens less likely that the output contains already; the prompt does not count.

    The score of a token that occurs ``c > 0`` times is reduced by ``presence + c * frequency``, as in OpenAI's API.

    Args:
        presence: the penalty for occurring at all.
        frequency: the penalty for each time.
        prompt_length: tokens of the prompt.
    """

    def __init__(self, presence: float, frequency: float, prompt_length: int) -> None:
        self._presence, self._frequency = presence, frequency
        self._prompt_length = prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Takes the tokens of one row, long ``[1, length]``, and its scores, float ``[1, vocab]``; returns scores."""
        written = input_ids[0, self._prompt_length :]
        ones = torch.ones_like(written, dtype=scores.dtype)
        counts = torch.zeros_like(scores[0]).index_add_(0, written, ones)  # `unique` would wait for the device
        return scores - (self._frequency * counts + self._presence * counts.sign())


class MinTokens(LogitsProcessor):
    """Makes the tokens that end an output impossible before it has a number of tokens.

    Args:
        min_tokens: the number.
        prompt_length: tokens of the prompt.
        end_ids: tokens that end the output; those outside the vocabulary are ignored.
    """

    def __init__(self, min_tokens: int, prompt_length: int, end_ids: Collection[int]) -> None:
        self._first_end = prompt_length + min_tokens
        self._end_ids = sorted(end_ids)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Takes the tokens of one row, long ``[1, length]``, and its scores, float ``[1, vocab]``; returns scores."""
        if input_ids.shape[1] >= self._first_end:
            return scores
        end_ids = [token_id for token_id in self._end_ids if token_id < scores.shape[1]]
        return scores.index_fill(1, transfer.send(end_ids, scores.device), -torch.inf)


class KeepLikely(LogitsProcessor):
    """Top-k, top-p and min-p, one after the other: on a CPU by kernels if they are loaded, else by transformers'.

    torch sorts a vocabulary for top-p, which takes a large part of a step. Both keep the same tokens, but for rounding
    at the edge of ``top_p``, and of equally likely ones there the kernels keep the last.

    Args:
        likely: which tokens are kept.
    """

    def __init__(self, likely: Likely) -> None:
        self.likely = Likely(min(likely.top_k, _MOST_TOP_K), *likely[1:])
        slowly = LogitsProcessorList()
        if likely.top_k:
            slowly.append(TopKLogitsWarper(likely.top_k))
        if likely.top_p < 1:
            slowly.append(TopPLogitsWarper(likely.top_p))
        if likely.min_p:
            slowly.append(MinPLogitsWarper(likely.min_p))
        self._slowly: Callable[..., torch.Tensor] = slowly

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Takes and returns scores, float ``[rows, vocab]``; does not read the tokens before them."""
        library = kernels.loaded() if scores.device.type == "cpu" and scores.dtype == torch.float32 else None
        if library is None:
            return self._slowly(input_ids, scores)
        kept = scores.clone(memory_format=torch.contiguous_format)
        library.keep_likely_float32(kept.data_ptr(), *kept.shape, *self.likely, torch.get_num_threads())
        return kept


class ScoreProcessor:
    """Applies logits processors to rows with different contexts.

    A class that is not in ``IGNORE_CONTEXT``, such as a user's own, is called row by row with the row's ``input_ids``.
    It is called for rejected rows too, so it must not carry state from one call to the next.

    Args:
        processors: the processors, in the order of ``generate``.
        temperature: scores are the logits in float32, changed as ``changes`` say and divided by it, of which ``likely``
            are kept; ``None`` where processors do anything else.
        likely: see above.
        changes: see above; ``None`` for none.

    Attributes:
        processors: see above.
        keeps_scores: there is no processor, so that scores are the logits in float32.

    Raises:
        InvalidParameterError: one of them cannot be evaluated on drafted rows.
    """

    def __init__(
        self,
        processors: Iterable[LogitsProcessor] = (),
        temperature: float | None = None,
        likely: Likely = ALL,
        changes: Changes | None = None,
    ) -> None:
        self.processors = processors = list(processors)
        for processor in processors:
            _refuse_stateful(processor)
        ignoring = (*_classes(IGNORE_CONTEXT), LogitBias, KeepLikely)
        reads = [type(processor) not in ignoring for processor in processors]
        first = reads.index(True) if True in reads else len(reads)
        self._reads_context = first < len(processors)
        self.keeps_scores = not processors
        self.temperature, self.likely, self.changes = temperature if processors else 1.0, likely, changes
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
    mask: GrammarMask | None = None,
) -> ScoreProcessor:
    """Builds the processors of a request, in the order of ``GenerationMixin._get_logits_processor`` and of vLLM.

    Greedy decoding has no temperature and no filters, as with ``do_sample=False``. The request's own processors follow.

    Args:
        params: the sampling parameters.
        prompt_length: tokens of the prompt, which penalties of the output do not count.
        end_ids: tokens that end the output.
        mask: forbids tokens, before the filters of sampling.

    Returns:
        The processors; none for a parameter at its neutral value.

    Raises:
        InvalidParameterError: one of the request's own cannot be evaluated on drafted rows.
    """
    processors: list[LogitsProcessor] = []
    repetition, presence, frequency = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
    if params.logit_bias:
        processors.append(LogitBias(params.logit_bias))
    if repetition != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(float(repetition)))
    if presence or frequency:
        processors.append(OutputPenalties(presence, frequency, prompt_length))
    if ends := end_ids if params.min_tokens else ():
        processors.append(MinTokens(params.min_tokens, prompt_length, ends))
    if mask is not None:
        processors.append(mask)
    changes, likely, temperature = None, ALL, 1.0
    if processors:
        first_end = prompt_length + params.min_tokens
        changes = Changes(params.logit_bias or {}, repetition, presence, frequency, first_end, ends, mask)
    if params.samples:
        temperature, likely = float(params.temperature), Likely(params.top_k, float(params.top_p), float(params.min_p))
        if temperature != 1:
            processors.append(TemperatureLogitsWarper(temperature))
        if likely != ALL:
            processors.append(KeepLikely(likely))
    if params.logits_processors:
        return ScoreProcessor([*processors, *params.logits_processors])
    return ScoreProcessor(processors, temperature, likely, changes)


def check_bias(bias: Mapping[int, float], vocab_size: int) -> None:
    """Refuses a bias of a token that the model does not know."""
    largest = max(bias, default=-1)
    if largest >= vocab_size:
        raise InvalidParameterError(
            f"logit_bias names token {largest}, but the model's vocabulary has {vocab_size} token ids; leave it out"
        )


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
