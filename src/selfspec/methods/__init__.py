"""The methods, one file each. Importing this package registers all of them; `selfspec.methods.api` is for authors."""

from selfspec.methods import (
    adaptive_cosine,
    autoregressive,
    clasp,
    dynamic_exit,
    jacobi,
    knapspec,
    layerskip,
    lookahead,
    low_bit,
    prompt_lookup,
    self_spec,
    suffix,
    swift,
    token_recycling,
    uniform,
)
from selfspec.methods.registry import METHODS, all_methods, find_method, make_method

__all__ = [
    "METHODS",
    "adaptive_cosine",
    "all_methods",
    "autoregressive",
    "clasp",
    "dynamic_exit",
    "find_method",
    "jacobi",
    "knapspec",
    "layerskip",
    "lookahead",
    "low_bit",
    "make_method",
    "prompt_lookup",
    "self_spec",
    "suffix",
    "swift",
    "token_recycling",
    "uniform",
]
