"""The public door: an engine generates with a model and a method that drafts with the model's own layers."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from transformers import PreTrainedTokenizerBase

from selfspec.decoding.output import Output
from selfspec.decoding.prefix_cache import CacheMemory
from selfspec.decoding.prompt import chunks_of
from selfspec.decoding.request import Request
from selfspec.decoding.scheduler import Scheduler
from selfspec.decoding.text import TextStream
from selfspec.engine_options import LOADING, EngineKeywords, EngineOptions, changed
from selfspec.errors import InvalidParameterError, UnsupportedModelError, naming
from selfspec.loading import load_model
from selfspec.loading.adapter_files import find_adapter, read_adapters
from selfspec.methods import make_method
from selfspec.methods.base import Method
from selfspec.methods.registry import DEFAULT_METHOD, find_method
from selfspec.methods.state import read_state, write_state
from selfspec.model.adapters import unwrapped
from selfspec.prompts import Prompt, PromptEncoder, Prompts, as_batch
from selfspec.runtimes.quantise import quantise
from selfspec.runtimes.target import Target, fingerprint
from selfspec.sampling.grammar import Grammars
from selfspec.sampling.processors import ScoreProcessor, build_processors, check_bias
from selfspec.types import Generation, Round, SamplingParams, TextPiece

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from typing_extensions import Unpack

_PREFIX_CACHE = 2**30
"""Bytes of the prefix cache with ``cache_dir``, where no size is given."""

_WARM_UP_ROWS = (1, 2, 4, 8, 16, 32, 64)


class Engine:
    """Generates with one model and one method.

    An engine may be used from several threads: a request keeps its state to itself, and a method guards what it learns.

    Args:
        model: a supported Hugging Face causal language model, in eval mode, or one that PEFT has adapted. It computes
            what it did, bit for bit; its weights may move in memory (see ``Target``). With ``weights``, a copy of it
            runs, and its memory can be freed by dropping it.
        tokenizer: its tokenizer; needed for text, not for token ids.
        method: the name of a method, a class of your own, or a method made for this model. ``auto`` takes what is
            fastest; ``autoregressive`` is plain decoding.
        options: the options, all together.
        **keywords: single options by name (see ``EngineOptions``), as in ``Engine(model, max_batch=4)``.

    Attributes:
        target: the model, taken apart.
        adapters: those that requests may name.
        method: what drafts.
        tokenizer: see above.
        options: see above.
        eos_ids: tokens that end an output.
        chunks: how prompts are cut.
        grammars: compiles the schemas of structured outputs.
        prefix_cache: keys and values of earlier texts, if it keeps any.
        kept: texts of requests in files, with ``cache_dir``.

    Raises:
        UnsupportedModelError: the model's family or a feature of it is not supported, or it cannot have low-bit
            weights.
        UnknownMethodError: there is no such method.
        InvalidParameterError: there is no such option, or its value does not fit.
        InvalidSettingError: a setting is unknown, of the wrong type or out of range.
        AdapterError: an adapter is missing or corrupt, of another model, or of a kind that is not supported.
        TokenizerMismatchError: the tokenizer has ids that the model has no embedding for.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        tokenizer: PreTrainedTokenizerBase | None = None,
        method: str | type[Method] | Method = DEFAULT_METHOD,
        options: EngineOptions | None = None,
        **keywords: "Unpack[EngineKeywords]",
    ) -> None:
        self.options = options = changed(options or EngineOptions(), keywords, "option")
        options.check_loaded()
        if isinstance(model, (str, Path)):
            raise InvalidParameterError(
                f"an engine takes a loaded model; for a name: Engine.from_pretrained('{model}')"
            )
        adapters = read_adapters(options.adapters)
        model = unwrapped(model)
        if isinstance(method, Method):
            options.chosen(type(method))  # refuses a paper beside it
            _check_own_target(method, model, options)
            self.target, self.method = method.target, method
        else:
            model = model if options.weights is None else quantise(model, options.weights)
            self.target = Target(model, options.runtime, cache_bits=options.cache_bits)
            self.method = make_method(options.chosen(method), self.target, options.settings)
        self.adapters = {name: files.fit(self.target) for name, files in adapters.items()}
        self.tokenizer = tokenizer
        self.eos_ids = _eos_ids(model, tokenizer)
        self.chunks = chunks_of(self.target, options.prefill_chunk)
        self.grammars = Grammars(tokenizer, self.target.vocab_size, self.eos_ids)
        self.kept = options.kept_texts(self.target, self.chunks.grain)
        self.prefix_cache = options.prefixes(self.target, default=_PREFIX_CACHE if self.kept else 0)
        self._encoder = PromptEncoder(tokenizer, self.target.vocab_size)

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        method: str | type[Method] = DEFAULT_METHOD,
        options: EngineOptions | None = None,
        **keywords: "Unpack[EngineKeywords]",
    ) -> "Engine":
        """Loads a model by name (see ``load_model``) and makes an engine for it.

        With ``weights``, the weights of the checkpoint are freed as soon as the low-bit ones are made.
        """
        options = changed(options or EngineOptions(), keywords, "option")
        chosen = find_method(options.chosen(method))
        chosen.Settings.parse(chosen.name, options.settings or {})  # what is wrong there needs no weights
        options = replace(options, adapters=read_adapters(options.adapters))
        loading = {name: getattr(options, name) for name in LOADING}
        model, tokenizer = load_model(name, weights=options.weights, **loading)
        return cls(model, tokenizer, chosen, replace(options, weights=None, paper=None, authors=False, **LOADING))

    def warmup(self, progress: Callable[[str], None] = lambda _: None) -> None:
        """Does ahead of the first request what would otherwise slow it down; the method learns nothing from it.

        Runs forwards of every width that rounds have, so that memory is allocated and whatever the runtime prepares is
        prepared, and lets the method prepare itself (KnapSpec measures its latencies). Needed before timing, welcome
        before serving, superfluous otherwise.

        Args:
            progress: is called with what comes next, before each part that may take long.
        """
        progress(f"forwards of {_WARM_UP_ROWS[0]} to {_WARM_UP_ROWS[-1]} rows")
        self.target.warm_up(_WARM_UP_ROWS)
        self.method.prepare(progress)

    @overload
    def generate(self, prompt: Prompt, params: SamplingParams | None = None, **changes: Any) -> Generation: ...

    @overload
    def generate(self, prompt: Prompts, params: SamplingParams | None = None, **changes: Any) -> list[Generation]: ...

    def generate(
        self, prompt: Prompt | Prompts, params: SamplingParams | None = None, **changes: Any
    ) -> Generation | list[Generation]:
        """Writes the whole output, or one for each prompt of a list.

        A list of numbers is one prompt of token ids, and a list of messages one chat. A list or tuple of texts, of
        token-id sequences (or tensors), or of chats is several prompts. All of them are checked before the first is
        run, then up to ``max_batch`` run together. Each output is the one of its prompt alone with the same parameters;
        a seed is the same for all. Logits processors of your own are called for one prompt at a time, in turns.

        Args:
            prompt: text, token ids, or chat messages; or a list of prompts of one form.
            params: how to choose tokens and when to stop.
            **changes: single parameters to change, by name, as in ``generate(prompt, temperature=0.7)``.

        Returns:
            The output, its counts and its rounds; for a list of prompts a list of these in the same order.

        Raises:
            SelfSpecError: prompt or parameters do not fit, or the model failed; nothing is left behind. Among several
                prompts the message names the index of the one at fault.
        """
        prompts = as_batch(prompt)
        if prompts is None:
            return self.stream(prompt, params, **changes).result  # type: ignore[arg-type]
        chosen = changed(params or SamplingParams(), changes, "sampling parameter")
        return self.generate_each([(one, chosen) for one in prompts])

    def generate_each(self, prompts: Sequence[tuple[Prompt, SamplingParams]], name: str = "prompt") -> list[Generation]:
        """Writes the outputs of several prompts together, each with parameters of its own.

        Args:
            prompts: each prompt with its parameters.
            name: what an error calls a prompt, before its index.

        Raises:
            SelfSpecError: as ``generate``.
        """
        labels = [f"{name} {index}" if len(prompts) > 1 else "" for index in range(len(prompts))]
        requests = [self.request(*each, label=label) for each, label in zip(prompts, labels, strict=True)]
        for _ in self._decode(requests):
            pass
        return [request.result for request in requests]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **changes: Any) -> "Stream":
        """Writes the output piece by piece.

        Prompt and parameters are checked at once; the model runs when the stream is read.

        Args:
            prompt: text, token ids, or chat messages; one prompt, not a list of them.
            params: how to choose tokens and when to stop.
            **changes: single parameters to change, by name.

        Returns:
            An iterator of ``TextPiece``; once read to its end its ``result`` is the whole ``Generation``.

        Raises:
            SelfSpecError: prompt or parameters do not fit.
        """
        request = self.request(prompt, changed(params or SamplingParams(), changes, "sampling parameter"))
        return Stream(request, self._decode([request]))

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        method: Method | None = None,
        label: str = "",
        cache_salt: str = "",
    ) -> Request:
        """Checks a prompt and its parameters.

        Args:
            prompt: text, token ids, or chat messages; one prompt.
            params: how to choose tokens and when to stop.
            method: what drafts, if not the engine's own.
            label: what errors call the request.
            cache_salt: only requests with the same salt share what is known of earlier texts.

        Returns:
            What a ``Scheduler`` decodes.

        Raises:
            SelfSpecError: prompt or parameters do not fit.
        """
        with naming(label):
            if params.stop and self.tokenizer is None:
                raise InvalidParameterError("stop strings need a tokenizer; give the engine one")
            prompt_ids = self._encoder.encode(prompt)
            self.target.check_length(len(prompt_ids), params.max_new_tokens)
            check_bias(params.logit_bias, self.target.vocab_size)
            self.target.ranks.compare("a prompt or its parameters", [prompt_ids, vars(params)])
            method, adapter = method or self.method, find_adapter(self.adapters, params.adapter)
            cache_salt = cache_salt if adapter is None else adapter.salted(cache_salt)
            processor = self._processor(params, len(prompt_ids))
            with self.target.ranks.same_draws():
                rule = self.options.rule(params, self.target.device, processor)
            return Request(
                prompt_ids,
                params.max_new_tokens,
                rule=rule,
                processor=processor,
                output=self._output(params),
                method=method,
                logprobs=params.logprobs,
                prompt_logprobs=params.prompt_logprobs,
                label=label,
                cache_salt=cache_salt,
                adapter=adapter,
                earlier=None if self.kept is None else self.kept.earlier(cache_salt),
                method_name=method.name,
                settings=method.settings.to_values(),
            )

    def save_state(self, path: str | Path) -> None:
        """Writes what the method has learned so far to a file.

        Args:
            path: the file; an existing one is replaced.

        Raises:
            StateError: the method learns nothing between requests, or the file cannot be written.
        """
        write_state(Path(path), self.method.state(), self._state_name, fingerprint(self.target))

    def load_state(self, path: str | Path) -> None:
        """Loads state that an engine with the same model and method has saved.

        Args:
            path: a file written by ``save_state``.

        Raises:
            StateError: there is no such file, it is damaged, of another version, of another method, model or dtype, or
                it does not fit the method's settings. What the method has learned so far is then left as it was.
        """
        self.method.state()  # a method that learns nothing says so before any file is looked at
        self.method.restore(read_state(Path(path), self._state_name, fingerprint(self.target)))

    @property
    def _state_name(self) -> str:
        return self.method.state_name or self.method.name

    def flush(self) -> None:
        """Waits until the files of ``cache_dir`` are written, as the end of the process does."""
        if self.kept is not None:
            self.kept.flush()

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt.

        Args:
            prompt: text, token ids, or chat messages (through the tokenizer's chat template).

        Raises:
            InvalidPromptError: the prompt is empty without a BOS token, out of vocabulary, or not one sequence.
        """
        return self._encoder.encode(prompt)

    def _decode(self, requests: Sequence[Request]) -> Iterator[Request]:
        """Runs requests to their ends; yields a request after each of its events."""
        memory = CacheMemory(self.target, self.chunks.grain, prefixes=self.prefix_cache, kept=self.kept)
        scheduler = Scheduler(self.target, chunks=self.chunks, max_batch=self.options.max_batch, memory=memory)
        for request in requests:
            scheduler.add(request)
        while scheduler.busy:
            for event in scheduler.step():
                if event.request.error is not None:
                    with naming(event.request.label):
                        raise event.request.error
                yield event.request

    def _processor(self, params: SamplingParams, prompt_length: int) -> ScoreProcessor:
        constraint = params.constraint
        mask = None if constraint is None else self.grammars.mask(constraint, prompt_length)
        ends = frozenset(params.stop_token_ids) | self._end_ids(params)
        return build_processors(params, prompt_length, ends, mask)

    def _output(self, params: SamplingParams) -> Output:
        return Output(
            max_new_tokens=params.max_new_tokens,
            eos_ids=self._end_ids(params),
            stop_ids=frozenset(params.stop_token_ids),
            text=None if self.tokenizer is None else TextStream(self.tokenizer, params.stop),
            criteria=tuple(map(self.target.ranks.led, params.stopping_criteria)),
        )

    def _end_ids(self, params: SamplingParams) -> frozenset[int]:
        return frozenset() if params.ignore_eos else self.eos_ids


class Stream(Iterator[TextPiece]):
    """The pieces of one output, as they become certain.

    Made by ``Engine.stream``. Abandoning it half-way, by an exception too, leaves nothing behind in the engine.
    """

    def __init__(self, request: Request, steps: Iterator[Request]) -> None:
        self._request, self._steps = request, steps
        self._pieces: deque[TextPiece] = deque()

    def __next__(self) -> TextPiece:
        while not self._pieces:
            next(self._steps)
            self._pieces.extend(self._request.output.take_pieces())
        return self._pieces.popleft()

    @property
    def rounds(self) -> tuple[Round, ...]:
        """The rounds so far, also of a stream that was abandoned."""
        return tuple(self._request.rounds)

    @property
    def cached_prompt_tokens(self) -> int:
        """Tokens of the prompt that were found in a prefix cache, once it is read."""
        return self._request.cached_tokens

    @property
    def result(self) -> Generation:
        """The finished output; reads the rest of the stream first."""
        for _ in self._steps:
            pass
        return self._request.result


def _check_own_target(method: Method, model: "PreTrainedModel", options: EngineOptions) -> None:
    """Refuses options that contradict the target that a method was made for."""
    if options.settings:
        raise InvalidParameterError("a method that is made already has its settings; pass its name to set them")
    if method.target.model is not model:
        raise InvalidParameterError("this method was made for another model; pass its name instead")
    for differs, own in (
        (options.runtime not in ("auto", method.target.runtime), "a runtime"),
        (options.weights is not None, "weights"),
        (options.cache_bits not in (None, method.target.cache_bits), "a cache"),
    ):
        if differs:
            raise InvalidParameterError(f"this method has a target with {own} of its own; pass its name instead")


def _eos_ids(model: "PreTrainedModel", tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """The ids that end an output: those of the generation config, else the config's, else the tokenizer's."""
    for source in (model.generation_config, model.config, tokenizer):
        ids: Any = getattr(source, "eos_token_id", None)
        if ids is not None:
            found = ids if isinstance(ids, (list, tuple)) else [ids]
            if not all(isinstance(each, int) for each in found):
                raise UnsupportedModelError(f"eos_token_id is {ids!r:.40}, no token id or list of these; correct it")
            return frozenset(found)
    return frozenset()
