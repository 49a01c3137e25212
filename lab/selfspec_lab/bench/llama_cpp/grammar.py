"""JSON of a schema by llama.cpp's own grammar."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


@contextmanager
def json_chooser(library: Any, model: Any, context: Any, schema: str) -> Iterator["JsonChooser"]:
    """What chooses tokens greedily, so that the text becomes JSON of a schema."""
    vocabulary = library.llama_model_get_vocab(model)
    grammar = library.LlamaGrammar.from_json_schema(schema, verbose=False)._grammar
    sampler = library.llama_sampler_init_grammar(vocabulary, grammar.encode(), b"root")
    if not sampler:
        raise RuntimeError("llama.cpp cannot read the grammar of this schema")
    try:
        yield JsonChooser(library, context, sampler, library.llama_vocab_n_tokens(vocabulary))
    finally:
        library.llama_sampler_free(sampler)


class JsonChooser:
    """Chooses as llama.cpp's programs do: the likeliest token, and only if that is forbidden among all that are not.

    Args:
        library: llama.cpp's functions.
        context: whose last row gives the logits.
        sampler: llama.cpp's sampler of the grammar.
        vocab_size: number of tokens.
    """

    def __init__(self, library: Any, context: Any, sampler: Any, vocab_size: int) -> None:
        self._library, self._context, self._sampler = library, context, sampler
        self._vocab_size = vocab_size
        self._every = (library.llama_token_data * vocab_size)()
        self._fields = np.ctypeslib.as_array(self._every)
        self._fields["id"] = np.arange(vocab_size)
        self._one = (library.llama_token_data * 1)()

    def __call__(self) -> int:
        """The token after the last row."""
        pointer = self._library.llama_get_logits_ith(self._context, -1)
        logits = np.ctypeslib.as_array(pointer, shape=(self._vocab_size,))
        token_id = int(logits.argmax())
        self._one[0].id, self._one[0].logit = token_id, 1.0
        self._apply(self._one)
        if self._one[0].logit < 0:
            self._fields["logit"] = logits
            self._apply(self._every)
            token_id = int(self._fields["logit"].argmax())
        self._library.llama_sampler_accept(self._sampler, token_id)
        return token_id

    def _apply(self, candidates: Any) -> None:
        """Makes the logits of forbidden candidates minus infinity."""
        array = self._library.llama_token_data_array(candidates, len(candidates), -1, False)
        self._library.llama_sampler_apply(self._sampler, ctypes.byref(array))
