"""selfspec: lossless self-speculative decoding for Hugging Face causal language models."""

from typing import TYPE_CHECKING

from selfspec import errors
from selfspec.errors import SelfSpecError
from selfspec.lazy import lazily

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
    "selfspec.async_engine": ("AsyncEngine", "RequestStream"),
    "selfspec.engine": ("Engine", "Stream"),
    "selfspec.hf.custom_generate": ("custom_generate",),
    "selfspec.loading": ("load_model", "quantise"),
    "selfspec.methods": ("METHODS",),
    "selfspec.engine_options": ("EngineOptions",),
    "selfspec.prompts": ("Prompt", "Prompts"),
    "selfspec.types": ("Generation", "Round", "SamplingParams", "TextPiece"),
}

__all__ = ["SelfSpecError", "errors", *(name for names in _NAMES.values() for name in names)]
__getattr__ = lazily(__name__, _NAMES)  # so that ``selfspec --help`` does not import torch
