"""One file a method; importing this package makes all of them known."""

from selfspec.methods import (
    adaptive_cosine,
    autoregressive,
    clasp,
    dynamic_exit,
    jacobi,
    knapspec,
    layerskip,
    lookahead,
    prompt_lookup,
    self_spec,
    suffix,
    swift,
    token_recycling,
    uniform,
)
from selfspec.methods.registry import METHODS, find_method, make_method

__all__ = [
    "METHODS",
    "adaptive_cosine",
    "autoregressive",
    "clasp",
    "dynamic_exit",
    "find_method",
    "jacobi",
    "knapspec",
    "layerskip",
    "lookahead",
    "make_method",
    "prompt_lookup",
    "self_spec",
    "suffix",
    "swift",
    "token_recycling",
    "uniform",
]
