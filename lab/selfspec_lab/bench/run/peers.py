"""The peers: transformers and llama.cpp with the same weights."""

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from selfspec.errors import InvalidParameterError
from selfspec.methods.settings import suggest
from selfspec_lab.bench.baseline import TimedOutput, generate_timed
from selfspec_lab.bench.benchmark import explain
from selfspec_lab.bench.llama_cpp import GgufFile, LlamaCpp, LlamaCppLookup, WeightsFile, describe_build
from selfspec_lab.bench.llama_cpp.lookup import LOOKUP_TOKENS
from selfspec_lab.bench.options import EXIT_SHARE

TRANSFORMERS_PEERS: dict[str, Callable[[int], dict[str, Any]]] = {
    "transformers": lambda layers: {},
    "transformers-early-exit": lambda layers: {"assistant_early_exit": max(1, int(layers * EXIT_SHARE))},
    "transformers-prompt-lookup": lambda layers: {"prompt_lookup_num_tokens": 10},
}
"""Options of ``generate`` by name of the peer, given the model's number of layers."""

LLAMA_CPP_PEERS: dict[str, Callable[[GgufFile], LlamaCpp | LlamaCppLookup]] = {
    "llama-cpp": LlamaCpp,
    "llama-cpp-prompt-lookup": LlamaCppLookup,
}
"""Classes of the llama.cpp peers by name, each made from a file of the weights."""

PEERS = (*TRANSFORMERS_PEERS, *LLAMA_CPP_PEERS)
"""Names of all peers."""


def find_peers(names: Sequence[str], without_llama_cpp: str | None = None) -> list[str]:
    """Resolves names of peers; ``all`` means all that can be measured here, ``none`` means none.

    Args:
        names: names of peers.
        without_llama_cpp: why llama.cpp cannot be measured, or ``None``.

    Returns:
        The names, each once.

    Raises:
        InvalidParameterError: a peer is unknown or cannot be measured here.
    """
    if "all" in names:
        return list(TRANSFORMERS_PEERS if without_llama_cpp else PEERS)
    for name in names:
        if name not in PEERS and name != "none":
            raise InvalidParameterError(
                f"there is no peer '{name}'{suggest(name, dict.fromkeys(PEERS))}; choose all, none or from "
                f"{', '.join(PEERS)}"
            )
        if name in LLAMA_CPP_PEERS and without_llama_cpp:
            raise InvalidParameterError(f"the peer {name} cannot be measured: {without_llama_cpp}")
    return [name for name in dict.fromkeys(names) if name != "none"]


def run_peer(
    name: str,
    model: PreTrainedModel,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    *,
    eos_ids: Collection[int],
    temperature: float,
    top_p: float = 1.0,
) -> TimedOutput:
    """Generates and times an output with a transformers peer; see ``generate_timed``."""
    config: Any = model.config
    layers = config.num_hidden_layers
    options = TRANSFORMERS_PEERS[name](layers)
    try:
        return generate_timed(
            model, prompt_ids, max_new_tokens, options, eos_ids=eos_ids, temperature=temperature, top_p=top_p
        )
    finally:
        config.num_hidden_layers = layers  # early exit lowers it and does not restore it after an error


class Peers:
    """The peers of a run; a context manager that frees llama.cpp's models.

    Args:
        names: as ``find_peers`` returns them.
        model: the model.
        context: tokens of the longest prompt with its output.
        file: the GGUF file in whose own numbers the model runs, which llama.cpp reads, too; it gets a file of the
            model's weights if ``None``.
        progress: is called with a line of text before each step.

    Attributes:
        names: names of the peers that are ready.
        failures: by name the reasons of the others.
        build: llama.cpp's build, as ``describe_build`` returns it; ``None`` if none of its peers is ready.
    """

    def __init__(
        self,
        names: Sequence[str],
        model: PreTrainedModel,
        context: int,
        file: Path | None = None,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.failures: dict[str, str] = {}
        self._model, self._file = model, file
        self._open: dict[str, LlamaCpp | LlamaCppLookup] = {}
        self._stack = ExitStack()
        wanted = [name for name in names if name in LLAMA_CPP_PEERS]
        if wanted:
            progress("weights for llama.cpp")
            self._open_llama_cpp(wanted, context + LOOKUP_TOKENS)
        self.names = [name for name in names if name not in self.failures]
        self.build = describe_build() if self._open else None

    def write(
        self,
        name: str,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        *,
        eos_ids: Collection[int],
        temperature: float,
        top_p: float = 1.0,
    ) -> TimedOutput:
        """Generates and times an output with a peer.

        Args:
            name: one of ``names``.
            prompt_ids: the prompt.
            max_new_tokens: longest output.
            eos_ids: tokens that end it.
            temperature: 0 is greedy; llama.cpp is always greedy.
            top_p: tokens are sampled from the most probable ones up to this total.
        """
        if name in self._open:
            return self._open[name].generate(prompt_ids, max_new_tokens, eos_ids)
        return run_peer(
            name, self._model, prompt_ids, max_new_tokens, eos_ids=eos_ids, temperature=temperature, top_p=top_p
        )

    def _weights(self, context: int) -> GgufFile:
        """What llama.cpp reads."""
        if self._file is None:
            return WeightsFile(self._model, context)
        return GgufFile(self._file, context, self._model.dtype)

    def _open_llama_cpp(self, names: Sequence[str], context: int) -> None:
        try:
            weights = self._stack.enter_context(self._weights(context))
        except Exception as error:  # an unsupported model, too little space, or any error of the package
            self.failures |= dict.fromkeys(names, explain(error))
            return
        for name in names:
            try:
                self._open[name] = self._stack.enter_context(closing(LLAMA_CPP_PEERS[name](weights)))
            except Exception as error:  # any error of the library
                self.failures[name] = explain(error)

    def __enter__(self) -> "Peers":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()
        self._stack.close()
