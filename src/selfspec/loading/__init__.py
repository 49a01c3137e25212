"""Models by name: a bundled checkpoint, an installed model, a GGUF file, a local folder, or a hub name."""

from selfspec.loading.catalog import BUNDLED, INSTALLABLE, resolve_name
from selfspec.loading.devices import DTYPES, parse_device, parse_dtype
from selfspec.loading.model import load_model

__all__ = [
    "BUNDLED",
    "DTYPES",
    "INSTALLABLE",
    "load_model",
    "parse_device",
    "parse_dtype",
    "resolve_name",
]
