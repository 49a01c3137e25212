"""selfspec: lossless self-speculative decoding for Hugging Face causal language models."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from selfspec import errors
from selfspec.errors import SelfSpecError

if TYPE_CHECKING:
    from selfspec.async_engine import AsyncEngine, RequestStream
    from selfspec.engine import Engine, Stream
    from selfspec.hf.generate import custom_generate
    from selfspec.loading import load_model, quantise
    from selfspec.methods import METHODS
    from selfspec.options import EngineOptions
    from selfspec.prompts import Prompt, Prompts
    from selfspec.types import Generation, Round, SamplingParams, TextPiece

__version__ = "0.2.0"

__all__ = [
    "METHODS",
    "AsyncEngine",
    "Engine",
    "EngineOptions",
    "Generation",
    "Prompt",
    "Prompts",
    "RequestStream",
    "Round",
    "SamplingParams",
    "SelfSpecError",
    "Stream",
    "TextPiece",
    "custom_generate",
    "errors",
    "load_model",
    "quantise",
]

_HOMES = {
    "METHODS": "selfspec.methods",
    "AsyncEngine": "selfspec.async_engine",
    "Engine": "selfspec.engine",
    "EngineOptions": "selfspec.options",
    "Generation": "selfspec.types",
    "Prompt": "selfspec.prompts",
    "Prompts": "selfspec.prompts",
    "RequestStream": "selfspec.async_engine",
    "Round": "selfspec.types",
    "SamplingParams": "selfspec.types",
    "Stream": "selfspec.engine",
    "TextPiece": "selfspec.types",
    "custom_generate": "selfspec.hf.generate",
    "load_model": "selfspec.loading",
    "quantise": "selfspec.loading",
}


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used, so that ``selfspec --help`` does not import torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'selfspec' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)
