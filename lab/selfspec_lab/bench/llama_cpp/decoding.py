"""Decoding with llama.cpp's C functions, with little Python per token."""

import ctypes
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch

from selfspec_lab.bench.baseline import TimedOutput
from selfspec_lab.bench.llama_cpp.grammar import json_chooser
from selfspec_lab.bench.llama_cpp.library import import_library
from selfspec_lab.bench.llama_cpp.weights import GgufFile
from selfspec_lab.bench.spread import median_seconds

ROW_COUNTS = (1, 2, 4, 8, 16)

_REPEATS = 5


class LlamaCpp:
    """A model in llama.cpp, with as many threads as torch; a context manager that frees it.

    All options are llama.cpp's defaults, except that the cache of a float32 model is float32 (of 16-bit models it is
    float16). The next token is numpy's argmax of the logits, which is faster than llama.cpp's greedy sampler, because
    that sampler first copies the logits of the whole vocabulary.

    Args:
        weights: the model's file.

    Raises:
        SelfSpecError: ``llama-cpp-python`` is not installed.
        RuntimeError: llama.cpp cannot load the file, or has too little memory for the context.
    """

    def __init__(self, weights: GgufFile) -> None:
        self._library = library = import_library()
        self._weights = weights
        self._context: Any = None
        self._model: Any = library.llama_model_load_from_file(
            str(weights.path).encode(), library.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError("llama.cpp cannot load the GGUF file of this model")
        self._context = library.llama_init_from_model(self._model, _context_params(library, weights))
        if not self._context:
            self.close()
            raise RuntimeError(f"llama.cpp cannot make a context of {weights.context} tokens")
        self._memory = library.llama_get_memory(self._context)
        self._vocab_size = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self._model))

    def generate(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        eos_ids: Collection[int] = (),
        sampling: Mapping[str, float] | None = None,
        json_schema: str | None = None,
    ) -> TimedOutput:
        """Generates and times an output, starting with an empty cache.

        Args:
            prompt_ids: the prompt.
            max_new_tokens: longest output.
            eos_ids: tokens that end the output.
            sampling: ``top_k``, ``top_p``, ``min_p`` and ``temperature`` of llama.cpp's own samplers, and a ``seed``;
                greedy if not given.
            json_schema: the greedy output is JSON of this schema, by llama.cpp's own grammar.

        Raises:
            ContextLengthError: they exceed the context.
        """
        if json_schema is not None:
            chooser: AbstractContextManager[Callable[[], int]] = json_chooser(
                self._library, self._model, self._context, json_schema
            )
        else:
            chooser = self._chooser(sampling)
        with chooser as choose:
            return self._generate(prompt_ids, max_new_tokens, eos_ids, choose)

    def _generate(
        self, prompt_ids: Sequence[int], max_new_tokens: int, eos_ids: Collection[int], choose: Callable[[], int]
    ) -> TimedOutput:
        self._weights.check_room(len(prompt_ids) + max_new_tokens)
        library = self._library
        prompt, step = _array(prompt_ids), _array([0])  # a batch holds pointers to these
        prefill, next_batch = library.llama_batch_get_one(prompt, len(prompt)), library.llama_batch_get_one(step, 1)
        library.llama_memory_clear(self._memory, True)
        started = time.perf_counter()
        self._decode(prefill)
        token_ids = [choose()]
        first = time.perf_counter()
        while len(token_ids) < max_new_tokens and token_ids[-1] not in eos_ids:
            step[0] = token_ids[-1]
            self._decode(next_batch)
            token_ids.append(choose())
        return TimedOutput(tuple(token_ids), first - started, time.perf_counter() - first)

    def rows_seconds(
        self, token_ids: Sequence[int], context: int, row_counts: Sequence[int] = ROW_COUNTS
    ) -> dict[int, float]:
        """Median seconds of forwards of several rows with the logits of every row, timed in turns.

        Args:
            token_ids: tokens for context and rows, repeated as needed.
            context: number of tokens in the cache before the rows.
            row_counts: numbers of rows.

        Returns:
            Seconds by number of rows, like ``verify_rows_seconds`` for selfspec.

        Raises:
            ContextLengthError: they exceed the context.
        """
        library, length = self._library, context + max(row_counts)
        self._weights.check_room(length)
        ids = (list(token_ids) * (length // len(token_ids) + 1))[:length]
        before = _array(ids[:context])  # a batch holds a pointer to it
        batches = {rows: self._row_batch(ids[context : context + rows], context) for rows in row_counts}
        library.llama_memory_clear(self._memory, True)
        self._decode(library.llama_batch_get_one(before, context))

        def forward(rows: int) -> Callable[[], None]:
            def run() -> None:
                self._decode(batches[rows])
                library.llama_get_logits_ith(self._context, rows - 1)
                library.llama_memory_seq_rm(self._memory, 0, context, -1)

            return run

        try:
            tasks = {rows: forward(rows) for rows in row_counts}
            return median_seconds(tasks, torch.device("cpu"), repeats=_REPEATS)
        finally:
            for batch in batches.values():
                library.llama_batch_free(batch)

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """The logits after every token of a text, starting with an empty cache.

        Args:
            token_ids: the text.

        Returns:
            A float32 tensor, ``[len(token_ids), vocabulary]``.

        Raises:
            ContextLengthError: they exceed the context.
        """
        library, count = self._library, len(token_ids)
        self._weights.check_room(count)
        library.llama_memory_clear(self._memory, True)
        batch = self._row_batch(token_ids, 0)
        try:
            self._decode(batch)
        finally:
            library.llama_batch_free(batch)
        found = np.ctypeslib.as_array(library.llama_get_logits(self._context), shape=(count, self._vocab_size))
        return torch.from_numpy(found.copy())

    def close(self) -> None:
        """Frees the model; it cannot be used afterwards."""
        if self._context:
            self._library.llama_free(self._context)
        if self._model:
            self._library.llama_model_free(self._model)
        self._context = self._model = None

    def __enter__(self) -> "LlamaCpp":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _decode(self, batch: Any) -> None:
        status = self._library.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode failed with status {status}")

    @contextmanager
    def _chooser(self, sampling: Mapping[str, float] | None) -> Iterator[Callable[[], int]]:
        """What chooses the token after the last row; samplers in the order of llama.cpp's programs."""
        if sampling is None:
            yield self._best
            return
        library = self._library
        chain = library.llama_sampler_chain_init(library.llama_sampler_chain_default_params())
        for sampler in (
            library.llama_sampler_init_top_k(int(sampling["top_k"])),
            library.llama_sampler_init_top_p(sampling["top_p"], 1),
            library.llama_sampler_init_min_p(sampling["min_p"], 1),
            library.llama_sampler_init_temp(sampling["temperature"]),
            library.llama_sampler_init_dist(int(sampling["seed"])),
        ):
            library.llama_sampler_chain_add(chain, sampler)
        try:
            yield lambda: int(library.llama_sampler_sample(chain, self._context, -1))
        finally:
            library.llama_sampler_free(chain)

    def _best(self) -> int:
        """The token with the highest logit after the last row."""
        logits = self._library.llama_get_logits_ith(self._context, -1)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax())

    def _row_batch(self, token_ids: Sequence[int], context: int) -> Any:
        """A batch of tokens after ``context`` others, with logits for each; the caller frees it."""
        batch = self._library.llama_batch_init(len(token_ids), 0, 1)
        batch.n_tokens = len(token_ids)
        for row, token_id in enumerate(token_ids):
            batch.token[row] = token_id
            batch.pos[row] = context + row
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = 0
            batch.logits[row] = 1
        return batch


def cache_type(library: Any, dtype: torch.dtype) -> int:
    """llama.cpp's type of keys and values for weights of a dtype."""
    return int(library.GGML_TYPE_F32 if dtype == torch.float32 else library.GGML_TYPE_F16)


def _context_params(library: Any, weights: GgufFile) -> Any:
    params = library.llama_context_default_params()
    params.n_ctx = params.n_batch = weights.context
    params.n_threads = params.n_threads_batch = torch.get_num_threads()
    params.type_k = params.type_v = cache_type(library, weights.dtype)
    return params


def _array(token_ids: Sequence[int]) -> Any:
    return (ctypes.c_int32 * len(token_ids))(*token_ids)
