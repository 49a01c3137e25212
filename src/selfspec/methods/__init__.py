"""One file a method; importing this package makes all of them known."""

from selfspec.methods import autoregressive, layerskip, uniform
from selfspec.methods.registry import METHODS, find_method, make_method

__all__ = ["METHODS", "autoregressive", "find_method", "layerskip", "make_method", "uniform"]
