"""llama.cpp with the same weights, through the package ``llama-cpp-python``."""

from selfspec_lab.bench.llama_cpp.decoding import LlamaCpp
from selfspec_lab.bench.llama_cpp.library import describe_build, import_library, is_installed, obstacle
from selfspec_lab.bench.llama_cpp.lookup import LlamaCppLookup
from selfspec_lab.bench.llama_cpp.weights import GgufFile, WeightsFile, quantise_gguf

__all__ = [
    "GgufFile",
    "LlamaCpp",
    "LlamaCppLookup",
    "WeightsFile",
    "describe_build",
    "import_library",
    "is_installed",
    "obstacle",
    "quantise_gguf",
]
