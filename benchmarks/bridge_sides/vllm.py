"""vLLM in one process, without drafts, with its own n-gram drafts, or with those of the bridge."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
}
_SPECULATIVE: dict[str, dict[str, Any] | None] = {
    "none": None,
    "ngram-2": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
    "ngram-10": {"method": "ngram", "num_speculative_tokens": 10, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
    "bridge": {
        "method": "custom_class",
        "model": "selfspec.bridges.vllm.SuffixProposer",
        "num_speculative_tokens": 16,
    },
}


class Vllm:
    """An engine in float32 that decodes greedily.

    Args:
        path: folder of the model.
        draft: what drafts.
        context: positions.
    """

    def __init__(self, path: str, draft: str, context: int = 1024) -> None:
        os.environ.update(_ENVIRONMENT)
        import vllm

        self._vllm, self._requests = vllm, 0
        self._engine = vllm.LLM(
            path,
            dtype="float32",
            enforce_eager=True,
            max_model_len=context,
            max_num_seqs=8,
            enable_prefix_caching=False,
            speculative_config=_SPECULATIVE[draft],
        ).llm_engine
        self._drafts: Any = None
        if draft == "bridge":
            worker = self._engine.engine_core.engine_core.model_executor.driver_worker.worker
            self._drafts = worker.model_runner.drafter.drafts

    def describe(self) -> dict[str, Any]:
        """The version, and the versions of what it runs on."""
        import torch
        import transformers

        libraries = {"torch": torch.__version__, "transformers": transformers.__version__}
        return {"name": "vllm", "version": self._vllm.__version__, **libraries}

    def forget(self) -> None:
        """Drops the texts of the bridge."""
        self._drafts.forget()

    def row_costs(self) -> list[float]:
        """Seconds of forwards by their rows, 1 and up, as the bridge has learned them."""
        return list(self._drafts.costs.now()[1:18])

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, eos_ids: Sequence[int]) -> dict[str, Any]:
        """The tokens of greedy outputs of requests that begin together, and of the bridge's drafts.

        ``first`` are the seconds until every request has its first token, ``rest`` those from there to the last one.
        """
        counts = (0, 0, 0) if self._drafts is None else self._counts()
        sampling = self._vllm.SamplingParams(
            temperature=0.0, max_tokens=max_new_tokens, ignore_eos=True, stop_token_ids=list(eos_ids)
        )
        names = [str(self._requests + place) for place in range(len(prompts))]
        self._requests += len(prompts)
        began = first = time.perf_counter()
        for name, prompt in zip(names, prompts, strict=True):
            self._engine.add_request(name, {"prompt_token_ids": list(prompt)}, sampling)
        written: dict[str, list[int]] = {}
        at_first: dict[str, int] = {}
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                written[output.request_id] = list(output.outputs[0].token_ids)
            if len(at_first) < len(names) and len(written) == len(names):
                first, at_first = time.perf_counter(), {name: len(ids) for name, ids in written.items()}
        rest = time.perf_counter() - first
        after = counts if self._drafts is None else self._counts()
        drafted, accepted, rounds = (new - old for new, old in zip(after, counts, strict=True))
        return {
            "token_ids": [written[name] for name in names],
            "after_first": sum(len(written[name]) - at_first[name] for name in names),
            "first": first - began,
            "rest": rest,
            "drafted": drafted,
            "accepted": accepted,
            "rounds": rounds,
        }

    def _counts(self) -> tuple[int, int, int]:
        return self._drafts.drafted, self._drafts.accepted, self._drafts.rounds
