"""PEFT's LoRA adapters in folders and on the hub: which of them can be added beside the weights, and their factors."""

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from selfspec.errors import AdapterError, InvalidParameterError, explaining
from selfspec.loading.hub import hub_reason, reaching_hub
from selfspec.model.low_rank import Adapter
from selfspec.model.safetensors_files import SafetensorsFiles
from selfspec.runtimes.adapting import Factors, fit_adapter
from selfspec.runtimes.target import Target

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_PREFIX = "base_model.model."
"""PEFT's, before the names of a model's modules."""

_FACTOR = re.compile(r"(?P<layer>.+)\.lora_(?P<factor>[AB])\.weight")
_HUB_NAME = re.compile(r"[\w.-]+/(?P<model>[\w.-]+)")
_MERGE = "merge it (PEFT's merge_and_unload) and load the merged model"

_REFUSED = {
    "use_dora": "scales weights by their norms (DoRA)",
    "use_qalora": "pools its inputs (QA-LoRA)",
    "modules_to_save": "replaces whole modules (modules_to_save)",
    "trainable_token_indices": "changes embeddings (trainable_token_indices)",
    "target_parameters": "changes parameters of no linear layer (target_parameters)",
    "layer_replication": "repeats layers (layer_replication)",
    "alora_invocation_tokens": "begins at certain tokens (aLoRA)",
    "lora_bias": "has biases (lora_bias)",
    "arrow_config": "chooses among experts (Arrow)",
}
"""By setting what an adapter does that no low-rank product can."""

_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of ``init_lora_weights`` with which the model's weights stay what they are."""


@dataclass(frozen=True, eq=False)
class AdapterFiles:
    """An adapter as it was read, of no model yet.

    Attributes:
        name: what requests call it.
        base: what its config calls the model that it is of.
        factors: by the names of the linear layers.
        digest: identifies the weights.
    """

    name: str
    base: str
    factors: Mapping[str, Factors]
    digest: str

    def fit(self, target: Target) -> Adapter:
        """The adapter for a model.

        Raises:
            AdapterError: it is of another model, or changes what has no low-rank products there.
        """
        own = str(getattr(target.config, "_name_or_path", "") or "")
        _check_base(self, own)
        if target.runtime == "graphs":
            raise AdapterError(f"adapter '{self.name}': runtime 'graphs' records forwards without adapters; leave it")
        return fit_adapter(self.name, self.digest, self.factors, target.model, target.sublayers)


def name_adapters(texts: Sequence[str]) -> dict[str, str]:
    """Adapters of a command line, ``DIR`` or ``NAME=DIR``, by their names: without one the last part of the folder.

    Raises:
        InvalidParameterError: a name is empty, or given twice.
    """
    named: dict[str, str] = {}
    for text in texts:
        name, equals, source = text.partition("=")
        if not equals or Path(text).is_dir():
            name, source = Path(text).resolve().name, text
        if not name or not source:
            raise InvalidParameterError(f"--adapter takes DIR or NAME=DIR, not '{text}'")
        if name in named:
            raise InvalidParameterError(f"two adapters have the name '{name}'; name them: --adapter NAME=DIR")
        named[name] = source
    return named


def read_adapters(adapters: "Mapping[str, str | Path | AdapterFiles] | None") -> dict[str, AdapterFiles]:
    """Adapters by the names that requests call them, read from folders or from names on the hub (``read_adapter``)."""
    return {
        name: given if isinstance(given, AdapterFiles) else read_adapter(name, given)
        for name, given in (adapters or {}).items()
    }


def find_adapter(adapters: Mapping[str, Adapter], name: str | None) -> Adapter | None:
    """The adapter of a name; ``None`` for the model itself.

    Raises:
        InvalidParameterError: there is none of this name.
    """
    if name is not None and name not in adapters:
        known = ", ".join(adapters) or "none"
        raise InvalidParameterError(f"there is no adapter {name!r}; this engine has {known} (option adapters)")
    return None if name is None else adapters[name]


def read_adapter(name: str, source: str | Path) -> AdapterFiles:
    """Reads a LoRA adapter that PEFT has saved.

    Args:
        name: what requests call it.
        source: a folder, or a name on the hub.

    Raises:
        AdapterError: there is none, its files are corrupt, or it is of a kind that cannot be added beside the weights.
    """
    with explaining(AdapterError, f"cannot read adapter '{name}' from '{source}'"):
        folder = _find(name, source)
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError(f"{CONFIG} is no object")
        _check_kind(name, config)
        tensors = SafetensorsFiles([folder / WEIGHTS])
        factors = dict(_factors(name, config, tensors))
        digest = hashlib.sha256((folder / WEIGHTS).read_bytes() + json.dumps(config, sort_keys=True).encode())
    return AdapterFiles(name, str(config.get("base_model_name_or_path") or ""), factors, digest.hexdigest()[:24])


def _find(name: str, source: str | Path) -> Path:
    """The folder of an adapter, downloaded if it is on the hub."""
    folder = Path(source).expanduser()
    if not folder.is_dir():
        if _HUB_NAME.fullmatch(str(source)) is None:
            raise AdapterError(f"adapter '{name}': there is no folder '{source}'; give one that PEFT has saved")
        with reaching_hub():
            try:
                folder = Path(snapshot_download(str(source), allow_patterns=[CONFIG, WEIGHTS]))
            except Exception as error:  # any of the hub's client
                raise AdapterError(f"adapter '{name}': cannot download '{source}': {hub_reason(error)}") from error
    missing = [file for file in (CONFIG, WEIGHTS) if not (folder / file).is_file()]
    if missing:
        raise AdapterError(
            f"adapter '{name}': '{source}' has no {' and no '.join(missing)}; save it by save_pretrained"
        )
    return folder


def _check_kind(name: str, config: Mapping[str, Any]) -> None:
    """Refuses what is no sum of low-rank products."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise AdapterError(f"adapter '{name}' is of type {kind}, and only LORA can be added beside weights; {_MERGE}")
    for setting, does in _REFUSED.items():
        if config.get(setting):
            raise AdapterError(f"adapter '{name}' {does}, which cannot be added beside weights; {_MERGE}")
    if config.get("bias", "none") != "none":
        raise AdapterError(f"adapter '{name}' has biases, which cannot be added beside weights; {_MERGE}")
    if (start := config.get("init_lora_weights", True)) not in _PLAIN_STARTS:
        raise AdapterError(
            f"adapter '{name}' changes the model's weights (init_lora_weights '{start}'); save it with "
            "path_initial_model_for_weight_conversion"
        )


def _factors(name: str, config: Mapping[str, Any], tensors: SafetensorsFiles) -> Iterator[tuple[str, Factors]]:
    """The factors of each linear layer; their scale is as PEFT computes it."""
    layers: dict[str, dict[str, str]] = {}
    for key in tensors.names:
        changed = key.removeprefix(_PREFIX)
        found = _FACTOR.fullmatch(changed)
        if found is None:
            raise AdapterError(f"adapter '{name}' changes '{changed}', which is no factor of a linear layer; {_MERGE}")
        layers.setdefault(found["layer"], {})[found["factor"]] = key
    if not layers:
        raise AdapterError(f"adapter '{name}' has no weights")
    for layer, keys in layers.items():
        if len(keys) < 2:
            raise AdapterError(f"adapter '{name}' has only one factor of '{layer}'; save it again")
        down, up = (tensors.read(keys[factor]).clone() for factor in "AB")
        if down.ndim != 2 or up.ndim != 2:
            raise AdapterError(f"the factors of '{layer}' in adapter '{name}' are no matrices; {_MERGE}")
        alpha = float(_by_pattern(config.get("alpha_pattern") or {}, layer, config.get("lora_alpha", 8)))
        rank = len(down)
        yield layer, (down, up, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _by_pattern(patterns: Mapping[str, Any], layer: str, default: Any) -> Any:
    """The value of the first pattern that a layer's name, or its end after a dot, matches."""
    for pattern, value in patterns.items():
        if re.fullmatch(rf"(?:.*\.)?(?:{pattern})", layer):
            return value
    return default


def _check_base(files: AdapterFiles, own: str) -> None:
    """Refuses an adapter of a model with another name, where both are names on the hub; owners may differ."""
    named = [None if Path(each).exists() else _HUB_NAME.fullmatch(each) for each in (files.base, own)]
    if not all(named):
        return
    base, loaded = (found["model"].casefold() for found in named if found is not None)
    if base != loaded:
        raise AdapterError(
            f"adapter '{files.name}' is of the model '{files.base}', and this is '{own}'; load that one, or if they "
            f"are the same, change base_model_name_or_path in {CONFIG}"
        )
