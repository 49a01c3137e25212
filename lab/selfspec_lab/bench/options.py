"""Options that the benchmarks share: model, methods and settings, checked before a model is loaded."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfspec import Engine
from selfspec.errors import InvalidParameterError
from selfspec.loading import parse_device, parse_dtype
from selfspec.methods import all_methods, find_method, make_method
from selfspec.methods.api import Method
from selfspec.methods.papers import PaperMethod
from selfspec_lab.bench.benchmark import explain
from selfspec_lab.measuring import RUNTIMES, Target
from selfspec_lab.widening import check_factor, load_model

PLAIN = "autoregressive"
EXIT_SHARE = 6 / 16
"""Default exit layer of methods with a fixed one, as a share of the layers: layer 6 of the bundled models' 16."""


@dataclass(frozen=True)
class BenchOptions:
    """What to measure; checked at construction.

    Attributes:
        model: a name that ``load_model`` takes.
        widen: factor by which the model is widened.
        dtype: dtype of the weights, as ``load_model`` takes it.
        unpack: whether weights of a quantised GGUF file become numbers of the dtype, as ``load_model`` takes it.
        activations: how rows are multiplied with weights of few bits, as ``load_model`` takes it.
        device: device as torch names it, or ``auto``.
        runtime: runtime of the sublayers, one of ``RUNTIMES``.
        methods: names of methods, or ``("all",)``.
        settings: by candidate the values of its settings, which override ``default_settings``.
        variants: further candidates by name, with the method of each, so that one method runs with several settings.
        repeats: number of repeats of every measurement.
        max_new_tokens: longest output.

    Raises:
        SelfSpecError: an option is invalid.
    """

    model: str = "tiny"
    widen: int = 1
    dtype: str = "auto"
    unpack: bool = False
    activations: str = "auto"
    device: str = "auto"
    runtime: str = "auto"
    methods: tuple[str, ...] = ("all",)
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    variants: Mapping[str, str] = field(default_factory=dict)
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
        settings = {
            name if name in self.variants else _candidate(name): values for name, values in self.settings.items()
        }
        object.__setattr__(self, "settings", settings)
        for name, values in settings.items():
            self.method_class(name).Settings.parse(name, values)
            if name not in self.method_names:
                raise InvalidParameterError(
                    f"there are settings for {name}, which is not among the methods to measure; add it to --methods"
                )
        self.method_names  # noqa: B018 - raises where a method is unknown

    @property
    def method_names(self) -> list[str]:
        """The candidates to measure, without plain decoding, which is always measured; variants come last."""
        names = all_methods()[0] if "all" in self.methods else {_candidate(name): None for name in self.methods}
        return [*(name for name in names if name != PLAIN), *self.variants]

    def method_class(self, candidate: str) -> type[Method]:
        """The method of a candidate, or of a variant; raises ``UnknownMethodError`` for an unknown one."""
        return find_method(self.variants.get(candidate, candidate))

    def load(self, progress: Callable[[str], None]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Loads the model and its tokenizer; ``progress`` is called with a line of text first."""
        progress(f"loading {self.model}" + (f", widened {self.widen} times" if self.widen > 1 else ""))
        return load_model(
            self.model,
            dtype=self.dtype,
            device=self.device,
            widen=self.widen,
            unpack=self.unpack,
            activations=self.activations,
        )


def _candidate(name: str) -> str:
    """The name by which a method is measured: its own, or ``module:Class``, by which alone such a one can be found."""
    method = find_method(name)
    return name if ":" in name and "(" not in name else method.name


def default_settings(method: type[Method], layer_count: int) -> dict[str, Any]:
    """Settings that the benchmarks set: the exit layer of methods with a fixed one, at ``EXIT_SHARE`` of the layers.

    None for a paper's preset.
    """
    if method.name.startswith(f"{PaperMethod.name}("):
        return {}
    layer = max(1, int(layer_count * EXIT_SHARE))
    names = method.Settings().to_values()
    return {name: layer for name in names if name.rpartition(".")[2] == "exit_layer"}


def make_engines(
    like: Engine,
    names: Sequence[str],
    settings: Mapping[str, Mapping[str, Any]],
    engine: Any = Engine,
    *,
    variants: Mapping[str, str] | None = None,
    **options: Any,
) -> tuple[dict[str, Engine], dict[str, str]]:
    """Makes an engine for every method, all with one target.

    Args:
        like: an engine with the target and the tokenizer.
        names: names of the candidates.
        settings: by candidate the values of its settings, which override the defaults.
        engine: class of the engines.
        variants: the method of each candidate that is not named after its method.
        **options: further arguments of that class.

    Returns:
        The engines by candidate, and the reasons of failures by candidate.
    """
    target: Target = like.target
    engines: dict[str, Engine] = {}
    failures: dict[str, str] = {}
    for name in names:
        method = (variants or {}).get(name, name)
        chosen = {**default_settings(find_method(method), target.layer_count), **settings.get(name, {})}
        try:
            engines[name] = engine(target.model, like.tokenizer, make_method(method, target, chosen), **options)
        except Exception as error:  # settings that do not fit the model, or any error of a method
            failures[name] = explain(error)
    return engines, failures
