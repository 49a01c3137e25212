"""What experiments work with: models, prompts, plain outputs, and speeds measured side by side."""

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfspec.engine import Engine
from selfspec.loading import load_model
from selfspec.methods import make_method
from selfspec.methods.base import Method
from selfspec.runtimes.target import Target
from selfspec.timing import in_turn
from selfspec.types import Generation, SamplingParams
from selfspec_lab.bench.bootstrap import bootstrap_interval
from selfspec_lab.experiments.base import Data
from selfspec_lab.prompts import PROMPTS

__all__ = ["TIMED_WIDENING", "Lab", "Speed", "bootstrap_interval"]

TIMED_WIDENING = 4
"""Factor by which a bundled checkpoint is widened where times are measured: 0.16 billion parameters, far more than a
processor's cache holds, so that a step takes the time of its bytes."""


@dataclass(frozen=True)
class Speed:
    """Decoding speed of one contender over the same prompts.

    Attributes:
        samples: tokens after the first ÷ seconds after the first token, one number a repeat.
        generations: the outputs of the last repeat.
    """

    samples: tuple[float, ...]
    generations: tuple[Generation, ...]

    @property
    def median(self) -> float:
        """Tokens a second, the median over the repeats."""
        return statistics.median(self.samples)

    def over(self, other: "Speed") -> float:
        """Speedup over another contender of the same run: the median of the repeats' ratios."""
        return statistics.median(mine / theirs for mine, theirs in zip(self.samples, other.samples, strict=True))

    def to_dict(self, plain: "Speed | None" = None) -> Data:
        """Speed, its spread, acceptance and length, and the speedup over ``plain``, ready for JSON."""
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
    """Models and prompts for experiments, and how much of them to use.

    Args:
        model: a name that ``load_model`` takes, instead of the checkpoints that the experiments run on by default.
        quick: measure little: minutes for all experiments together, at the price of wide spreads.
        device: as torch names it, or ``auto``.
        seed: fixes whatever an experiment draws at random.
        progress: is told what goes on.
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
        """The first where little is to be measured, else the second."""
        return quick if self.quick else full

    def random(self) -> random.Random:
        """Random numbers that are the same in every run with this seed."""
        return random.Random(self.seed)

    def load(self, default: str, *, widen: int = 1) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """A float32 model and its tokenizer, loaded once: the lab's own, or else the experiment's default."""
        return self._load(self.model or default, widen)

    def _load_now(self, name: str, widen: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        self.progress(f"loading {name}" + (f", widened {widen} times" if widen > 1 else ""))
        return load_model(name, dtype="float32", device=self.device, widen=widen)

    def engine(
        self,
        default: str,
        method: str | Method = "autoregressive",
        settings: Mapping[str, Any] | None = None,
        *,
        widen: int = 1,
    ) -> Engine:
        """An engine on ``load(default, widen=widen)``."""
        model, tokenizer = self.load(default, widen=widen)
        return Engine(model, tokenizer, method, settings=settings)

    def engines(
        self, default: str, contenders: Mapping[str, tuple[str, Mapping[str, Any]]], *, widen: int = 1
    ) -> dict[str, Engine]:
        """Engines by name, each from the name of a method and its settings, all with one target."""
        model, tokenizer = self.load(default, widen=widen)
        target = Target(model)
        return {
            name: Engine(model, tokenizer, make_method(method, target, settings))
            for name, (method, settings) in contenders.items()
        }

    def prompts(self, domain: str, count: int | None = None) -> tuple[str, ...]:
        """The bundled prompts of a domain (``code``, ``math``, ``prose``), or the first of them."""
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
        """Lets engines write the same prompts in turns, greedily and to full length, and takes their speeds.

        Each is warmed up on the first prompt. They take turns prompt by prompt, another one first each time.

        Args:
            engines: by name.
            prompts: text or token ids.
            max_new_tokens: length of every output.
            repeats: how often all of it is measured.
            before_repeat: runs before each repeat.
        """
        params = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
        for engine in engines.values():
            engine.generate(prompts[0], params, max_new_tokens=min(16, max_new_tokens))
        samples: dict[str, list[float]] = {name: [] for name in engines}
        generations: dict[str, list[Generation]] = {}
        turn = 0
        for repeat in range(repeats):
            self.progress(f"measuring {len(engines)} contenders, repeat {repeat + 1} of {repeats}")
            before_repeat()
            generations = {name: [] for name in engines}
            for prompt in prompts:
                for name in in_turn(list(engines), turn):
                    generations[name].append(engines[name].generate(prompt, params))
                turn += 1
            for name, written in generations.items():
                seconds = sum(each.seconds - each.prefill_seconds for each in written)
                samples[name].append(sum(len(each.token_ids) - 1 for each in written) / seconds)
        return {name: Speed(tuple(samples[name]), tuple(generations[name])) for name in engines}
