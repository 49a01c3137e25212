"""What is served, and within which limits: the options of ``selfspec serve`` without those of its sockets."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from selfspec.engine import Engine
from selfspec.errors import InvalidParameterError
from selfspec.loading.adapters import name_adapters
from selfspec.serve.encoding import RequestLimits
from selfspec.serve.pool import ReaderPool
from selfspec.serve.served_engine import ServedEngine
from selfspec.serve.service import Service


def _listed(value: Any) -> Any:
    """A text as a list of one, for options that the command line repeats."""
    return [value] if isinstance(value, str) else value


def split_methods(text: str) -> list[str]:
    """The names of a list with commas, where those in the parentheses of a cascade separate its stages."""
    return [name.strip() for name in re.split(r",(?![^(]*\))", text) if name.strip()]


Count = Annotated[int, Field(ge=1)]
Gib = Annotated[float, Field(ge=0.001)]
Seconds = Annotated[float, Field(ge=0.1)]
Texts = Annotated[list[str], BeforeValidator(_listed)]

_ENGINE = (
    *("paper", "authors", "dtype", "weights", "unpack", "activations", "device"),
    *("runtime", "cache_bits", "keep_copies", "cache_dir"),
)


class ServeOptions(BaseModel):
    """The options of ``selfspec serve``, checked when they are made; its ``--help`` says what each one does.

    Sizes are in GiB, ``max_body`` in MiB. ``settings`` are those of the method, by name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

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
    keep_copies: bool = False
    cache_dir: Path | None = None
    cache_dir_limit: Gib = 4.0

    adapter: Texts | None = None
    name: Texts | None = None
    methods: str | None = None
    api_key: Texts | None = None
    allowed_host: Texts | None = None
    cors_origin: Texts | None = None

    max_batch: Count = 16
    max_waiting: Count = 256
    memory_limit: Gib | None = None
    prefix_cache: Annotated[float, Field(ge=0)] | None = None
    max_prompt_chars: Count | None = None
    max_prompt_tokens: Count | None = None
    max_new_tokens: Count | None = None
    default_new_tokens: Count = 1024
    max_choices: Count = 128
    max_logprobs: Count = 2**17
    max_body: Gib = 4.0
    idle_seconds: Seconds = 20.0
    readers: Count = 2
    read_seconds: Seconds = 20.0
    request_seconds: Seconds = 3600.0
    drain_seconds: Annotated[float, Field(ge=0)] = 60.0

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
    def request_limits(self) -> RequestLimits:
        """The limits of a request."""
        return RequestLimits(
            body_bytes=int(self.max_body * 2**20),
            body_seconds=self.idle_seconds,
            read_seconds=self.read_seconds,
            request_seconds=self.request_seconds,
            logprobs=self.max_logprobs,
            prompt_chars=self.max_prompt_chars,
            prompt_tokens=self.max_prompt_tokens,
            new_tokens=self.max_new_tokens,
            default_new_tokens=self.default_new_tokens,
            choices=self.max_choices,
        )

    def load(self) -> Engine:
        """Loads the model, and makes its engine."""
        return Engine.from_pretrained(
            self.model,
            self.method,
            settings=self.settings,
            adapters=self.adapters,
            max_batch=self.max_batch,
            max_waiting=self.max_waiting,
            memory_limit=_bytes(self.memory_limit),
            prefix_cache=_bytes(self.prefix_cache),
            cache_dir_limit=int(self.cache_dir_limit * 2**30),
            **{name: getattr(self, name) for name in _ENGINE},
        )

    def service(
        self, load: Callable[[], Engine] | None = None, *, state: Path | None = None, state_seconds: float = 60.0
    ) -> Service:
        """What answers requests, not started yet. ``load`` makes the engine instead of this object's own."""
        methods = None if self.methods is None else split_methods(self.methods)
        engine = ServedEngine(load or self.load, methods=methods, state=state, state_seconds=state_seconds)
        readers = ReaderPool(self.readers, self.read_seconds)
        return Service(engine, self.names, self.request_limits, readers, adapters=tuple(self.adapters))


Options = TypeVar("Options", bound=ServeOptions)


def check_options(given: Mapping[str, Any], kind: type[Options]) -> Options:
    """The options of a mapping, whose texts may stand for numbers.

    Raises:
        InvalidParameterError: an option is unknown, of the wrong type or out of range.
    """
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise InvalidParameterError(_told(error)) from error


def _told(error: ValidationError) -> str:
    """The first thing that is wrong, in a line."""
    first = error.errors(include_url=False)[0]
    name = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        return f"there is no option '{name}'; `selfspec serve --help` lists them, with _ for - and without --"
    return f"{name}: {first['msg'][:1].lower()}{first['msg'][1:]}, not {first['input']!r}"


def _bytes(gib: float | None) -> int | None:
    return None if gib is None else int(gib * 2**30)
