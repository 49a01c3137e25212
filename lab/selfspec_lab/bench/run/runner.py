"""``selfspec bench run``: every method and peer on every prompt of a suite, side by side in one process."""

import random
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch

from selfspec import Engine
from selfspec.errors import InvalidParameterError
from selfspec.loading import parse_device
from selfspec_lab.bench.benchmark import explain
from selfspec_lab.bench.options import PLAIN, make_engines
from selfspec_lab.bench.resident_peak import ResidentPeak
from selfspec_lab.bench.run.chat import decide_chat
from selfspec_lab.bench.run.folder import RunFolder
from selfspec_lab.bench.run.measurement import Measurement, output_fields
from selfspec_lab.bench.run.options import RunOptions
from selfspec_lab.bench.run.peers import Peers
from selfspec_lab.bench.run.prompts import RunPrompt, Skipped, answer_suite
from selfspec_lab.bench.stamp import make_stamp
from selfspec_lab.bench.suites import Suite, read_suite
from selfspec_lab.measuring import StepBytes, copy_bytes_per_second, kept_profile

_WARM_UP_TOKENS = 16


class Observer(Protocol):
    """Receives the progress of a run."""

    def stage(self, text: str) -> None:
        """A step before the measurements has started."""

    def begin(self, total: int, done: int) -> None:
        """The measurements start: their total number, and how many exist already."""

    def measured(self, measurement: Measurement) -> None:
        """A measurement has been made."""


def run(options: RunOptions, out: Path, observer: Observer, *, resume: bool = False, overwrite: bool = False) -> None:
    """Loads suite and model and runs the benchmark.

    Args:
        options: what to measure.
        out: the run's folder.
        observer: receives the progress.
        resume: continue the run in the folder.
        overwrite: replace the run in the folder.

    Raises:
        SelfSpecError: suite, folder or model are invalid; nothing was measured.
        KeyboardInterrupt: the run was interrupted; its measurements so far are in the folder.
    """
    source = read_suite(options.suite, limit=options.limit, seed=options.seed)
    folder = RunFolder(out, resume=resume, overwrite=overwrite)
    folder.check_same(options.to_dict(), make_stamp(parse_device(options.device), options.packages))
    model, tokenizer = options.load(observer.stage)
    plain = Engine(model, tokenizer, PLAIN, runtime=options.runtime)
    suite = source.load(plain.encode, options.context)
    Run(options, plain, suite, folder, observer).measure()


class Run:
    """One run of the benchmark.

    Args:
        options: what to measure.
        plain: plain decoding; all methods share its model and runtime.
        suite: the questions.
        folder: the folder for the measurements.
        observer: receives the progress.
    """

    def __init__(self, options: RunOptions, plain: Engine, suite: Suite, folder: RunFolder, observer: Observer) -> None:
        self._options = options
        self._plain = plain
        self._suite = suite
        self._folder = folder
        self._observer = observer
        self._chat = decide_chat(options.chat, plain.tokenizer, suite)
        self._costs = StepBytes(plain.target)
        # Where sampling is coupled, every method writes what plain decoding writes.
        self._params = options.params()

    def measure(self) -> None:
        """Makes all measurements that do not exist yet.

        Raises:
            InvalidParameterError: no prompt fits the model's context, or the folder cannot be written.
        """
        prompts, skipped = answer_suite(
            self._suite, self._plain, self._params, chat=self._chat, progress=self._observer.stage
        )
        if not prompts:
            why = f"{skipped[0].reason}, or a passage of a long text by --context" if skipped else "it has no prompts"
            raise InvalidParameterError(f"no prompt of the suite fits the model: {why}")
        longest = max(prompts, key=lambda prompt: len(prompt.token_ids))
        context = len(longest.token_ids) + self._options.max_new_tokens
        model = self._plain.target.model
        with Peers(self._options.peer_names, model, context, self._options.file, self._observer.stage) as self._peers:
            engines, failures = self._engines()
            candidates = [PLAIN, *(name for name in engines if name != PLAIN), *self._peers.names]
            description = self._describe(prompts, skipped, engines, failures | self._peers.failures)
            measured = self._folder.start(description)
            self._warm_up(candidates, engines, longest)
            self._observer.begin(len(candidates) * len(prompts) * self._options.repeats, len(measured))
            for repeat in range(self._options.repeats):
                self._measure_repeat(repeat, prompts, candidates, measured)

    def _measure_repeat(
        self, repeat: int, prompts: Sequence[RunPrompt], candidates: Sequence[str], measured: set[tuple[str, str, int]]
    ) -> None:
        """Measures all prompts once. Methods start without state and see the prompts as one stream."""
        engines, _ = self._engines()
        for position, prompt in enumerate(prompts):
            order = list(candidates)
            random.Random(f"{self._options.seed}/{repeat}/{prompt.key}").shuffle(order)
            for turn, name in enumerate(order):
                engine = engines.get(name)
                if (prompt.key, name, repeat) in measured:
                    if engine is not None and engine.method.learns:
                        self._attempt(
                            name, engine, prompt, repeat
                        )  # restores what it had learned before the interruption
                    continue
                measurement = Measurement(
                    prompt=prompt.key,
                    category=prompt.category,
                    candidate=name,
                    repeat=repeat,
                    turn=turn,
                    position=position,
                    **self._attempt(name, engine, prompt, repeat),
                )
                self._folder.append(measurement)
                self._observer.measured(measurement)

    def _engines(self) -> tuple[dict[str, Engine], dict[str, str]]:
        engines, failures = make_engines(
            self._plain, self._options.method_names, self._options.settings, variants=self._options.variants
        )
        for name, path in self._options.states.items():
            if name in engines:
                engines[name].load_state(path)
        return {PLAIN: self._plain, **engines}, failures

    def _warm_up(self, candidates: Sequence[str], engines: dict[str, Engine], prompt: RunPrompt) -> None:
        for name in candidates:
            self._observer.stage(f"warm-up: {name}")
            self._attempt(name, engines.get(name), prompt, max_new_tokens=_WARM_UP_TOKENS)

    def _attempt(
        self, name: str, engine: Engine | None, prompt: RunPrompt, repeat: int = 0, max_new_tokens: int | None = None
    ) -> dict[str, Any]:
        """Generates an output; returns its fields of the measurement, or the error."""
        length = min(self._options.max_new_tokens, max_new_tokens or self._options.max_new_tokens)
        peak = ResidentPeak(self._plain.target.device)
        try:
            if engine is None:
                return self._run_peer(name, prompt, length, peak)
            params = self._options.params(repeat)
            generation = engine.generate(list(prompt.token_ids), params, max_new_tokens=length)
        except Exception as error:  # a method may raise anything; the others continue
            return {"error": explain(error)}
        fields = output_fields(generation, self._costs, peak.peak_bytes())
        same = None if params.acceptance == "speculative" else generation.token_ids == prompt.answer
        return {**fields, "identical": same}

    def _run_peer(self, name: str, prompt: RunPrompt, max_new_tokens: int, peak: ResidentPeak) -> dict[str, Any]:
        torch.manual_seed(self._options.seed)
        output = self._peers.write(
            name,
            prompt.token_ids,
            max_new_tokens,
            eos_ids=self._plain.eos_ids,
            temperature=self._options.temperature,
            top_p=self._options.top_p,
        )
        return {
            "prompt_token_count": len(prompt.token_ids),
            "token_ids": output.token_ids,
            "identical": None if self._params.samples else output.token_ids == prompt.answer,
            "prefill_seconds": output.prefill_seconds,
            "decode_seconds": output.seconds,
            "peak_memory_bytes": peak.peak_bytes(),
        }

    def _describe(
        self,
        prompts: Sequence[RunPrompt],
        skipped: Sequence[Skipped],
        engines: dict[str, Engine],
        failures: dict[str, str],
    ) -> dict[str, Any]:
        """The object of ``run.json``."""
        target = self._plain.target
        self._observer.stage("copy bandwidth and latencies")
        profile = kept_profile(target, self._observer.stage)
        return {
            "benchmark": "run",
            "stamp": make_stamp(target.device, self._options.packages),
            "options": self._options.to_dict(),
            "dtype": target.weights,
            "parameters": target.parameter_count,
            "sublayers": target.sublayer_count,
            "settings": {name: engine.method.settings.to_values() for name, engine in engines.items()},
            "llama_cpp": self._peers.build,
            "suite": self._suite.name,
            "chat": self._chat,
            "ordered": self._suite.ordered,
            "prompts": [
                {"key": each.key, "category": each.category, "tokens": len(each.token_ids)} for each in prompts
            ],
            "skipped": [asdict(each) for each in skipped],
            "copy_bytes_per_second": copy_bytes_per_second(target.device),
            "latencies": profile["latencies"],
            "rows": profile["rows"],
            "failures": failures,
        }
