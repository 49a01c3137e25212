"""What is served, and within which limits: the options of ``selfspec serve`` without those of its sockets."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI
from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from selfspec.engine import Engine
from selfspec.engine_options import EngineOptions
from selfspec.errors import InvalidParameterError
from selfspec.loading.adapter_files import name_adapters
from selfspec.serve.address import Address
from selfspec.serve.app import create_app
from selfspec.serve.capacity import Limits
from selfspec.serve.pool import ReaderPool
from selfspec.serve.served_engine import ServedEngine
from selfspec.serve.service import Service


def _listed(value: Any) -> Any:
    """A text as a list of one, for options that the command line repeats."""
    return [value] if isinstance(value, str) else value


def split_methods(text: str) -> list[str]:
    """The names of a list with commas, where those in the parentheses of a cascade separate its stages."""
    return [name.strip() for name in re.split(r",(?![^(]*\))", text) if name.strip()]


Texts = Annotated[list[str], BeforeValidator(_listed)]

_SIZES = ("memory_limit", "prefix_cache", "cache_dir_limit")
"""Options of the engine that are in GiB here."""


@dataclass(frozen=True)
class ServeOptions(Limits):
    """The options of ``selfspec serve``, checked when they are made; its ``--help`` says what each one does.

    Sizes are in GiB, ``max_body`` in MiB. ``settings`` are those of the method, by name.
    """

    model: str = "smollm2"
    method: str = "auto"
    paper: str | None = None
    authors: bool = False
    settings: dict[str, Any] | None = None
    dtype: str = "auto"
    weights: str | None = None
    unpack: bool = False
    activations: str = "auto"
    device: str = "auto"
    runtime: str = "auto"
    cache_bits: int | None = None
    cache_dir: Path | None = None
    cache_dir_limit: Annotated[float, Field(ge=0.001)] = 4.0

    adapter: Texts | None = None
    name: Texts | None = None
    methods: str | None = None
    api_key: Texts | None = None
    allowed_host: Texts | None = None
    cors_origin: Texts | None = None

    __pydantic_config__ = ConfigDict(extra="forbid")

    @property
    def names(self) -> list[str]:
        """The model's names for clients."""
        return self.name or [Path(self.model).name or self.model]

    @property
    def adapters(self) -> dict[str, str]:
        """Folders of adapters by the names that clients call them.

        Raises:
            InvalidParameterError: two have one name, or one has the model's.
        """
        named = name_adapters(self.adapter or ())
        for name in named.keys() & set(self.names):
            raise InvalidParameterError(f"the model and an adapter are both named '{name}'; write --adapter NAME=DIR")
        return named

    @property
    def limits(self) -> Limits:
        """The limits alone, for processes that import nothing of the rest."""
        return Limits(**{field.name: getattr(self, field.name) for field in fields(Limits)})

    def load(self) -> Engine:
        """Loads the model, and makes its engine."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        known = {each.name: given[each.name] for each in fields(EngineOptions) if each.name in given}
        sizes = {name: _bytes(known[name]) for name in _SIZES}
        return Engine.from_pretrained(self.model, self.method, **{**known, **sizes, "adapters": self.adapters})

    def service(
        self, load: Callable[[], Engine] | None = None, *, state: Path | None = None, state_seconds: float = 60.0
    ) -> Service:
        """What answers requests, not started yet. ``load`` makes the engine instead of this object's own."""
        methods = None if self.methods is None else split_methods(self.methods)
        engine = ServedEngine(
            load or self.load,
            methods=methods,
            state=state,
            state_seconds=state_seconds,
            wait_seconds=self.read_seconds,
        )
        readers = ReaderPool(self.readers, self.read_seconds)
        return Service(engine, self.names, self.limits, readers, adapters=tuple(self.adapters))

    def app(self, service: Service, keys: Sequence[str], address: Address) -> FastAPI:
        """The application of a service that listens at an address, and asks for one of the keys if there are some."""
        hosts = address.allowed_hosts(self.allowed_host, needs_key=bool(keys))
        return create_app(service, api_keys=keys, cors_origins=self.cors_origin or (), hosts=hosts)


Options = TypeVar("Options", bound=ServeOptions)


def check_options(given: Mapping[str, Any], kind: type[Options]) -> Options:
    """The options of a mapping, whose texts may stand for numbers.

    Raises:
        InvalidParameterError: an option is unknown, of the wrong type or out of range.
    """
    try:
        return TypeAdapter(kind).validate_python(given)
    except ValidationError as error:
        raise InvalidParameterError(_told(error)) from error


def _told(error: ValidationError) -> str:
    """The first thing that is wrong, in a line."""
    first = error.errors(include_url=False)[0]
    name = ".".join(map(str, first["loc"]))
    if first["type"] == "unexpected_keyword_argument":
        return f"there is no option '{name}'; `selfspec serve --help` lists them, with _ for - and without --"
    return f"{name}: {first['msg'][:1].lower()}{first['msg'][1:]}, not {first['input']!r}"


def _bytes(gib: float | None) -> int | None:
    return None if gib is None else int(gib * 2**30)
