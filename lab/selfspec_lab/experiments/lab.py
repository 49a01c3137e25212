"""Models and prompts for experiments, and speeds measured in turns."""

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfspec import Engine
from selfspec.methods import make_method
from selfspec.methods.api import Method
from selfspec.types import Generation, SamplingParams
from selfspec_lab.measuring import Target, in_turn
from selfspec_lab.prompts import PROMPTS
from selfspec_lab.widening import load_model

__all__ = ["TIMED_WIDENING", "Lab", "Speed"]

TIMED_WIDENING = 4
"""Factor by which bundled checkpoints are widened for timing: 0.16 billion parameters, far larger than a processor's
cache, so that a step is bound by memory."""

_WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Speed:
    """Decoding speed of one candidate.

    Attributes:
        samples: tokens after the first ÷ seconds after the first token, over all prompts; one number per repeat.
        generations: outputs of the last repeat.
        by_prompt: tokens per second of each prompt, the median over the repeats.
    """

    samples: tuple[float, ...]
    generations: tuple[Generation, ...]
    by_prompt: tuple[float, ...] = ()

    @property
    def median(self) -> float:
        """Tokens per second, the median over the repeats."""
        return statistics.median(self.samples)

    def over(self, other: "Speed") -> float:
        """Speedup over another candidate of the same run, the median over the repeats."""
        return statistics.median(mine / theirs for mine, theirs in zip(self.samples, other.samples, strict=True))

    def to_dict(self, plain: "Speed | None" = None) -> dict[str, Any]:
        """Speed with spread, acceptance, mean length, and speedup over ``plain``, ready for JSON."""
        drafted = sum(generation.drafted for generation in self.generations)
        rounds = sum(generation.round_count for generation in self.generations)
        return {
            "tokens_per_second": self.median,
            "tokens_per_second_spread": [min(self.samples), max(self.samples)],
            "acceptance_rate": sum(each.accepted for each in self.generations) / drafted if drafted else 0.0,
            "mean_generated_length": sum(len(each.token_ids) - 1 for each in self.generations) / max(rounds, 1),
            **({} if plain is None else {"speedup": self.over(plain)}),
        }


class Lab:
    """Models, prompts and the amount to measure.

    Args:
        model: name of a model as ``load_model`` takes it, instead of an experiment's default.
        quick: measure little: minutes for all experiments, with wide spreads.
        device: device as torch names it, or ``auto``.
        seed: seed of all random choices.
        progress: is called with a line of text before each step.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        quick: bool = False,
        device: str = "auto",
        seed: int = 0,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.model = model
        self.quick = quick
        self.device = device
        self.seed = seed
        self.progress = progress
        self._load = cache(self._load_now)

    def pick(self, quick: Any, full: Any) -> Any:
        """``quick`` if little is to be measured, otherwise ``full``."""
        return quick if self.quick else full

    def random(self) -> random.Random:
        """A generator of random numbers with the lab's seed."""
        return random.Random(self.seed)

    def load(self, default: str, *, widen: int = 1) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Loads a model and its tokenizer, once: the lab's model if it has one, otherwise ``default`` in float32.

        Only ``default`` is widened: checkpoints of a few million parameters have to be, for their times to say
        anything. A model that a user names is measured as it is, in the numbers of its file.
        """
        return self._load(default, widen, "float32") if self.model is None else self._load(self.model, 1, "auto")

    def _load_now(self, name: str, widen: int, dtype: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        self.progress(f"loading {name}" + (f", widened {widen} times" if widen > 1 else ""))
        return load_model(name, dtype=dtype, device=self.device, widen=widen)

    def engine(
        self,
        default: str,
        method: str | Method = "autoregressive",
        settings: Mapping[str, Any] | None = None,
        *,
        widen: int = 1,
    ) -> Engine:
        """Makes an engine with the model of ``load(default, widen=widen)``."""
        model, tokenizer = self.load(default, widen=widen)
        return Engine(model, tokenizer, method, settings=settings)

    def engines(
        self, default: str, candidates: Mapping[str, tuple[str, Mapping[str, Any]]], *, widen: int = 1
    ) -> dict[str, Engine]:
        """Makes engines by name from names of methods and their settings, all with one target."""
        model, tokenizer = self.load(default, widen=widen)
        target = Target(model)
        return {
            name: Engine(model, tokenizer, make_method(method, target, settings))
            for name, (method, settings) in candidates.items()
        }

    def prompts(self, domain: str, count: int | None = None) -> tuple[str, ...]:
        """The bundled prompts of a domain (``code``, ``math``, ``prose``), at most the first ``count``."""
        return PROMPTS[domain][:count]

    def measure_speeds(
        self,
        engines: Mapping[str, Engine],
        prompts: Sequence[str | Sequence[int]],
        *,
        max_new_tokens: int,
        repeats: int,
        before_repeat: Callable[[], None] = lambda: None,
    ) -> dict[str, Speed]:
        """Measures the greedy decoding speed of engines in turns, each warmed up on the first prompt.

        Args:
            engines: engines by name.
            prompts: texts or token ids.
            max_new_tokens: length of every output, in tokens.
            repeats: number of repeats.
            before_repeat: is called before each repeat.
        """
        params = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
        requests = [(prompt, params) for prompt in prompts]
        warm_up(engines, prompts[0], max_new_tokens)
        samples: dict[str, list[float]] = {name: [] for name in engines}
        by_prompt: dict[str, list[list[float]]] = {name: [[] for _ in prompts] for name in engines}
        written: dict[str, list[Generation]] = {}
        for repeat in range(repeats):
            self.progress(f"measuring {len(engines)} candidates, repeat {repeat + 1} of {repeats}")
            before_repeat()
            written = generate_in_turn(engines, requests, first_turn=repeat * len(requests))
            for name, generations in written.items():
                seconds = sum(each.seconds - each.prefill_seconds for each in generations)
                samples[name].append(sum(len(each.token_ids) - 1 for each in generations) / seconds)
                for speeds, each in zip(by_prompt[name], generations, strict=True):
                    speeds.append(each.tokens_per_second)
        return {
            name: Speed(tuple(samples[name]), tuple(written[name]), tuple(map(statistics.median, by_prompt[name])))
            for name in engines
        }


def warm_up(engines: Mapping[str, Engine], prompt: str | Sequence[int], max_new_tokens: int) -> None:
    """Generates a short output with every engine."""
    for engine in engines.values():
        engine.generate(prompt, max_new_tokens=min(_WARM_UP_TOKENS, max_new_tokens), ignore_eos=True)


def generate_in_turn(
    engines: Mapping[str, Engine],
    requests: Sequence[tuple[str | Sequence[int], SamplingParams]],
    *,
    first_turn: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, list[Generation]]:
    """Generates every request with all engines before the next request, with another engine first each time.

    Args:
        engines: engines by name.
        requests: prompts (text or token ids) with their sampling parameters.
        first_turn: number of turns before this call.
        progress: is called with a line of text before each request.

    Returns:
        The outputs by engine, one per request.
    """
    written: dict[str, list[Generation]] = {name: [] for name in engines}
    for turn, (prompt, params) in enumerate(requests):
        progress(f"{len(engines)} candidates on prompt {turn + 1} of {len(requests)}")
        for name in in_turn(list(engines), first_turn + turn):
            written[name].append(engines[name].generate(prompt, params))
    return written
