"""Models by name: a bundled checkpoint, an installed model, a GGUF file, a local folder, or a hub name."""

from selfspec.loading.catalog import INSTALLABLE, bundled_models, find_installed, resolve_name
from selfspec.loading.devices import DTYPES, parse_device, parse_dtype
from selfspec.loading.gguf_own import architecture_of
from selfspec.loading.gguf_splits import SPLITTINGS
from selfspec.loading.loader import count_parameters, find_gguf_file, load_config, load_model
from selfspec.runtimes.quantise import parse_weights, quantise, quantise_in_place

__all__ = [
    "DTYPES",
    "INSTALLABLE",
    "SPLITTINGS",
    "architecture_of",
    "bundled_models",
    "count_parameters",
    "find_gguf_file",
    "find_installed",
    "load_config",
    "load_model",
    "parse_device",
    "parse_dtype",
    "parse_weights",
    "quantise",
    "quantise_in_place",
    "resolve_name",
]
