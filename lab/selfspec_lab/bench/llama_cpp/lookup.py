"""Prompt lookup with ``llama-cpp-python``: ``Llama`` with ``LlamaPromptLookupDecoding``."""

import importlib
import time
from collections.abc import Collection, Sequence
from typing import Any

import torch

from selfspec_lab.bench.baseline import TimedOutput
from selfspec_lab.bench.llama_cpp.decoding import cache_type
from selfspec_lab.bench.llama_cpp.library import import_library
from selfspec_lab.bench.llama_cpp.weights import GgufFile

LOOKUP_TOKENS = 2
"""Draft length that its documentation recommends for machines without an accelerator."""


class LlamaCppLookup:
    """A model in ``Llama`` with prompt lookup and greedy decoding.

    A draft needs the logits of every row (``logits_all``). The class therefore computes them for the whole prompt and
    copies them into an array ``[context, vocabulary]``, so its first token is slow.

    Args:
        weights: the model's file.

    Raises:
        SelfSpecError: ``llama-cpp-python`` is not installed.
        ValueError: it cannot load the file, or has too little memory for the context.
    """

    def __init__(self, weights: GgufFile) -> None:
        library = import_library()
        self._weights = weights
        speculative = importlib.import_module("llama_cpp.llama_speculative")
        threads, cache = torch.get_num_threads(), cache_type(library, weights.dtype)
        self._llama: Any = library.Llama(
            str(weights.path),
            n_ctx=weights.context,
            n_threads=threads,
            n_threads_batch=threads,
            type_k=cache,
            type_v=cache,
            logits_all=True,
            draft_model=speculative.LlamaPromptLookupDecoding(num_pred_tokens=LOOKUP_TOKENS),
            verbose=False,
        )

    def generate(self, prompt_ids: Sequence[int], max_new_tokens: int, eos_ids: Collection[int] = ()) -> TimedOutput:
        """Generates and times an output; see ``LlamaCpp.generate``."""
        self._weights.check_room(len(prompt_ids) + max_new_tokens)
        token_ids: list[int] = []
        self._llama.reset()
        started = first = last = time.perf_counter()
        tokens = self._llama.generate(list(prompt_ids), temp=0.0)
        for token_id in tokens:
            last = time.perf_counter()
            first = last if not token_ids else first
            token_ids.append(int(token_id))
            if len(token_ids) == max_new_tokens or token_id in eos_ids:
                break
        tokens.close()
        return TimedOutput(tuple(token_ids), first - started, last - first)

    def close(self) -> None:
        """Frees the model; it cannot be used afterwards."""
        self._llama.close()
