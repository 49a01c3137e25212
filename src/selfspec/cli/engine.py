"""The options of an engine that several commands share, and the engine that they describe."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import wraps
from typing import TYPE_CHECKING, Any

from selfspec.cli import options

if TYPE_CHECKING:
    from selfspec.engine import Engine
    from selfspec.options import EngineOptions


@dataclass(frozen=True)
class EngineChoice:
    """The model, method and options of the engine that a command line describes."""

    model: options.Model = options.DEFAULT_MODEL
    method: options.Method = options.DEFAULT_METHOD
    settings: options.Settings = None
    dtype: options.Dtype = "auto"
    weights: options.Weights = None
    device: options.Device = "auto"
    runtime: options.Runtime = "auto"
    keep_copies: options.KeepCopies = False

    def as_options(self, settings: Mapping[str, str], **others: Any) -> "EngineOptions":
        """The options, with the parsed settings and what else the command sets."""
        from selfspec.options import EngineOptions

        return EngineOptions(
            settings=settings,
            dtype=self.dtype,
            weights=self.weights,
            device=self.device,
            runtime=self.runtime,
            keep_copies=self.keep_copies,
            **others,
        )

    def load(self, settings: Mapping[str, str], **others: Any) -> "Engine":
        """Loads the model with its method.

        Raises:
            SelfSpecError: the model cannot be loaded, or method and settings do not fit it.
        """
        from selfspec.engine import Engine

        return Engine.from_pretrained(self.model, self.method, self.as_options(settings, **others))


def with_engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator: the parameter ``engine`` of a command becomes the options of ``EngineChoice``."""
    signature = inspect.signature(command)
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        if parameter.name == "engine":
            parameters += [
                inspect.Parameter(field.name, parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
                for field in fields(EngineChoice)
            ]
        else:
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY))

    @wraps(command)
    def run(**given: Any) -> None:
        """The command, called with the options."""
        choice = EngineChoice(**{field.name: given.pop(field.name) for field in fields(EngineChoice)})
        command(engine=choice, **given)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
