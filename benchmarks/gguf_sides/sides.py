"""A runtime with a GGUF file, with the same questions to each.

What a side imports counts in its memory, so each imports as late as it can.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gguf_sides.memory import resident_memory

ROOM = 1024
"""Positions that llama.cpp gets beside those of the longest text."""


class Selfspec:
    """selfspec, with a method.

    Args:
        path: the file.
        method: name of the method.
        options: further options of the engine.
    """

    def __init__(self, path: str, method: str, options: Mapping[str, Any]) -> None:
        import selfspec

        self._engine = selfspec.Engine.from_pretrained(path, method, **options)

    def memory(self) -> dict[str, int]:
        """Resident bytes now and at their peak."""
        return resident_memory()

    def forget(self) -> None:
        """Removes what ``auto`` has kept of the model: warming up takes then what it takes for the first time."""
        from selfspec.methods.auto.preparation import FOLDER
        from selfspec.runtimes.costs.store import kept_file

        kept_file(self._engine.target, FOLDER).remove()

    def warm_up(self) -> None:
        """Does ahead what would slow down the first output."""
        self._engine.warmup()

    def generate(
        self, token_ids: Sequence[int], max_new_tokens: int, eos_ids: Sequence[int], **asked: Any
    ) -> dict[str, Any]:
        """The tokens of an output, greedy, sampled or of a schema; seconds to the first, and from there to the last."""
        # The engine knows the end-of-sequence tokens itself.
        options = {"max_new_tokens": max_new_tokens, "ignore_eos": not eos_ids}
        result = self._engine.generate(token_ids, **options, **asked)
        first = result.prefill_seconds
        return {"token_ids": list(result.token_ids), "first": first, "rest": result.seconds - first}

    def rows(self, token_ids: Sequence[int], context: int, row_counts: Sequence[int]) -> list[float]:
        """Median seconds of forwards of several rows."""
        from selfspec_lab.bench.verify_rows import verify_rows_seconds

        return list(verify_rows_seconds(self._engine.target, token_ids, context, row_counts).values())

    def likelihood(self, token_ids: Sequence[int]) -> float:
        """The negative log-likelihood of a text, by the forward of the model that was loaded."""
        return _likelihood_of(self._engine.target.model, token_ids)


class _LlamaCppAnswers:
    """What both ways to decode with llama.cpp answer alike; ``_decoding`` generates."""

    _decoding: Any

    def generate(
        self,
        token_ids: Sequence[int],
        max_new_tokens: int,
        eos_ids: Sequence[int],
        json_schema: str | None = None,
        **sampling: float,
    ) -> dict[str, Any]:
        """See ``Selfspec.generate``."""
        asked: dict[str, Any] = {"sampling": sampling} if sampling else {}
        if json_schema is not None:
            asked["json_schema"] = json_schema
        output = self._decoding.generate(token_ids, max_new_tokens, eos_ids, **asked)
        return {"token_ids": list(output.token_ids), "first": output.prefill_seconds, "rest": output.seconds}

    def warm_up(self) -> None:
        """Nothing: the first forwards are not timed."""


class LlamaCpp(_LlamaCppAnswers):
    """llama.cpp.

    Args:
        path: the file.
    """

    def __init__(self, path: str) -> None:
        from selfspec_lab.bench.llama_cpp import LlamaCpp as Decoding

        self._decoding = Decoding(_llama_cpp_file(path))

    def rows(self, token_ids: Sequence[int], context: int, row_counts: Sequence[int]) -> list[float]:
        """See ``Selfspec.rows``."""
        return list(self._decoding.rows_seconds(token_ids, context, row_counts).values())

    def likelihood(self, token_ids: Sequence[int]) -> float:
        """See ``Selfspec.likelihood``."""
        from gguf_sides.likelihood import negative_log_likelihood

        return negative_log_likelihood(self._decoding.logits(token_ids), token_ids)


class LlamaCppLookup(_LlamaCppAnswers):
    """llama.cpp with prompt lookup.

    Args:
        path: the file.
    """

    def __init__(self, path: str) -> None:
        from selfspec_lab.bench.llama_cpp import LlamaCppLookup as Decoding

        self._decoding = Decoding(_llama_cpp_file(path))


def _llama_cpp_file(path: str) -> Any:
    import torch

    from gguf_sides.questions import TEXT_TOKENS
    from selfspec_lab.bench.llama_cpp import GgufFile

    return GgufFile(Path(path), TEXT_TOKENS + ROOM, torch.bfloat16)


class Dequantised:
    """transformers' own model of the file's values in float32.

    Args:
        path: the file.
    """

    def __init__(self, path: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, GgufConfig

        file = Path(path)
        self._model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        ).eval()

    def likelihood(self, token_ids: Sequence[int]) -> float:
        """See ``Selfspec.likelihood``."""
        return _likelihood_of(self._model, token_ids)


def _likelihood_of(model: Any, token_ids: Sequence[int]) -> float:
    import torch

    from gguf_sides.likelihood import negative_log_likelihood

    with torch.inference_mode():
        logits = model(torch.tensor([token_ids]), use_cache=False).logits[0]
        return negative_log_likelihood(logits, token_ids)
