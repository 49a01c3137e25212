"""A request: what was asked, the sequence that is its work, where that runs natively, and the events of a step.

What makes a sequence leave the native way is decided by the functions here alone.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from selfspec.decoding.draft import LayerDraft, Proposal, RunRound
from selfspec.decoding.drafter import Drafter, DraftingMethod, Prefill, Probe
from selfspec.decoding.output import Output, token_logprobs
from selfspec.decoding.suffixes import SuffixAutomaton
from selfspec.limits import is_out_of_memory, out_of_memory
from selfspec.model import transfer
from selfspec.model.cache import KeyValueCache
from selfspec.model.forward import ALL, Drawing
from selfspec.model.low_rank import Adapter
from selfspec.model.ranks import is_lost_rank, lost_rank
from selfspec.runtimes.chain import NATIVE, Path
from selfspec.runtimes.changes import ChangedLogits
from selfspec.runtimes.logits import Logits
from selfspec.runtimes.target import Target
from selfspec.sampling.acceptance import Acceptance
from selfspec.sampling.processors import ScoreProcessor
from selfspec.sampling.rules import Coupled, Rule
from selfspec.types import Generation, Round, TokenLogprobs, TokenOrigin

STEP_TOKENS, ROUND_TOKENS = 256, 128
"""New tokens for which a request takes memory at a time, and those for which it has some before a round, at least."""


@dataclass(eq=False)
class Request:
    """A prompt to continue. Nothing is computed or allocated for it before it is admitted.

    ``logprobs`` and ``prompt_logprobs`` are the number of alternatives to report with each token, ``label`` is what
    errors call the request, ``listener`` is called after each of its events, times are those of ``time.perf_counter``,
    and ``cached_tokens`` counts the tokens of the prompt whose keys and values were in the prefix cache, where only
    requests with the same ``cache_salt`` find them. ``earlier`` has texts of earlier requests with that salt.
    """

    prompt_ids: Many[int]
    max_new_tokens: int
    rule: Rule
    processor: ScoreProcessor
    output: Output
    method: DraftingMethod
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    label: str = ""
    cache_salt: str = ""
    adapter: Adapter | None = None
    earlier: SuffixAutomaton | None = None
    method_name: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    listener: Callable[[], None] | None = None
    submitted_at: float = field(default_factory=time.perf_counter, init=False)
    started_at: float | None = field(default=None, init=False)
    first_token_at: float | None = field(default=None, init=False)
    ended_at: float | None = field(default=None, init=False)
    rounds: list[Round] = field(default_factory=list, init=False)
    cached_tokens: int = field(default=0, init=False)
    peak_memory_bytes: int = field(default=0, init=False)
    error: Exception | None = field(default=None, init=False)

    @property
    def ended(self) -> bool:
        """Whether it is finished, failed or cancelled."""
        return self.ended_at is not None

    def bytes(self, target: Target, new_tokens: int | None = None) -> int:
        """Bytes of its keys and values, token ids, and states for its method, at its end or with some new tokens."""
        fixed, each = bytes_of(self.method, len(self.prompt_ids), target)
        most = self.max_new_tokens
        return fixed + each * (most if new_tokens is None else min(new_tokens, most))

    def first_bytes(self, target: Target) -> int:
        """Bytes that it holds from its admission on: at once all, or as its output grows."""
        late = target.takes_memory_late(len(self.prompt_ids) + self.max_new_tokens)
        return self.bytes(target, ROUND_TOKENS + STEP_TOKENS if late else None)

    @property
    def result(self) -> Generation:
        """The finished output; a ``RuntimeError`` where it is not complete."""
        return self.result_with(None)

    def result_with(self, text: str | None) -> Generation:
        """The finished output with its text, which is decoded where it is not known."""
        output = self.output
        if output.finish_reason is None or self.ended_at is None:
            raise RuntimeError("the stream ended before the output was complete")
        started, first_token = self.started_at or 0.0, self.first_token_at or 0.0
        return Generation(
            text=output.decode() if text is None else text,
            token_ids=tuple(output.token_ids),
            origins=tuple(output.origins),
            prompt_token_count=len(self.prompt_ids),
            method=self.method_name,
            settings=self.settings,
            finish_reason=output.finish_reason,
            seconds=self.ended_at - started,
            prefill_seconds=first_token - started,
            rounds=tuple(self.rounds),
            peak_memory_bytes=self.peak_memory_bytes,
            cached_prompt_tokens=self.cached_tokens,
            logprobs=None if self.logprobs is None else tuple(output.logprobs),
            prompt_logprobs=None if self.prompt_logprobs is None else (None, *output.prompt_logprobs),
        )


def bytes_of(method: DraftingMethod, prompt_tokens: int, target: Target) -> tuple[int, int]:
    """What a request holds, beside each new token, and for each of them: see ``Request.bytes``."""
    needs = method.needs
    rows = min(needs.prompt_rows, prompt_tokens) * len(needs.prompt_states)
    states = rows * target.hidden_size * target.dtype.itemsize
    each = target.slot_bytes + 8 + needs.token_bytes
    # After prompt and output the method has slots that it writes to.
    return states + prompt_tokens * each + max(needs.sibling_rows, needs.probe_rows) * target.slot_bytes, each


class Sequence:
    """A request from its admission to its end: first its prompt is read, then its output is written.

    The last token is *pending*: it is chosen, but its keys and values are not computed yet, so the cache holds one slot
    less than there are tokens.

    Attributes:
        choosing: whether kernels choose its tokens.
        drawing: how tokens are drawn by noise from logits divided by a temperature, or on a CPU from the most likely
            ones, or chosen after biases, penalties and a grammar's mask, if that is all that chooses them.
        takes_best: whether the next token is the one of the largest logit.
        length: tokens of prompt and output so far.
        sibling_limit: most draft tokens beside the longest path of a tree.
        ids: long ``[most tokens]``, prompt and output so far, and room for the rest.
        no_tokens: long ``[0]``, the tokens of an empty draft.
        bytes: that it holds now.
        most_bytes: that it may hold.
        version: of the target that computes it.
        last_read: the step in which a part of its prompt was read last; before, that of its admission.
        recalled: whether the prefix cache has all that files have of its prompt.
        filled: where the last rows end that a prefix cache gave; no states of them and those before them are known.
        prompt_states: by sublayer the hidden states of the prompt that the method asked for, ``[k, hidden]``, until
            the drafter begins.

    Raises:
        ContextLengthError: the request crosses the model's rope switch.
    """

    def __init__(self, target: Target, request: Request) -> None:
        needs, prompt_ids = request.method.needs, request.prompt_ids
        self.target, self.request, self.output = target, request, request.output
        self.rule, self.processor = request.rule, request.processor
        self.choosing = choosing_path(self.rule, self.processor, on_host=target.device.type == "cpu")
        changes = self.processor.changes if self.choosing.native else None
        self._changed = None if changes is None else ChangedLogits(changes, prompt_ids, request.max_new_tokens)
        self.drawing = self._find_drawing()
        self.takes_best = self.choosing.native and self.drawing is None
        self.bytes, self.most_bytes = request.first_bytes(target), request.bytes(target)
        self.last_read, self.filled, self.recalled = -1, 0, False
        self.prompt_length = self.length = len(prompt_ids)
        self.max_length = self.length + request.max_new_tokens
        self.takes_trees = target.tree_refusal is None
        self.sibling_limit = needs.sibling_rows if self.takes_trees else 0
        self.ids = torch.empty(self.max_length, dtype=torch.long, device=target.device)
        self.ids[: self.length] = transfer.send(prompt_ids, target.device)
        self.no_tokens = self.ids[:0]
        self.state = target.new_sequence(
            self.prompt_length,
            capacity=self.max_length + max(needs.sibling_rows, needs.probe_rows),
            last_length=max(self.prompt_length, self.max_length - 1),
            adapter=request.adapter,
        )
        self.version = target.version
        # Allocated before the temporary tensors of the prefill, between which it would leave gaps in memory.
        rows = min(needs.prompt_rows, self.prompt_length)
        kept = sorted(needs.prompt_states) if needs.prompt_rows else []
        states = torch.empty((len(kept), rows, target.hidden_size), dtype=target.dtype, device=target.device)
        self.prompt_states: dict[int, torch.Tensor] = dict(zip(kept, states, strict=True))
        self._drafter: Drafter | None = None

    @property
    def cache(self) -> KeyValueCache:
        """Keys and values of all tokens but the pending one."""
        return self.state.cache

    @property
    def token_ids(self) -> torch.Tensor:
        """Prompt and output so far, long ``[length]``."""
        return self.ids[: self.length]

    @property
    def pending(self) -> torch.Tensor:
        """The last token, long ``[1]``."""
        return self.ids[self.length - 1 : self.length]

    @property
    def draft_limit(self) -> int:
        """How many draft tokens can still be committed beside the target's own token."""
        return self.max_length - self.length - 1

    @property
    def unread(self) -> int:
        """Tokens of the prompt whose keys and values are not computed yet."""
        return max(0, self.prompt_length - self.cache.length)

    @property
    def reusable(self) -> int:
        """Leading tokens of the prompt that need not be read if their keys and values are known.

        The last one gives the first token of the output; a method may need states of more of them.
        """
        if self.request.prompt_logprobs is not None:
            return 0
        needed = self.request.method.needs.fewest_rows if self.prompt_states else 0
        return max(0, self.prompt_length - max(1, needed))

    @property
    def growth(self) -> int:
        """Bytes that it needs beside ``bytes`` for its next round; mostly none, since it takes many at once."""
        needed = self.length - self.prompt_length + ROUND_TOKENS
        if self.bytes == self.most_bytes or self.request.bytes(self.target, needed) <= self.bytes:
            return 0
        return self.request.bytes(self.target, needed + STEP_TOKENS) - self.bytes

    @property
    def finished(self) -> bool:
        """Whether the output has ended."""
        return self.output.finish_reason is not None

    @property
    def drafter(self) -> Drafter:
        """Its drafter, which begins when it is first needed: an output of one token does not pay for it."""
        if self._drafter is None:
            self._drafter = self.request.method.begin(self.prefill)
            self.prompt_states = {}
        return self._drafter

    @property
    def prefill(self) -> Prefill:
        """What a drafter is given to begin with, once the prompt is read."""
        request, first, room = self.request, self.output.token_ids[0], self.draft_limit + 1
        read = self.prompt_length - self.filled
        states = {index: rows[-read:] for index, rows in self.prompt_states.items()}
        seconds = (request.first_token_at or 0.0) - (request.started_at or 0.0)
        probe = Probe(self.target, self.rule, self.state, self.ids)
        mask = None if self.processor.changes is None else self.processor.changes.mask
        forced = None if mask is None else mask.forced_after
        return Prefill(tuple(request.prompt_ids), first, probe, states, room, request.earlier, seconds, forced)

    def write_draft(self, step: int, token_id: torch.Tensor) -> None:
        """Writes a drafted token, long ``[1]``, after ``step`` others, where ``drafted_context`` reads it."""
        self.ids[self.length + step : self.length + step + 1] = token_id

    def drafted_context(self, step: int) -> torch.Tensor:
        """Prompt, output and the first ``step`` drafted tokens, long ``[1, length + step]``."""
        return self.ids[None, : self.length + step]

    def row_contexts(self, proposal: Proposal) -> Callable[[int], torch.Tensor]:
        """For each verification row the tokens up to it, long ``[1, length + depth]``, made when asked for."""
        text, tree, drafted = self.token_ids, proposal.tree, proposal.token_ids

        def context(row: int) -> torch.Tensor:
            """The tokens up to a row of the tree, along its path; the same when the text has grown."""
            nodes = [] if tree.is_chain else [ancestor - 1 for ancestor in tree.path(row)[1:]]
            path = drafted[:row] if tree.is_chain else drafted[transfer.send(nodes, drafted.device)]
            return torch.cat([text, path])[None]

        return context

    def commit(
        self,
        acceptance: Acceptance,
        logits: Logits | None,
        run: Many[RunRound] = (),
        *,
        prefill: bool = False,
    ) -> tuple[int, ...]:
        """Hands accepted tokens to the output until that ends, and commits their rows; returns the tokens taken.

        ``logits`` are the target's own of the verified rows; the tokens of a ``run`` are those of its rounds. The rows
        of a ``prefill`` are committed already.
        """
        token_ids, taken = acceptance.token_ids, 0
        last: TokenOrigin = "prefill" if prefill else "target"
        origins: list[TokenOrigin] = ["draft"] * len(token_ids)
        origins[-1] = last
        if run:
            origins = [origin for each in run for origin in _origins(each)]
        transfer.write(self.ids, self.length, token_ids)
        for token_id, origin, logprobs in zip(token_ids, origins, self._logprobs(acceptance, logits), strict=True):
            taken += 1
            if self.output.append(token_id, origin, partial(self.drafted_context, taken), logprobs):
                break
        self.cache.commit(() if prefill else acceptance.rows[:taken])
        self.length += taken
        if self._changed is not None:
            self._changed.write(token_ids[:taken])
        return token_ids[:taken]

    def takes_best_of(self, logits: Logits, path: Path) -> bool:
        """Whether the next token of each row is ``logits.best``: that of the largest logit, or the drawn one.

        ``path`` is that of the rows: where logits change by the tokens before a row, only native calls know them.
        """
        if self.drawing is None:
            return self.takes_best
        return logits.drawn and (path.native or self._changed is None)

    def _find_drawing(self) -> Drawing | None:
        if not self.choosing.native:
            return None
        if isinstance(self.rule, Coupled):
            assert self.processor.temperature is not None
            return Drawing(self.rule.key, self.processor.temperature, self.processor.likely, self._changed)
        return None if self._changed is None else Drawing(0, 0.0, changed=self._changed)

    def _logprobs(self, acceptance: Acceptance, logits: Logits | None) -> Many[TokenLogprobs | None]:
        """What is reported of each accepted token."""
        if self.request.logprobs is None:
            return [None] * len(acceptance.token_ids)
        assert logits is not None
        rows = logits.values[transfer.send(acceptance.rows, logits.values.device)]
        return token_logprobs(rows, acceptance.token_ids, self.request.logprobs)


def _origins(played: RunRound) -> list[TokenOrigin]:
    """Who chose the tokens of a round: the draft those that were accepted, the target the one after them."""
    return ["draft" if index < played.accepted else "target" for index in range(len(played.token_ids))]


PROCESSED = Path("a logits processor changes scores")
REJECTION = Path("rejection sampling draws from scores")
WIDTHS = Path("the draft is a tree")
CHOOSER = Path("the method chooses the draft tokens")
WATCHED = Path("the method watches hidden states")
MANY_ROWS = Path("more rows than the kernels take")
LOGPROBS = Path("log-probabilities are reported")
MTP = Path("a multi-token-prediction head drafts")
ENDS = Path("stopping criteria are called after every token")

LEAVING = (PROCESSED, REJECTION, WIDTHS, CHOOSER, WATCHED, MANY_ROWS)
"""What makes a draft or a verification leave the native way on a model that has one."""


def choosing_path(rule: Rule, processor: ScoreProcessor, *, on_host: bool) -> Path:
    """Whether kernels choose the tokens of a request: by the largest logit, or by noise after a temperature.

    Those of a CPU (``on_host``) draw from the most likely tokens, too, and know biases, penalties and grammars.
    """
    if not rule.chooses_best and not isinstance(rule, Coupled):
        return REJECTION
    everywhere = processor.likely == ALL and processor.changes is None  # also on accelerators
    return NATIVE if processor.temperature is not None and (on_host or everywhere) else PROCESSED


def draft_path(draft: LayerDraft, sequence: Sequence, model: Path) -> Path:
    """Where a layer draft of a sequence runs, given where the draft's sublayers run."""
    if not sequence.choosing.native:
        return sequence.choosing
    if draft.widths is not None or draft.choose is not None:
        return CHOOSER if draft.widths is None else WIDTHS
    return model


def run_path(sequence: Sequence, watched: Collection[int], model: Path) -> Path:
    """Whether several steps of plain decoding run as one call: where they need no more than tokens."""
    if watched:
        return WATCHED
    if sequence.request.logprobs is not None:
        return LOGPROBS
    if sequence.output.has_criteria:
        return ENDS
    return model if sequence.choosing.native else sequence.choosing


def verification_path(proposals: Iterable[Proposal], most: int, model: Path) -> Path:
    """Where a verification runs; ``most`` is the number of rows of a sequence that the kernels take."""
    if not model.native:
        return model
    return MANY_ROWS if any(len(proposal.rows) >= most for proposal in proposals) else NATIVE


@dataclass(frozen=True)
class Event:
    """What happened to a request in a step; ``at`` is when, in seconds of ``time.perf_counter``."""

    request: Request
    at: float = field(default_factory=time.perf_counter, kw_only=True)


@dataclass(frozen=True)
class Started(Event):
    """The request was admitted."""


@dataclass(frozen=True)
class Prefilled(Event):
    """Its prompt was read to its end, and the first token chosen."""


@dataclass(frozen=True)
class Advanced(Event):
    """A round ended."""

    round: Round


@dataclass(frozen=True)
class Finished(Event):
    """Its output ended."""


@dataclass(frozen=True)
class Failed(Event):
    """It cannot be admitted, or its sequence cannot go on; the others can."""

    error: Exception

    @staticmethod
    def by(request: Request, error: Exception) -> "Failed":
        """A request that an exception ended.

        One that means that memory ran out is replaced: its frames would keep the tensors alive that did not fit. So is
        one that means that another process was lost.
        """
        if is_out_of_memory(error):
            error = out_of_memory(len(request.prompt_ids), request.max_new_tokens)
        elif is_lost_rank(error):
            error = lost_rank(error)
        return Failed(request, error)
