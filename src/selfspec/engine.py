"""The public door: an engine generates with a model and a method that drafts with the model's own layers."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, overload

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfspec.batch import Batch
from selfspec.decoding.loop import decode
from selfspec.decoding.output import Output
from selfspec.decoding.request import Request
from selfspec.decoding.text import TextStream
from selfspec.errors import InvalidParameterError, InvalidPromptError, TokenizerMismatchError
from selfspec.limits import check_context, explain_out_of_memory
from selfspec.loading import load_model
from selfspec.memory import PeakMemory
from selfspec.methods import make_method
from selfspec.methods.base import Method
from selfspec.methods.registry import find_method
from selfspec.methods.settings import parse_settings, suggest
from selfspec.methods.state import read_state, write_state
from selfspec.prompt_forms import Prompt, Prompts, as_batch, as_ids, is_chat
from selfspec.runtimes.fingerprint import fingerprint
from selfspec.runtimes.target import Target
from selfspec.sampling.processors import ScoreProcessor, build_processors
from selfspec.sampling.rules import Coupled, Greedy, Rule, Speculative, seeded_generator
from selfspec.types import Generation, Round, SamplingParams, TextPiece

_WARM_UP_ROWS = (1, 2, 4, 8, 16, 32, 64)


class Engine:
    """Generates with one model and one method.

    An engine may be used from several threads: a request keeps its state to itself, and a method guards what it learns.

    Args:
        model: a supported Hugging Face causal language model, in eval mode. It computes what it did,
            bit for bit; its weights may move in memory (see ``Target``).
        tokenizer: its tokenizer; needed for text, not for token ids.
        method: the name of a method, or a method made for this model.
        settings: values of the method's settings by name.
        prefill_chunk: longest part of a prompt to run at once, in tokens.
        runtime: how the model's sublayers run, one of ``selfspec.runtimes.target.RUNTIMES``.

    Attributes:
        target: the model, taken apart.
        method: what drafts.
        eos_ids: tokens that end an output.

    Raises:
        UnsupportedModelError: the model's family or a feature of it is not supported.
        UnknownMethodError: there is no such method.
        InvalidSettingError: a setting is unknown, of the wrong type or out of range.
        TokenizerMismatchError: the tokenizer has ids that the model has no embedding for.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        method: str | Method = "autoregressive",
        *,
        settings: Mapping[str, Any] | None = None,
        prefill_chunk: int = 1024,
        runtime: str = "auto",
    ) -> None:
        if prefill_chunk < 1:
            raise InvalidParameterError(f"prefill_chunk must be at least 1, not {prefill_chunk}")
        if isinstance(method, Method):
            if settings:
                raise InvalidParameterError("a method that is made already has its settings; pass its name to set them")
            if method.target.model is not model:
                raise InvalidParameterError("this method was made for another model; pass its name instead")
            if runtime not in ("auto", method.target.runtime):
                raise InvalidParameterError("this method has a target with a runtime of its own; pass its name instead")
            self.target = method.target
            self.method = method
        else:
            self.target = Target(model, runtime)
            self.method = make_method(method, self.target, settings)
        self.tokenizer = tokenizer
        self._prefill_chunk = prefill_chunk
        self.eos_ids = _eos_ids(model, tokenizer)
        if tokenizer is not None:
            _check_vocabulary(tokenizer, self.target)

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        method: str = "autoregressive",
        *,
        settings: Mapping[str, Any] | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        widen: int = 1,
        runtime: str = "auto",
    ) -> "Engine":
        """Loads a model by name (see ``load_model``) and makes an engine for it."""
        parse_settings(find_method(method).Settings, method, settings or {})  # what is wrong there needs no weights
        model, tokenizer = load_model(name, dtype=dtype, device=device, widen=widen)
        return cls(model, tokenizer, method, settings=settings, runtime=runtime)

    def warmup(self, progress: Callable[[str], None] = lambda _: None) -> None:
        """Does ahead of the first request what would otherwise slow it down; the method learns nothing from it.

        Runs forwards of every width that rounds have, so that memory is allocated and whatever the runtime prepares is
        prepared, and lets the method prepare itself (KnapSpec measures its latencies). Needed before timing, welcome
        before serving, superfluous otherwise.

        Args:
            progress: is told what goes on, before each part that may take long.
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
        run, and each gives what it gives alone with the same parameters; a seed is the same for all.

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
        chosen = _change(params or SamplingParams(), changes)
        return Batch(self, [(one, chosen) for one in prompts]).results()

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
        chosen = _change(params or SamplingParams(), changes)
        if chosen.stop and self.tokenizer is None:
            raise InvalidParameterError("stop strings need a tokenizer; give the engine one")
        return Stream(self, self.encode(prompt), chosen)

    def save_state(self, path: str | Path) -> None:
        """Writes what the method has learned so far to a file.

        Args:
            path: the file; an existing one is replaced.

        Raises:
            StateError: the method learns nothing between requests, or the file cannot be written.
        """
        write_state(Path(path), self.method.state(), self.method.name, fingerprint(self.target))

    def load_state(self, path: str | Path) -> None:
        """Takes up what an equal engine has learned.

        Args:
            path: a file written by ``save_state``.

        Raises:
            StateError: there is no such file, it is damaged, of another version, of another method, model or dtype, or
                it does not fit the method's settings. What the method has learned so far is then left as it was.
        """
        self.method.state()  # a method that learns nothing says so before any file is looked at
        self.method.restore(read_state(Path(path), self.method.name, fingerprint(self.target)))

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt.

        Args:
            prompt: text, token ids, or chat messages (through the tokenizer's chat template).

        Raises:
            InvalidPromptError: the prompt is empty without a BOS token, out of vocabulary, or not one sequence.
        """
        if isinstance(prompt, str):
            token_ids = self._encode_text(prompt)
        elif is_chat(prompt):
            token_ids = self._encode_chat(prompt)
        else:
            token_ids = as_ids(prompt)
        return self._check_ids(token_ids)

    def _encode_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        tokenizer = self._require_tokenizer()
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidPromptError(
                f"the prompt is not valid text: character {error.start} is a lone surrogate, {text[error.start]!r}; "
                "decode the bytes that it came from as what they are"
            ) from error
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def _encode_chat(self, messages: Sequence[Any]) -> list[int]:
        tokenizer = self._require_tokenizer()
        if not getattr(tokenizer, "chat_template", None):
            raise InvalidPromptError("the tokenizer has no chat template; give a plain prompt")
        try:
            text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        except Exception as error:  # templates raise whatever they like
            raise InvalidPromptError(f"the chat template refused the messages: {error}") from error
        return self._encode_text(text, add_special_tokens=not _starts_with_bos(tokenizer, text))

    def _check_ids(self, token_ids: list[int]) -> list[int]:
        if not token_ids:
            bos = getattr(self.tokenizer, "bos_token_id", None)
            if bos is None:
                raise InvalidPromptError("the prompt is empty and there is no BOS token to start from; give some text")
            return [bos]
        for token_id in token_ids:
            if not 0 <= token_id < self.target.vocab_size:
                raise InvalidPromptError(
                    f"token id {token_id} of the prompt is outside the model's vocabulary of {self.target.vocab_size}"
                )
        return token_ids

    def _require_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise InvalidPromptError("text needs a tokenizer; give the engine one, or give token ids")
        return self.tokenizer

    def _make_rule(self, params: SamplingParams) -> Rule:
        if not params.samples:
            return Greedy()
        if params.acceptance == "coupled" or (params.acceptance == "auto" and params.seed is not None):
            assert params.seed is not None
            return Coupled(params.seed)
        seed = params.seed if params.seed is not None else int(torch.randint(2**62, (1,)))
        return Speculative(seeded_generator(seed, self.target.device))

    def _make_output(self, prompt_ids: Sequence[int], params: SamplingParams) -> Output:
        return Output(
            prompt_ids,
            max_new_tokens=params.max_new_tokens,
            eos_ids=frozenset() if params.ignore_eos else self.eos_ids,
            stop_ids=frozenset(params.stop_token_ids),
            text=None if self.tokenizer is None else TextStream(self.tokenizer, params.stop),
            criteria=params.stopping_criteria,
        )


class Stream(Iterator[TextPiece]):
    """The pieces of one output, as they become certain.

    Made by ``Engine.stream``. Abandoning it half-way, by an exception too, leaves nothing behind in the engine.
    """

    def __init__(self, engine: Engine, prompt_ids: list[int], params: SamplingParams) -> None:
        check_context(len(prompt_ids), params.max_new_tokens, engine.target.context_limit)
        self._engine = engine
        self._prompt_ids = prompt_ids
        self._output = engine._make_output(prompt_ids, params)
        self._processor = ScoreProcessor(build_processors(params))
        self._rule = engine._make_rule(params)
        self._params = params
        self._result: Generation | None = None
        self._records: list[Round] = []
        self._pieces = self._run()

    def __next__(self) -> TextPiece:
        return next(self._pieces)

    @property
    def rounds(self) -> tuple[Round, ...]:
        """The rounds so far, also of a stream that was abandoned."""
        return tuple(self._records)

    @property
    def result(self) -> Generation:
        """The finished output; reads the rest of the stream first."""
        for _ in self._pieces:
            pass
        if self._result is None:
            raise RuntimeError("the stream ended before the output was complete")
        return self._result

    def _run(self) -> Iterator[TextPiece]:
        started = time.perf_counter()
        memory = PeakMemory(self._engine.target.device)
        prefill_seconds = 0.0
        with explain_out_of_memory(len(self._prompt_ids), self._params.max_new_tokens):
            for record in self._rounds():
                if record is None:
                    prefill_seconds = time.perf_counter() - started
                else:
                    self._records.append(record)
                yield from self._output.take_pieces()
        self._result = self._finish(time.perf_counter() - started, prefill_seconds, memory.peak_bytes())

    def _rounds(self) -> Iterator[Round | None]:
        engine = self._engine
        request = Request(
            engine.target,
            self._prompt_ids,
            max_new_tokens=self._params.max_new_tokens,
            rule=self._rule,
            processor=self._processor,
            sibling_rows=engine.method.needs.sibling_rows,
            probe_rows=engine.method.needs.probe_rows,
        )
        yield from decode(engine.target, engine.method, request, self._output, engine._prefill_chunk)

    def _finish(self, seconds: float, prefill_seconds: float, peak: int) -> Generation:
        output, engine = self._output, self._engine
        assert output.finish_reason is not None
        tokenizer = engine.tokenizer
        return Generation(
            text="" if tokenizer is None else str(tokenizer.decode(output.token_ids, skip_special_tokens=True)),
            token_ids=tuple(output.token_ids),
            origins=tuple(output.origins),
            prompt_token_count=len(self._prompt_ids),
            method=engine.method.name,
            settings=asdict(engine.method.settings),
            finish_reason=output.finish_reason,
            seconds=seconds,
            prefill_seconds=prefill_seconds,
            rounds=self.rounds,
            peak_memory_bytes=peak,
        )


def _change(params: SamplingParams, changes: Mapping[str, Any]) -> SamplingParams:
    try:
        return replace(params, **changes)
    except TypeError:
        known = {field.name: field for field in fields(params)}
        for name in changes:
            if name not in known:
                raise InvalidParameterError(f"there is no sampling parameter '{name}'{suggest(name, known)}") from None
        raise


def _starts_with_bos(tokenizer: Any, text: str) -> bool:
    return bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)


def _eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """The ids that end an output: those of the generation config, else the config's, else the tokenizer's."""
    for source in (model.generation_config, model.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()


def _check_vocabulary(tokenizer: PreTrainedTokenizerBase, target: Target) -> None:
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= target.vocab_size:
        raise TokenizerMismatchError(
            f"the tokenizer's largest id is {largest}, but the model has {target.vocab_size} embeddings; "
            "load the tokenizer that belongs to this model"
        )
