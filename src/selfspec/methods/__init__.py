"""The methods. Importing this package registers all of them; ``selfspec.methods.api`` is for authors."""

from selfspec.methods import (  # noqa: F401 - they register their methods
    auto,
    clasp,
    dynamic_exit,
    fixed,
    knapspec,
    mtp,
    ngram,
    papers,
    sparse,
    swift,
    token_recycling,
)
from selfspec.methods.registry import COMPOSITIONS, METHODS, all_compositions, all_methods, find_method, make_method

__all__ = ["COMPOSITIONS", "METHODS", "all_compositions", "all_methods", "find_method", "make_method"]
