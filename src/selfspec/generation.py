"""Generating the outputs of a call: one prompt as a stream, or several together."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from selfspec.decoding.cache_memory import CacheMemory
from selfspec.decoding.chunks import Chunks
from selfspec.decoding.events import Advanced, Event, Failed, Finished, Prefilled, Started
from selfspec.decoding.output import Output
from selfspec.decoding.prefix_cache import PrefixCache
from selfspec.decoding.request import Request
from selfspec.decoding.scheduler import Scheduler
from selfspec.decoding.text import TextStream
from selfspec.errors import InvalidParameterError, SelfSpecError
from selfspec.limits import check_context, explain_out_of_memory
from selfspec.memory import PeakMemory
from selfspec.methods.base import Method
from selfspec.methods.settings import setting_values, suggest
from selfspec.prompt_encoding import PromptEncoder
from selfspec.prompt_forms import Prompt
from selfspec.runtimes.target import Target
from selfspec.sampling.grammars import Grammars
from selfspec.sampling.penalties import check_bias
from selfspec.sampling.processors import ScoreProcessor, build_processors
from selfspec.sampling.rules import Coupled, Greedy, Rule, Speculative, seeded_generator
from selfspec.types import Generation, Round, SamplingParams, TextPiece


@dataclass(frozen=True)
class Setup:
    """What an engine generates with.

    Attributes:
        target: the model.
        method: what drafts.
        tokenizer: of the model; ``None`` without one.
        encoder: turns prompts into token ids.
        eos_ids: tokens that end an output.
        chunks: how prompts are cut.
        max_batch: most prompts to generate at a time.
        rule: makes the sampling rule of a request from its parameters and the device.
        grammars: compiles the schemas of structured outputs.
        prefix_cache: keys and values of earlier texts; ``None`` reads every prompt from its beginning.
    """

    target: Target
    method: Method
    tokenizer: PreTrainedTokenizerBase | None
    encoder: PromptEncoder
    eos_ids: frozenset[int]
    chunks: Chunks
    max_batch: int
    rule: Callable[[SamplingParams, torch.device], Rule]
    grammars: Grammars
    prefix_cache: PrefixCache | None = None


class Job:
    """One prompt of a call, from its checks to its ``Generation``.

    Args:
        setup: what to generate with.
        prompt: the prompt.
        params: how to choose tokens and when to stop.

    Attributes:
        prompt_ids: tokens of the prompt.
        request: what the decoder is asked.
        method: what drafts.
        rounds: the rounds so far.
        cached_prompt_tokens: tokens of the prompt whose keys and values were found in the prefix cache.

    Raises:
        SelfSpecError: prompt or parameters do not fit.
    """

    def __init__(self, setup: Setup, prompt: Prompt, params: SamplingParams) -> None:
        if params.stop and setup.tokenizer is None:
            raise InvalidParameterError("stop strings need a tokenizer; give the engine one")
        self.prompt_ids = setup.encoder.encode(prompt)
        self.prompt_length, self.max_new_tokens = len(self.prompt_ids), params.max_new_tokens
        check_context(self.prompt_length, params.max_new_tokens, setup.target.context_limit)
        check_bias(params.logit_bias, setup.target.vocab_size)
        self.request = Request(
            self.prompt_ids,
            params.max_new_tokens,
            rule=setup.rule(params, setup.target.device),
            processor=_processor(setup, params, self.prompt_length),
            output=_output(setup, params),
            method=setup.method,
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
        )
        self.method = setup.method
        self.rounds: list[Round] = []
        self.cached_prompt_tokens = 0
        self._setup = setup
        self._started = self._first_token = self._ended = 0.0
        self._peak_bytes = 0

    def observe(self, event: Event, memory: PeakMemory) -> None:
        """Notes what happened to this request.

        Args:
            event: of this request.
            memory: measures the call.

        Raises:
            SelfSpecError: it failed.
        """
        match event:
            case Started():
                self._started = event.at
            case Prefilled():
                self._first_token, self.cached_prompt_tokens = event.at, event.sequence.cached_tokens
            case Advanced():
                self.rounds.append(event.round)
            case Finished():
                self._ended, self._peak_bytes = event.at, memory.peak_bytes()
            case Failed():
                raise event.error

    @property
    def result(self) -> Generation:
        """The output, once it has ended."""
        output, setup = self.request.output, self._setup
        if output.finish_reason is None:
            raise RuntimeError("the stream ended before the output was complete")
        tokenizer = setup.tokenizer
        return Generation(
            text="" if tokenizer is None else str(tokenizer.decode(output.token_ids, skip_special_tokens=True)),
            token_ids=tuple(output.token_ids),
            origins=tuple(output.origins),
            prompt_token_count=self.prompt_length,
            method=setup.method.name,
            settings=setting_values(setup.method.settings),
            finish_reason=output.finish_reason,
            seconds=self._ended - self._started,
            prefill_seconds=self._first_token - self._started,
            rounds=tuple(self.rounds),
            peak_memory_bytes=self._peak_bytes,
            cached_prompt_tokens=self.cached_prompt_tokens,
            logprobs=None if self.request.logprobs is None else tuple(output.logprobs),
            prompt_logprobs=None if self.request.prompt_logprobs is None else (None, *output.prompt_logprobs),
        )


class Batch:
    """The prompts of one call, generated together. Each output is what its prompt gives alone.

    All prompts are checked before the first one runs.

    Args:
        setup: what to generate with.
        prompts: prompts and their parameters.
        name: what an error calls a prompt, before its index: ``"prompt"``, ``"row"``.

    Raises:
        SelfSpecError: a prompt or its parameters do not fit; where there are several, the message names the prompt.
    """

    def __init__(self, setup: Setup, prompts: Sequence[tuple[Prompt, SamplingParams]], name: str = "prompt") -> None:
        self._setup = setup
        self._name = name
        self.jobs: list[Job] = []
        self._several = len(prompts) > 1
        for index, (prompt, params) in enumerate(prompts):
            with self._named(index):
                self.jobs.append(Job(setup, prompt, params))
        self._pieces = self._run()
        self._reads_pieces = False

    def pieces(self) -> Iterator[tuple[int, TextPiece]]:
        """Generates the outputs.

        Yields:
            The index of a prompt and the next piece of its output.

        Raises:
            SelfSpecError: the model failed on a prompt; where there are several, the message names it.
        """
        self._reads_pieces = True
        return self._pieces

    def results(self) -> list[Generation]:
        """The finished outputs in the order of the prompts; generates what is not generated yet.

        Raises:
            SelfSpecError: as ``pieces``.
        """
        for _ in self._pieces:
            pass
        return [job.result for job in self.jobs]

    def _run(self) -> Iterator[tuple[int, TextPiece]]:
        setup = self._setup
        cache = CacheMemory(setup.target, setup.chunks, prefixes=setup.prefix_cache)
        scheduler = Scheduler(setup.target, chunks=setup.chunks, max_batch=setup.max_batch, memory=cache)
        index_of = {id(job.request): index for index, job in enumerate(self.jobs)}
        for job in self.jobs:
            scheduler.add(job.request)
        memory = PeakMemory(setup.target.device)
        longest = max(self.jobs, key=lambda job: job.prompt_length + job.max_new_tokens)
        while scheduler.busy:
            with explain_out_of_memory(longest.prompt_length, longest.max_new_tokens):
                events = scheduler.step()
            for event in events:
                request = event.request if isinstance(event, Failed) else event.sequence.request
                index = index_of[id(request)]
                with self._named(index):
                    self.jobs[index].observe(event, memory)
                if self._reads_pieces:  # otherwise the text is decoded once, at the end
                    yield from ((index, piece) for piece in request.output.take_pieces())

    @contextmanager
    def _named(self, index: int) -> Iterator[None]:
        try:
            yield
        except SelfSpecError as error:
            if not self._several:
                raise
            raise type(error)(f"{self._name} {index}: {error}") from error


class Stream(Iterator[TextPiece]):
    """The pieces of one output, as they become certain.

    Made by ``Engine.stream``. Abandoning it half-way, by an exception too, leaves nothing behind in the engine.
    """

    def __init__(self, setup: Setup, prompt: Prompt, params: SamplingParams) -> None:
        self._batch = Batch(setup, [(prompt, params)])

    def __next__(self) -> TextPiece:
        return next(self._batch.pieces())[1]

    @property
    def rounds(self) -> tuple[Round, ...]:
        """The rounds so far, also of a stream that was abandoned."""
        return tuple(self._batch.jobs[0].rounds)

    @property
    def cached_prompt_tokens(self) -> int:
        """Tokens of the prompt that were found in a prefix cache, once it is read."""
        return self._batch.jobs[0].cached_prompt_tokens

    @property
    def result(self) -> Generation:
        """The finished output; reads the rest of the stream first."""
        return self._batch.results()[0]


def changed(params: SamplingParams, changes: Mapping[str, Any]) -> SamplingParams:
    """Parameters with some of them changed.

    Args:
        params: the parameters.
        changes: values by name.

    Raises:
        InvalidParameterError: there is no such parameter, or a value does not fit.
    """
    try:
        return replace(params, **changes)
    except TypeError:
        known = {field.name: field for field in fields(params)}
        for name in changes:
            if name not in known:
                raise InvalidParameterError(f"there is no sampling parameter '{name}'{suggest(name, known)}") from None
        raise


def rule_of(params: SamplingParams, device: torch.device) -> Rule:
    """Makes the sampling rule that the parameters of a request ask for.

    Args:
        params: how to choose tokens.
        device: where random numbers are drawn.
    """
    if not params.samples:
        return Greedy()
    if params.acceptance == "coupled" or (params.acceptance == "auto" and params.seed is not None):
        assert params.seed is not None
        return Coupled(params.seed)
    seed = params.seed if params.seed is not None else int(torch.randint(2**62, (1,)))
    return Speculative(seeded_generator(seed, device))


def _processor(setup: Setup, params: SamplingParams, prompt_length: int) -> ScoreProcessor:
    schema = params.json_schema
    assert schema is None or isinstance(schema, str)
    mask = None if schema is None else setup.grammars.mask(schema, prompt_length)
    return ScoreProcessor(build_processors(params, prompt_length, _end_ids(setup, params), mask))


def _end_ids(setup: Setup, params: SamplingParams) -> frozenset[int]:
    return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else setup.eos_ids)


def _output(setup: Setup, params: SamplingParams) -> Output:
    return Output(
        max_new_tokens=params.max_new_tokens,
        eos_ids=frozenset() if params.ignore_eos else setup.eos_ids,
        stop_ids=frozenset(params.stop_token_ids),
        text=None if setup.tokenizer is None else TextStream(setup.tokenizer, params.stop),
        criteria=params.stopping_criteria,
    )
