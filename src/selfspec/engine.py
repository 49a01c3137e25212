"""The public door: an engine generates with a model and a method that drafts with the model's own layers."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfspec.decoding.chunks import chunks_of
from selfspec.decoding.prefix_cache import PrefixCache
from selfspec.errors import InvalidParameterError
from selfspec.generation import Batch, Setup, Stream, changed, rule_of
from selfspec.loading import load_model
from selfspec.methods import make_method
from selfspec.methods.base import Method
from selfspec.methods.registry import DEFAULT_METHOD, find_method
from selfspec.methods.settings import parse_settings
from selfspec.methods.state import read_state, write_state
from selfspec.prompt_encoding import PromptEncoder
from selfspec.prompt_forms import Prompt, Prompts, as_batch
from selfspec.runtimes.fingerprint import fingerprint
from selfspec.runtimes.precision import Precision
from selfspec.runtimes.quantise import quantise
from selfspec.runtimes.target import Target
from selfspec.sampling.grammars import Grammars
from selfspec.sampling.rules import Rule
from selfspec.types import Generation, SamplingParams

_WARM_UP_ROWS = (1, 2, 4, 8, 16, 32, 64)


class Engine:
    """Generates with one model and one method.

    An engine may be used from several threads: a request keeps its state to itself, and a method guards what it learns.

    Args:
        model: a supported Hugging Face causal language model, in eval mode. It computes what it did,
            bit for bit; its weights may move in memory (see ``Target``).
        tokenizer: its tokenizer; needed for text, not for token ids.
        method: the name of a method, a class of your own, or a method made for this model. ``auto`` takes what is
            fastest; ``autoregressive`` is plain decoding.
        settings: values of the method's settings by name.
        prefill_chunk: longest part of a prompt to run at once, in tokens; if not given, what suits the model and the
            device (``decoding.chunks.chunks_of``).
        max_batch: most prompts of a list to generate at a time; each of them holds a cache for its whole length.
        runtime: how the model's sublayers run, one of ``selfspec.runtimes.target.RUNTIMES``.
        weights: ``int8`` or ``int4`` to run a copy of the model with low-bit weights instead (see ``quantise``); the
            given one stays as it is, and its memory can be freed by dropping it.
        keep_copies: keep low-bit copies that draft in the user's cache folder, for later processes.
        prefix_cache: most bytes of keys and values of earlier texts, which prompts that begin alike need not read
            again; or the prefix cache of another engine for this model.
        rule: makes the sampling rule of a request. Other functions than the default are for experiments: their rules
            need not be lossless.

    Attributes:
        target: the model, taken apart.
        method: what drafts.
        eos_ids: tokens that end an output.
        setup: all that a request is generated with.

    Raises:
        UnsupportedModelError: the model's family or a feature of it is not supported, or it cannot have low-bit
            weights.
        UnknownMethodError: there is no such method.
        InvalidSettingError: a setting is unknown, of the wrong type or out of range.
        TokenizerMismatchError: the tokenizer has ids that the model has no embedding for.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        method: str | type[Method] | Method = DEFAULT_METHOD,
        *,
        settings: Mapping[str, Any] | None = None,
        prefill_chunk: int | None = None,
        max_batch: int = 16,
        runtime: str = "auto",
        weights: str | Precision | None = None,
        keep_copies: bool = False,
        prefix_cache: int | PrefixCache = 0,
        rule: Callable[[SamplingParams, torch.device], Rule] = rule_of,
    ) -> None:
        if prefill_chunk is not None and prefill_chunk < 1:
            raise InvalidParameterError(f"prefill_chunk must be at least 1, not {prefill_chunk}")
        if max_batch < 1:
            raise InvalidParameterError(f"max_batch must be at least 1, not {max_batch}")
        if isinstance(method, Method):
            if settings:
                raise InvalidParameterError("a method that is made already has its settings; pass its name to set them")
            if method.target.model is not model:
                raise InvalidParameterError("this method was made for another model; pass its name instead")
            if runtime not in ("auto", method.target.runtime):
                raise InvalidParameterError("this method has a target with a runtime of its own; pass its name instead")
            if weights is not None:
                raise InvalidParameterError("this method has a target with weights of its own; pass its name instead")
            self.target = method.target
            self.method = method
        else:
            model = model if weights is None else quantise(model, weights)
            self.target = Target(model, runtime, keep_copies=keep_copies)
            self.method = make_method(method, self.target, settings)
        self.tokenizer = tokenizer
        self.eos_ids = _eos_ids(model, tokenizer)
        encoder = PromptEncoder(tokenizer, self.target.vocab_size)
        grammars = Grammars(tokenizer, self.target.vocab_size, self.eos_ids)
        chunks = chunks_of(self.target, prefill_chunk)
        prefixes = _prefix_cache(self.target, prefix_cache)
        self.setup = Setup(
            self.target, self.method, tokenizer, encoder, self.eos_ids, chunks, max_batch, rule, grammars, prefixes
        )

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        method: str | type[Method] = DEFAULT_METHOD,
        *,
        settings: Mapping[str, Any] | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        runtime: str = "auto",
        weights: str | Precision | None = None,
        keep_copies: bool = False,
        prefix_cache: int = 0,
    ) -> "Engine":
        """Loads a model by name (see ``load_model``) and makes an engine for it.

        With ``weights``, the weights of the checkpoint are given back as soon as their low-bit copies are made.
        """
        chosen = find_method(method)
        parse_settings(chosen.Settings, chosen.name, settings or {})  # what is wrong there needs no weights
        model, tokenizer = load_model(name, dtype=dtype, device=device, weights=weights)
        return cls(
            model,
            tokenizer,
            chosen,
            settings=settings,
            runtime=runtime,
            keep_copies=keep_copies,
            prefix_cache=prefix_cache,
        )

    @property
    def prefix_cache(self) -> PrefixCache | None:
        """Keys and values of earlier texts, if it keeps any."""
        return self.setup.prefix_cache

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
        chosen = changed(params or SamplingParams(), changes)
        return Batch(self.setup, [(one, chosen) for one in prompts]).results()

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **changes: Any) -> Stream:
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
        return Stream(self.setup, prompt, changed(params or SamplingParams(), changes))

    def save_state(self, path: str | Path) -> None:
        """Writes what the method has learned so far to a file.

        Args:
            path: the file; an existing one is replaced.

        Raises:
            StateError: the method learns nothing between requests, or the file cannot be written.
        """
        write_state(Path(path), self.method.state(), self.method.name, fingerprint(self.target))

    def load_state(self, path: str | Path) -> None:
        """Loads state that an engine with the same model and method has saved.

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
        return self.setup.encoder.encode(prompt)

    def batch(self, prompts: Sequence[tuple[Prompt, SamplingParams]], name: str = "prompt") -> Batch:
        """Prompts with parameters of their own, to be generated together piece by piece.

        Args:
            prompts: each prompt with its parameters.
            name: what an error calls a prompt, before its index.

        Raises:
            SelfSpecError: a prompt or its parameters do not fit; the message names the prompt.
        """
        return Batch(self.setup, prompts, name)


def _prefix_cache(target: Target, given: int | PrefixCache) -> PrefixCache | None:
    if isinstance(given, PrefixCache):
        if given.target is not target:
            raise InvalidParameterError("this prefix cache is of another model; give a number of bytes instead")
        return given
    if given < 0:
        raise InvalidParameterError(f"prefix_cache must be at least 0 bytes, not {given}")
    return PrefixCache(target, given) if given else None


def _eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """The ids that end an output: those of the generation config, else the config's, else the tokenizer's."""
    for source in (model.generation_config, model.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()
