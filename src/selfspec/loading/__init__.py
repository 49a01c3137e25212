"""Models by name: a bundled checkpoint, an installed model, a GGUF file, a local folder, or a hub name."""

from typing import TYPE_CHECKING

from selfspec.lazy import lazily

if TYPE_CHECKING:
    from selfspec.loading.catalog import INSTALLABLE as INSTALLABLE
    from selfspec.loading.catalog import bundled_models as bundled_models
    from selfspec.loading.catalog import find_installed as find_installed
    from selfspec.loading.catalog import resolve_name as resolve_name
    from selfspec.loading.devices import DTYPES as DTYPES
    from selfspec.loading.devices import parse_device as parse_device
    from selfspec.loading.devices import parse_dtype as parse_dtype
    from selfspec.loading.gguf_own import architecture_of as architecture_of
    from selfspec.loading.gguf_splits import SPLITTINGS as SPLITTINGS
    from selfspec.loading.loader import count_parameters as count_parameters
    from selfspec.loading.loader import find_gguf_file as find_gguf_file
    from selfspec.loading.loader import load_config as load_config
    from selfspec.loading.loader import load_model as load_model
    from selfspec.runtimes.quantise import parse_weights as parse_weights
    from selfspec.runtimes.quantise import quantise as quantise
    from selfspec.runtimes.quantise import quantise_in_place as quantise_in_place

_NAMES = {
    "selfspec.loading.catalog": ("INSTALLABLE", "bundled_models", "find_installed", "resolve_name"),
    "selfspec.loading.devices": ("DTYPES", "parse_device", "parse_dtype"),
    "selfspec.loading.gguf_own": ("architecture_of",),
    "selfspec.loading.gguf_splits": ("SPLITTINGS",),
    "selfspec.loading.loader": ("count_parameters", "find_gguf_file", "load_config", "load_model"),
    "selfspec.runtimes.quantise": ("parse_weights", "quantise", "quantise_in_place"),
}

__all__ = [name for names in _NAMES.values() for name in names]
__getattr__ = lazily(__name__, _NAMES)  # a GGUF file is opened before transformers is imported
