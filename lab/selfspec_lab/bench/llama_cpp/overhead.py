"""llama.cpp in ``selfspec bench overhead``: decoding, and forwards of several rows."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from transformers import PreTrainedModel

from selfspec_lab.bench.benchmark import Candidate, Outcome, Sample, explain
from selfspec_lab.bench.llama_cpp.decoding import ROW_COUNTS, LlamaCpp
from selfspec_lab.bench.llama_cpp.library import describe_build, obstacle
from selfspec_lab.bench.llama_cpp.weights import WeightsFile
from selfspec_lab.bench.overhead_figures import tokens_per_second
from selfspec_lab.bench.resident_peak import ResidentPeak
from selfspec_lab.bench.spread import Measured

NAME = "llama.cpp"
"""Name of the candidate."""


class OverheadPeer:
    """llama.cpp with the weights of a model; a context manager that frees it.

    Args:
        model: the model.
        context: tokens of the longest prompt with its output.
        wanted: whether to measure it.

    Attributes:
        error: why it is not measured, or ``None``.
    """

    def __init__(self, model: PreTrainedModel, context: int, *, wanted: bool) -> None:
        self.error = obstacle(model.device) if wanted else "not requested"
        self._rows: list[dict[int, float]] = []
        self._stack = ExitStack()
        self._build: dict[str, Any] = {"version": None, "system_info": None, "missing": None}
        if self.error is None:
            try:
                self._open(model, context)
            except Exception as error:  # an unsupported model, too little space, or any error of the library
                self.error = explain(error)

    def candidate(self, max_new_tokens: int) -> Candidate:
        """A candidate that generates outputs of exactly this length."""

        def write(prompt_ids: Sequence[int]) -> Sample:
            peak = ResidentPeak(torch.device("cpu"))
            output = self._llama.generate(prompt_ids, max_new_tokens)
            return Sample(output.token_ids, output.seconds, peak.peak_bytes())

        return write

    def measure_rows(self, token_ids: Sequence[int], context: int) -> None:
        """Times forwards of several rows; see ``LlamaCpp.rows_seconds``."""
        if self.error is not None:
            return
        try:
            self._rows.append(self._llama.rows_seconds(token_ids, context))
        except Exception as error:  # any error of the library; the others continue
            self.error = explain(error)

    def report(self, outcome: Outcome, plain_speeds: Sequence[float]) -> dict[str, Any]:
        """Fields of the report.

        Args:
            outcome: results of the benchmark.
            plain_speeds: tokens per second of selfspec's plain decoding, by repeat.

        Returns:
            ``tokens_per_second`` and ``plain_speedup`` (plain decoding ÷ llama.cpp) with spreads, ``error``, the
            fields of ``describe_build``, and ``verify_rows`` with ``verify_rows_spread``: by number of rows the time
            of a forward ÷ that of one row.
        """
        speeds = [tokens_per_second(samples) for samples in outcome.samples.get(NAME, ())]
        ratios = [plain / speed for plain, speed in zip(plain_speeds, speeds, strict=False)]
        rows = {str(count): Measured.of(seconds[count] / seconds[1] for seconds in self._rows) for count in ROW_COUNTS}
        return {
            **Measured.of(speeds).fields("tokens_per_second"),
            **Measured.of(ratios).fields("plain_speedup"),
            "error": outcome.failures.get(NAME, self.error),
            **self._build,
            "verify_rows": {count: measured.median for count, measured in rows.items()},
            "verify_rows_spread": {count: measured.spread for count, measured in rows.items()},
            "verify_one_row_seconds": Measured.of(seconds[1] for seconds in self._rows).median,
        }

    def _open(self, model: PreTrainedModel, context: int) -> None:
        weights = self._stack.enter_context(WeightsFile(model, context + max(ROW_COUNTS)))
        self._llama = self._stack.enter_context(LlamaCpp(weights))
        self._build = describe_build()

    def __enter__(self) -> "OverheadPeer":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
