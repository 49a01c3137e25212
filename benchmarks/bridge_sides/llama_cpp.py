"""llama-cpp-python, without drafts and with several draft models; without torch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from selfspec.bridges.llama_cpp import LlamaSuffixDecoding


class Llama:
    """A ``Llama`` that decodes greedily.

    Args:
        path: the GGUF file.
        threads_of_forwards: of llama.cpp.
        drafts: whether draft models can be used; the logits of all rows are then computed, of prompts too.
        context: positions.
    """

    def __init__(self, path: str, threads_of_forwards: int, drafts: bool, context: int = 1024) -> None:
        threads = {"n_threads": threads_of_forwards, "n_threads_batch": threads_of_forwards}
        self._llama: Any = llama_cpp.Llama(path, n_ctx=context, logits_all=drafts, verbose=False, **threads)
        self._bridge = LlamaSuffixDecoding()
        self._models = {
            "none": None,
            "lookup-2": LlamaPromptLookupDecoding(num_pred_tokens=2),
            "lookup-10": LlamaPromptLookupDecoding(num_pred_tokens=10),
            "bridge": self._bridge,
        }

    def describe(self) -> dict[str, Any]:
        """The version and the build."""
        information = llama_cpp.llama_print_system_info().decode("utf-8", "replace").strip()
        return {"name": "llama-cpp-python", "version": version("llama-cpp-python"), "system_info": information}

    def measure(self) -> dict[int, float]:
        """Seconds of forwards by their rows, by which the bridge plans from now on."""
        return self._bridge.measure(self._llama)

    def forget(self) -> None:
        """Drops the texts of the bridge."""
        self._bridge.drafts.forget()

    def generate(
        self, token_ids: Sequence[int], max_new_tokens: int, eos_ids: Sequence[int], draft: str
    ) -> dict[str, Any]:
        """The tokens of a greedy output; seconds to the first, and from there to the last; drafts of the bridge."""
        self._llama.draft_model, drafts = self._models[draft], self._bridge.drafts
        drafted, accepted, rounds = drafts.drafted, drafts.accepted, drafts.rounds
        self._llama.reset()
        written: list[int] = []
        began = first = last = time.perf_counter()
        tokens = self._llama.generate(token_ids, temp=0.0)
        for token in tokens:
            last = time.perf_counter()
            first = last if not written else first
            written.append(int(token))
            if len(written) == max_new_tokens or token in eos_ids:
                break
        tokens.close()
        counts = {"drafted": drafts.drafted - drafted, "accepted": drafts.accepted - accepted}
        counts["rounds"] = drafts.rounds - rounds
        return {"token_ids": written, "first": first - began, "rest": last - first, **counts}

    def margin(self, token_ids: Sequence[int], one: int, other: int) -> float:
        """How much higher the logit of one token is than another's after a text that is read as a prompt."""
        self._llama.reset()
        self._llama.eval(list(token_ids))
        logits = self._llama.scores[len(token_ids) - 1]
        return float(logits[one] - logits[other])
