"""The methods, one file each. Importing this package registers all of them; `selfspec.methods.api` is for authors."""

from selfspec.methods import (
    auto,
    autoregressive,
    cascade,
    clasp,
    draft_verify,
    dynamic_exit,
    knapspec,
    layerskip,
    low_bit,
    prompt_lookup,
    suffix,
    swift,
    token_recycling,
    uniform,
)
from selfspec.methods.registry import COMPOSITIONS, METHODS, all_methods, find_method, make_method

__all__ = [
    "COMPOSITIONS",
    "METHODS",
    "all_methods",
    "auto",
    "autoregressive",
    "cascade",
    "clasp",
    "draft_verify",
    "dynamic_exit",
    "find_method",
    "knapspec",
    "layerskip",
    "low_bit",
    "make_method",
    "prompt_lookup",
    "suffix",
    "swift",
    "token_recycling",
    "uniform",
]
