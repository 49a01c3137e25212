"""What ``gguf_files.py`` measures, candidate by candidate and in turns."""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from gguf_sides.bandwidth import ReadBandwidth
from gguf_sides.figures import AUTO, LLAMA, PLAIN
from gguf_sides.process import Process, busy_process, command_seconds
from gguf_sides.questions import FIRST, PROMPT_TOKENS, ROWS, ROWS_CONTEXT, TEXT_TOKENS, Questions
from selfspec_lab.measuring import in_turn

EXACT, LOOKUP, REFERENCE = "exact", "llama.cpp prompt lookup", "dequantised float32"
SAMPLING = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""Defaults of llama.cpp's programs."""
METHODS = {PLAIN: "autoregressive", EXACT: "autoregressive", AUTO: "auto"}
_MEMORY_TOKENS = 64

Found = defaultdict[str, defaultdict[str, list[float]]]


class Comparison:
    """The measurements, with what they have found so far.

    Args:
        options: of the command line.
        questions: what the sides are asked.
    """

    def __init__(self, options: argparse.Namespace, questions: Questions) -> None:
        self._options, self._questions = options, questions
        self._engine: dict[str, Any] = dict(options.option)
        self.samples: Found = defaultdict(lambda: defaultdict(list))
        self.windows: dict[str, list[float]] = {}
        self.token_ids: dict[str, list[list[int]]] = {}

    def start(self, name: str, lean: bool = False) -> Process:
        """Loads the file in a process of its own; a ``lean`` llama.cpp can only generate."""
        path, threads = str(self._options.model), self._options.threads
        if name == REFERENCE:
            return Process("Dequantised", threads, path=path)
        if name == LOOKUP:
            return Process("LlamaCppLookup", threads, path=path)
        if name == LLAMA:
            return (
                Process("LeanLlamaCpp", threads, path=path, context=1024)
                if lean
                else Process("LlamaCpp", threads, path=path)
            )
        return Process("Selfspec", threads, path=path, method=METHODS[name], options=self._options_of(name))

    def _options_of(self, name: str) -> dict[str, Any]:
        return {**self._engine, "activations": "exact"} if name == EXACT else self._engine

    def measure_speed(self) -> None:
        """Bandwidth, answers, rows and prompts, in turns."""
        options, wanted = self._options, set(self._options.only)
        if not wanted & {"bandwidth", "chat", "sampled", "edits", "calls", "rows", "prompt", "long", "busy"}:
            return
        with ExitStack() as stack:
            bandwidth = stack.enter_context(ReadBandwidth(options.threads))
            sides = {name: stack.enter_context(self.start(name)) for name in options.candidates}
            for name, side in sides.items():
                _say(f"{name}: warm-up")
                side.ask("warm_up")
                self._answers(side, self._questions.chat[:1])
            for repeat in range(options.repeats):
                _say(f"repeat {repeat + 1} of {options.repeats}")
                if "bandwidth" in wanted:
                    self.samples["read_bytes_per_second"]["machine"].append(bandwidth.measure())
                samples = {name: side for name, side in sides.items() if name != LOOKUP}
                single = {name: side for name, side in samples.items() if name != AUTO}
                for wish, task, asked in (
                    ("chat", self._chat, sides),
                    ("sampled", self._sampled, samples),
                    ("edits", self._edits, sides),
                    ("calls", self._calls, samples),
                    ("rows", self._rows, single),
                    ("prompt", self._prompt, single),
                    ("long", self._long, samples),
                    ("busy", self._busy, sides),
                ):
                    for name in in_turn(list(asked), repeat) if wish in wanted else ():
                        task(name, asked[name])

    def measure_memory(self) -> None:
        """Memory in fresh processes, one after another; ``auto`` prepares as on a new machine."""
        for name in self._without_lookup():
            _say(f"{name}: memory")
            with self.start(name, lean=True) as side:
                self.samples["loaded_bytes"][name].append(side.ask("memory")["resident_bytes"])
                side.ask("forget")
                side.ask("warm_up")
                side.ask("generate", token_ids=self._questions.long, max_new_tokens=_MEMORY_TOKENS, eos_ids=[])
                self.samples["peak_bytes"][name].append(side.ask("memory")["peak_bytes"])

    def measure_first_token(self) -> None:
        """Commands in fresh processes, in turns, after one of each that fills the page cache."""
        path, threads = str(self._options.model), self._options.threads
        start = [sys.executable, "-m", "selfspec", "generate", FIRST, "--model", path, "--max-new-tokens", "1"]
        commands = {
            name: [*start, "--method", METHODS[name], *_flags(self._options_of(name))]
            for name in self._without_lookup()
            if name != LLAMA
        }
        if LLAMA in self._options.candidates:
            commands[LLAMA] = [sys.executable, "-m", "gguf_sides.lean", path, FIRST]
        for repeat in range(self._options.repeats + 1):
            _say(f"first token: {repeat} of {self._options.repeats}")
            for name in in_turn(list(commands), repeat):
                seconds = command_seconds(commands[name], threads)
                self.samples["first_token_seconds" if repeat else "very_first_token_seconds"][name].append(seconds)

    def measure_perplexity(self) -> None:
        """The likelihoods of all windows, by one candidate after another."""
        names = [name for name in self._without_lookup() if name != AUTO]
        for name in names + [REFERENCE] * self._options.reference:
            with self.start(name) as side:
                values = self.windows[name] = []
                for number, window in enumerate(self._questions.windows, start=1):
                    _say(f"{name}: window {number} of {len(self._questions.windows)}")
                    values.append(side.ask("likelihood", token_ids=window))

    def _without_lookup(self) -> list[str]:
        """Candidates that are no other way to decode with llama.cpp."""
        return [name for name in self._options.candidates if name != LOOKUP]

    def _answers(
        self, side: Process, prompts: Sequence[Sequence[int]], **sampling: float
    ) -> tuple[float, list[list[int]]]:
        return self._outputs(side, [{"token_ids": prompt, **sampling} for prompt in prompts])

    def _outputs(self, side: Process, asked: Sequence[Mapping[str, Any]]) -> tuple[float, list[list[int]]]:
        """Tokens a second after the first ones, and the outputs."""
        common = {"max_new_tokens": self._options.max_new_tokens, "eos_ids": self._questions.eos_ids}
        outputs = [side.ask("generate", **common, **each) for each in asked]
        speed = sum(len(each["token_ids"]) - 1 for each in outputs) / sum(each["rest"] for each in outputs)
        return speed, [each["token_ids"] for each in outputs]

    def _chat(self, name: str, side: Process) -> None:
        speed, self.token_ids[name] = self._answers(side, self._questions.chat)
        self.samples["tokens_per_second"][name].append(speed)

    def _sampled(self, name: str, side: Process) -> None:
        seed = len(self.samples["sampled_tokens_per_second"][name])
        speed, _ = self._answers(side, self._questions.chat, seed=seed, **SAMPLING)
        self.samples["sampled_tokens_per_second"][name].append(speed)

    def _edits(self, name: str, side: Process) -> None:
        speed, _ = self._answers(side, self._questions.edits)
        self.samples["edit_tokens_per_second"][name].append(speed)

    def _calls(self, name: str, side: Process) -> None:
        asked = [{"token_ids": prompt, "json_schema": schema} for prompt, schema in self._questions.calls]
        speed, _ = self._outputs(side, asked)
        self.samples["call_tokens_per_second"][name].append(speed)

    def _busy(self, name: str, side: Process) -> None:
        with busy_process():
            speed, _ = self._answers(side, self._questions.chat)
        self.samples["busy_tokens_per_second"][name].append(speed)

    def _rows(self, name: str, side: Process) -> None:
        seconds = side.ask("rows", token_ids=self._questions.long, context=ROWS_CONTEXT, row_counts=ROWS)
        for rows, each in zip(ROWS, seconds, strict=True):
            self.samples[f"rows_{rows}" if rows > 1 else "row_seconds"][name].append(
                each / (seconds[0] if rows > 1 else 1)
            )

    def _prompt(self, name: str, side: Process) -> None:
        output = side.ask("generate", token_ids=self._questions.long, max_new_tokens=1, eos_ids=[])
        self.samples["prompt_tokens_per_second"][name].append(PROMPT_TOKENS / output["first"])

    def _long(self, name: str, side: Process) -> None:
        asked = {"token_ids": self._questions.text, "max_new_tokens": self._options.max_new_tokens}
        output = side.ask("generate", **asked, eos_ids=[])
        self.samples["long_prompt_tokens_per_second"][name].append(TEXT_TOKENS / output["first"])
        speed = (len(output["token_ids"]) - 1) / output["rest"]
        self.samples["after_long_tokens_per_second"][name].append(speed)


def _flags(options: Mapping[str, Any]) -> list[str]:
    return [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
