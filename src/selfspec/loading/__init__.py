"""Models by name: a bundled checkpoint, an installed model, a GGUF file, a local folder, or a hub name."""

from selfspec.loading.catalog import INSTALLABLE, bundled_models, resolve_name
from selfspec.loading.devices import DTYPES, parse_device, parse_dtype
from selfspec.loading.model import load_config, load_model, parameter_count
from selfspec.loading.packages import find_installed
from selfspec.runtimes.quantise import parse_weights, quantise, quantise_in_place

__all__ = [
    "DTYPES",
    "INSTALLABLE",
    "bundled_models",
    "find_installed",
    "load_config",
    "load_model",
    "parameter_count",
    "parse_device",
    "parse_dtype",
    "parse_weights",
    "quantise",
    "quantise_in_place",
    "resolve_name",
]
