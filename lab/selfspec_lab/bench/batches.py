"""``selfspec bench batches``: tokens a second of several prompts together, beside one prompt alone."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from selfspec import Engine, Generation
from selfspec.errors import InvalidParameterError
from selfspec.methods import make_method
from selfspec_lab.bench.options import PLAIN, BenchOptions, make_engines
from selfspec_lab.bench.spread import Measured
from selfspec_lab.bench.stamp import make_stamp
from selfspec_lab.measuring import Target, in_turn
from selfspec_lab.prompts import CHAT_PROMPTS, PROMPTS

Key = tuple[str, int]
"""A method and a number of prompts."""


@dataclass(frozen=True)
class BatchesOptions(BenchOptions):
    """What to measure. Outputs have exactly ``max_new_tokens`` tokens; end-of-sequence tokens are ignored.

    Attributes:
        sizes: numbers of prompts to generate together.
    """

    sizes: tuple[int, ...] = (1, 2, 4, 8, 16)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.sizes or min(self.sizes) < 1:
            raise InvalidParameterError(f"sizes are numbers of prompts, 1 or more, not {self.sizes}")


def run_batches(options: BatchesOptions, progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Loads the model and measures every method with every number of prompts, in turns.

    Args:
        options: what to measure.
        progress: is called with a line of text before each step.

    Returns:
        The report, ready for JSON. ``batches`` has by method and number of prompts: ``tokens_per_second`` (all
        outputs together, prompts included in the time), its ratio to plain decoding of one prompt at a time
        (``speedup``) and of the same prompts together in the same turn (``over_plain``), each with its spread,
        ``acceptance_rate``, ``mean_generated_length``, and whether all outputs were ``identical`` to those of plain
        decoding alone.

    Raises:
        SelfSpecError: the model cannot be loaded, or a prompt does not fit its context.
    """
    model, tokenizer = options.load(progress)
    target = Target(model, options.runtime)
    plain = Engine(model, tokenizer, make_method(PLAIN, target), max_batch=max(options.sizes))
    engines, failures = make_engines(plain, options.method_names, options.settings, max_batch=max(options.sizes))
    if failures:
        raise InvalidParameterError("; ".join(f"{name}: {reason}" for name, reason in failures.items()))
    engines = {PLAIN: plain, **engines}
    prompts = _prompts(plain, max(options.sizes))
    for prompt in prompts:
        target.check_length(len(prompt), options.max_new_tokens)
    for name, engine in engines.items():
        engine.warmup(lambda text, name=name: progress(f"{name}: {text}"))  # type: ignore[misc]

    expected = [plain.generate(each, max_new_tokens=options.max_new_tokens, ignore_eos=True) for each in prompts]
    samples: dict[Key, list[_Sample]] = {key: [] for key in product(engines, options.sizes)}
    for repeat in range(options.repeats):
        for size, name in product(in_turn(options.sizes, repeat), in_turn(list(engines), repeat)):
            progress(f"repeat {repeat + 1} of {options.repeats}: {name}, {size} prompts")
            samples[name, size].append(_sample(engines[name], prompts[:size], options, expected))
    return {
        "options": asdict(options),
        "stamp": make_stamp(target.device),
        "batches": {name: {size: _figures(samples, (name, size)) for size in options.sizes} for name in engines},
    }


@dataclass(frozen=True)
class _Sample:
    """One call of ``generate`` with several prompts."""

    outputs: tuple[Generation, ...]
    seconds: float
    identical: bool

    @property
    def tokens_per_second(self) -> float:
        return sum(output.new_token_count for output in self.outputs) / self.seconds


def _prompts(engine: Engine, count: int) -> list[list[int]]:
    """Prompts of this project, repeated where there are too few; as chats where the model has a template for them."""
    texts = list(CHAT_PROMPTS.values())
    if getattr(engine.tokenizer, "chat_template", None):
        encoded = [engine.encode([{"role": "user", "content": text}]) for text in texts]
    else:
        encoded = [engine.encode(text) for domain in PROMPTS.values() for text in domain]
    return [encoded[index % len(encoded)] for index in range(count)]


def _sample(
    engine: Engine, prompts: Sequence[list[int]], options: BatchesOptions, expected: Sequence[Generation]
) -> _Sample:
    started = time.perf_counter()
    outputs = engine.generate(list(prompts), max_new_tokens=options.max_new_tokens, ignore_eos=True)
    seconds = time.perf_counter() - started
    same = all(output.token_ids == alone.token_ids for output, alone in zip(outputs, expected, strict=False))
    return _Sample(tuple(outputs), seconds, same)


def _figures(samples: Mapping[Key, Sequence[_Sample]], key: Key) -> dict[str, Any]:
    own = samples[key]
    outputs = [output for sample in own for output in sample.outputs]
    rounds = sum(output.round_count for output in outputs)
    drafted = sum(output.drafted for output in outputs)
    speeds = [sample.tokens_per_second for sample in own]

    def over(base: Key) -> Measured:
        others = samples.get(base, ())
        return Measured.of(speed / other.tokens_per_second for speed, other in zip(speeds, others, strict=False))

    return {
        **Measured.of(speeds).fields("tokens_per_second"),
        **over((PLAIN, 1)).fields("speedup"),
        **over((PLAIN, key[1])).fields("over_plain"),
        "acceptance_rate": sum(output.accepted for output in outputs) / drafted if drafted else None,
        "mean_generated_length": sum(output.new_token_count - 1 for output in outputs) / rounds if rounds else None,
        "identical": all(sample.identical for sample in own),
    }
