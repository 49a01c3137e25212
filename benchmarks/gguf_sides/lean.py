"""llama.cpp without torch, whose memory and loading time are not its own: ``python -m gguf_sides.lean FILE PROMPT``.

The program loads the file and prints the first token, as ``selfspec generate --max-new-tokens 1`` does.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from typing import Any

from gguf_sides.memory import resident_memory


class LeanLlamaCpp:
    """llama.cpp with its defaults and ``OMP_NUM_THREADS`` threads.

    Args:
        path: the file.
        context: positions.
    """

    def __init__(self, path: str, context: int) -> None:
        import llama_cpp
        import numpy as np

        self._as_array = np.ctypeslib.as_array
        self._library: Any = llama_cpp
        self._silent = llama_cpp.llama_log_callback(lambda *_: None)  # kept, as the library points to it
        llama_cpp.llama_log_set(self._silent, ctypes.c_void_p(0))
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = context
        params.n_threads = params.n_threads_batch = int(os.environ["OMP_NUM_THREADS"])
        self._context = llama_cpp.llama_init_from_model(self._model, params)

    def memory(self) -> dict[str, int]:
        """Resident bytes now and at their peak."""
        return resident_memory()

    def forget(self) -> None:
        """Nothing: llama.cpp keeps nothing."""

    def warm_up(self) -> None:
        """Nothing: llama.cpp prepares while it loads."""

    def encode(self, text: str) -> list[int]:
        """A text's tokens."""
        found = (ctypes.c_int32 * (len(text.encode()) + 2))()
        raw = text.encode()
        count = self._library.llama_tokenize(self._vocab, raw, len(raw), found, len(found), True, True)
        return list(found[:count])

    def generate(self, token_ids: Sequence[int], max_new_tokens: int, eos_ids: Sequence[int]) -> dict[str, Any]:
        """The tokens of a greedy output, with nothing in the cache before."""
        library = self._library
        written: list[int] = []
        library.llama_memory_clear(library.llama_get_memory(self._context), True)
        shape, following = (library.llama_vocab_n_tokens(self._vocab),), list(token_ids)
        while len(written) < max_new_tokens and not (written and written[-1] in eos_ids):
            tokens = (ctypes.c_int32 * len(following))(*following)
            if library.llama_decode(self._context, library.llama_batch_get_one(tokens, len(tokens))) != 0:
                raise RuntimeError("llama_decode failed")
            logits = self._as_array(library.llama_get_logits_ith(self._context, -1), shape=shape)
            following = [int(logits.argmax())]
            written += following
        return {"token_ids": written}


def main(path: str, prompt: str) -> None:
    """Prints the first token."""
    side = LeanLlamaCpp(path, 1024)
    print(side.generate(side.encode(prompt), 1, ())["token_ids"])


if __name__ == "__main__":
    main(*sys.argv[1:])
