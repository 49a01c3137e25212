"""selfspec: lossless self-speculative decoding for Hugging Face causal language models."""

from selfspec import errors
from selfspec.engine import Engine, Stream
from selfspec.errors import SelfSpecError
from selfspec.loading import load_model
from selfspec.methods import METHODS
from selfspec.types import Generation, Round, SamplingParams, TextPiece

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "Engine",
    "Generation",
    "Round",
    "SamplingParams",
    "SelfSpecError",
    "Stream",
    "TextPiece",
    "errors",
    "load_model",
]
