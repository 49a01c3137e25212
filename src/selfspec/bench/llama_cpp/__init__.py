"""llama.cpp on the same weights, through the package ``llama-cpp-python``."""

from selfspec.bench.llama_cpp.decoding import LlamaCpp
from selfspec.bench.llama_cpp.library import describe_build, import_library, is_installed, obstacle
from selfspec.bench.llama_cpp.lookup import LlamaCppLookup
from selfspec.bench.llama_cpp.weights import WeightsFile

__all__ = ["LlamaCpp", "LlamaCppLookup", "WeightsFile", "describe_build", "import_library", "is_installed", "obstacle"]
