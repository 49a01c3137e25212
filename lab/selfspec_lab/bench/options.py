"""What the benchmarks have in common: which model, which methods, with which settings; checked before any loading."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from selfspec.engine import Engine
from selfspec.errors import InvalidParameterError
from selfspec.loading import parse_device, parse_dtype
from selfspec.methods import METHODS, find_method, make_method
from selfspec.methods.base import Method
from selfspec.methods.settings import parse_settings
from selfspec.runtimes.target import RUNTIMES, Target
from selfspec_lab.bench.contest import explain
from selfspec_lab.widening import check_factor

PLAIN = "autoregressive"
EXIT_SHARE = 6 / 16
"""Where methods with a fixed exit layer leave the model, unless they are told: at layer 6 of the bundled 16."""


@dataclass(frozen=True)
class BenchOptions:
    """What to measure; checked when made, before any model is loaded.

    Attributes:
        model: a name that ``load_model`` takes.
        widen: factor to widen it by.
        dtype: of the weights, as ``load_model`` takes it.
        device: where to run.
        runtime: how the sublayers run, one of ``RUNTIMES``.
        methods: names of methods, or ``("all",)``.
        settings: by method the values of its settings, over those of ``default_settings``.
        repeats: how often everything is measured.
        max_new_tokens: longest output.

    Raises:
        SelfSpecError: one of them is not possible.
    """

    model: str = "tiny"
    widen: int = 1
    dtype: str = "auto"
    device: str = "auto"
    runtime: str = "auto"
    methods: tuple[str, ...] = ("all",)
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    repeats: int = 3
    max_new_tokens: int = 64

    def __post_init__(self) -> None:
        check_factor(self.widen)
        parse_dtype(self.dtype)
        parse_device(self.device)
        if self.runtime not in RUNTIMES:
            raise InvalidParameterError(f"there is no runtime '{self.runtime}'; choose one of {', '.join(RUNTIMES)}")
        if self.repeats < 1:
            raise InvalidParameterError(f"repeats must be at least 1, not {self.repeats}")
        if self.max_new_tokens < 2:
            raise InvalidParameterError(
                f"max_new_tokens must be at least 2, not {self.max_new_tokens}: the first token is not timed"
            )
        for name, values in self.settings.items():
            parse_settings(find_method(name).Settings, name, values)
            if name not in self.method_names:
                raise InvalidParameterError(f"there are settings for {name}, which is not among the methods to measure")
        self.method_names  # noqa: B018 - raises where a method is unknown

    @property
    def method_names(self) -> list[str]:
        """The methods to measure, each once; plain decoding is always measured and is none of them."""
        names = METHODS if "all" in self.methods else {find_method(name).name: None for name in self.methods}
        return [name for name in names if name != PLAIN]


def default_settings(method: type[Method], layer_count: int) -> dict[str, Any]:
    """What the benchmarks set: the exit layer of methods that have a fixed one, at ``EXIT_SHARE`` of the layers."""
    names = {field.name for field in fields(method.Settings)}
    return {"exit_layer": max(1, int(layer_count * EXIT_SHARE))} if "exit_layer" in names else {}


def make_engines(
    like: Engine, names: Sequence[str], settings: Mapping[str, Mapping[str, Any]], engine: Any = Engine, **options: Any
) -> tuple[dict[str, Engine], dict[str, str]]:
    """An engine for every method, all with one target, and why there is none for the others.

    Args:
        like: an engine with the target and the tokenizer.
        names: of the methods.
        settings: by method the values of its settings, over the defaults.
        engine: the class to make.
        **options: what else it takes.
    """
    target: Target = like.target
    engines: dict[str, Engine] = {}
    failures: dict[str, str] = {}
    for name in names:
        chosen = {**default_settings(METHODS[name], target.layer_count), **settings.get(name, {})}
        try:
            engines[name] = engine(target.model, like.tokenizer, make_method(name, target, chosen), **options)
        except Exception as error:  # settings that do not fit this model, or whatever a method raises
            failures[name] = explain(error)
    return engines, failures
