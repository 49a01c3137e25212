"""selfspec: lossless self-speculative decoding for Hugging Face causal language models."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from selfspec import errors
from selfspec.errors import SelfSpecError

if TYPE_CHECKING:
    from selfspec.async_engine import AsyncEngine as AsyncEngine
    from selfspec.async_engine import RequestStream as RequestStream
    from selfspec.engine import Engine as Engine
    from selfspec.engine import Stream as Stream
    from selfspec.engine_options import EngineOptions as EngineOptions
    from selfspec.hf.custom_generate import custom_generate as custom_generate
    from selfspec.loading import load_model as load_model
    from selfspec.loading import quantise as quantise
    from selfspec.methods import METHODS as METHODS
    from selfspec.prompts import Prompt as Prompt
    from selfspec.prompts import Prompts as Prompts
    from selfspec.types import Generation as Generation
    from selfspec.types import Round as Round
    from selfspec.types import SamplingParams as SamplingParams
    from selfspec.types import TextPiece as TextPiece

__version__ = "0.2.0"

_NAMES = {
    "async_engine": ("AsyncEngine", "RequestStream"),
    "engine": ("Engine", "Stream"),
    "hf.custom_generate": ("custom_generate",),
    "loading": ("load_model", "quantise"),
    "methods": ("METHODS",),
    "engine_options": ("EngineOptions",),
    "prompts": ("Prompt", "Prompts"),
    "types": ("Generation", "Round", "SamplingParams", "TextPiece"),
}
_HOMES = {name: f"selfspec.{module}" for module, names in _NAMES.items() for name in names}

__all__ = ["SelfSpecError", "errors", *_HOMES]


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used, so that ``selfspec --help`` does not import torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'selfspec' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)
