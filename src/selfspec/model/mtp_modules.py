"""A multi-token-prediction head that ships inside a checkpoint, as a model of one layer.

transformers leaves its tensors out when it loads the model, so they are read from the checkpoint.
"""

import copy
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from selfspec.errors import ModelLoadError, SelfSpecError, UnsupportedModelError, first_line
from selfspec.limits import is_out_of_memory
from selfspec.model.safetensors_files import SafetensorsFiles

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_Module = TypeVar("_Module", bound=nn.Module)


class HeadTensors(Protocol):
    """The tensors of a checkpoint that has a head, by the names that checkpoints in safetensors have."""

    @property
    def names(self) -> Collection[str]:
        """Of all tensors."""

    def check(self, name: str, shape: tuple[int, ...]) -> str:
        """Refuses a tensor that is missing or of another shape; returns its name."""

    def read(self, name: str) -> torch.Tensor:
        """The values of a tensor."""


_HELD: WeakKeyDictionary[nn.Module, HeadTensors] = WeakKeyDictionary()
"""By model, the heads of those that were loaded from elsewhere than a checkpoint in safetensors."""


def hold_head(model: "PreTrainedModel", tensors: HeadTensors) -> None:
    """Says where the head of a model is whose checkpoint is not in safetensors."""
    _HELD[model] = tensors


@dataclass(frozen=True)
class _Layout:
    """How checkpoints name the tensors of a head. All others with the prefix of its layer are the decoder layer's.

    ``state_first``: the projection reads the hidden state before the token's embedding.
    """

    prefix: str
    layer: str
    projection: str
    token_norm: str
    state_norm: str
    norm: str
    state_first: bool = False
    own: tuple[str, ...] = ()
    """Copies of the model's embedding and LM head, which are not read."""


def _layouts(layers: int) -> tuple[_Layout, ...]:
    """Those that are known, for a model with a number of layers."""
    after, mimo = f"model.layers.{layers}.", "model.mtp_layers.0."
    return (
        _Layout("mtp.", "layers.0.", "fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"),
        _Layout(mimo, "", "input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm", state_first=True),
        _Layout(
            after,
            "",
            "eh_proj",
            "enorm",
            "hnorm",
            "shared_head.norm",
            own=("embed_tokens.weight", "shared_head.head.weight"),
        ),
    )


@dataclass(frozen=True)
class MtpModules:
    """The modules of a head.

    Attributes:
        model: the head's decoder layer and its norm, with the target's embedding and LM head, as a model of one layer.
        projection: ``[hidden, 2 * hidden]``, of the token's normed embedding and the normed hidden state before it.
        token_norm: of the embedding.
        state_norm: of the hidden state, which is the target's after its final norm, or the head's own.
        state_first: the hidden state comes first.
    """

    model: "PreTrainedModel"
    projection: nn.Linear
    token_norm: nn.Module
    state_norm: nn.Module
    state_first: bool


def read_mtp(model: "PreTrainedModel") -> MtpModules:
    """Reads the head that the checkpoint of a loaded model has; of several the first.

    Raises:
        UnsupportedModelError: it has none.
        ModelLoadError: the head does not fit the model, or tensors of it are missing.
    """
    source = _source(model)
    try:
        found = _find(model, source, download=not has_head(model))  # what is here is not asked of the hub again
        if found is None:
            raise UnsupportedModelError(
                f"the checkpoint of this {model.config.model_type} model has no multi-token-prediction head in "
                "safetensors or GGUF; use another method, or name a checkpoint that has one"
            )
        return _build(model, *found)
    except SelfSpecError:
        raise
    except Exception as error:  # of safetensors, of the hub's client, or of transformers
        if is_out_of_memory(error):
            raise
        raise ModelLoadError(
            f"cannot load the multi-token-prediction head of '{source}': {first_line(error)}"
        ) from error


def has_head(model: "PreTrainedModel") -> bool:
    """Whether the files of a loaded model's checkpoint, as far as they are on this machine, name tensors of a head."""
    try:
        return _find(model, _source(model), download=False) is not None
    except Exception:  # of the hub's client, of safetensors, of JSON: loading the model has said so
        return False


def _source(model: "PreTrainedModel") -> str:
    """What a model was loaded from; empty where it was not."""
    return str(getattr(model.config, "name_or_path", "") or "")


def _find(model: "PreTrainedModel", source: str, *, download: bool) -> tuple[HeadTensors, _Layout] | None:
    """The tensors of a model's checkpoint that has a head, and how they are named; of several heads the first."""
    files: HeadTensors | None = _HELD.get(model)
    if files is None and source:
        files = SafetensorsFiles.find(source, download=download)
    if files is None:
        return None
    for layout in _layouts(int(model.config.get_text_config().num_hidden_layers)):
        if any(name.startswith(layout.prefix) for name in files.names):
            return files, layout
    return None


def _build(model: Any, files: HeadTensors, layout: _Layout) -> MtpModules:
    like = next(model.get_decoder().norm.parameters())
    hidden = like.shape[0]

    def read(name: str, *shape: int) -> torch.Tensor:
        return files.read(files.check(f"{layout.prefix}{name}.weight", shape)).to(like)

    projection = nn.Linear(2 * hidden, hidden, bias=False, device="meta")
    projection.weight = nn.Parameter(read(layout.projection, hidden, 2 * hidden).contiguous())
    norm = model.get_decoder().norm
    norms = [_with_weight(norm, read(name, hidden)) for name in (layout.token_norm, layout.state_norm)]
    head = _read_layer(model, files, layout, read(layout.norm, hidden))
    for module in (head, projection, *norms):
        module.requires_grad_(requires_grad=False)
    head.set_input_embeddings(model.get_input_embeddings())
    head.lm_head = model.lm_head
    head.config.vocab_size = model.config.vocab_size
    return MtpModules(head, projection, norms[0], norms[1], layout.state_first)


def _read_layer(model: Any, files: HeadTensors, layout: _Layout, norm: torch.Tensor) -> Any:
    """The head's decoder layer and norm, as a model of one layer with an embedding of one token."""
    others = (layout.projection, layout.token_norm, layout.state_norm, layout.norm)
    known = {f"{layout.prefix}{name}.weight" for name in others} | {layout.prefix + name for name in layout.own}
    start = layout.prefix + layout.layer
    names = [name for name in files.names if name.startswith(start) and name not in known]
    weights = {f"model.layers.0.{name.removeprefix(start)}": files.read(name) for name in names}
    token = torch.zeros(1, len(norm), dtype=norm.dtype)
    weights |= {"model.norm.weight": norm, "model.embed_tokens.weight": token, "lm_head.weight": token}
    config = _head_config(model.config, sparse=any(".experts." in name for name in names))
    head, report = type(model).from_pretrained(
        None,
        config=config,
        state_dict=weights,
        dtype=norm.dtype,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        attn_implementation=model.config._attn_implementation,
    )
    problems = {"missing_keys": "is missing", "mismatched_keys": "has another shape", "unexpected_keys": "is not known"}
    for found, problem in problems.items():
        if keys := sorted(report.get(found) or ()):
            key = keys[0] if isinstance(keys[0], str) else keys[0][0]
            name = f"{start}{key.removeprefix('model.layers.0.')}"
            raise ModelLoadError(f"the tensor {name} of the multi-token-prediction head {problem}; download it again")
    return head.to(norm.device).eval()


def _head_config(config: Any, *, sparse: bool) -> Any:
    """The model's config with one layer, which attends to all tokens; ``sparse``: it is a mixture of experts."""
    own = copy.deepcopy(config)
    changes = {
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "mlp_layer_types": ["sparse" if sparse else "dense"],
        "first_k_dense_replace": 0 if sparse else 1,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [] if sparse else [0],
        "pad_token_id": None,
    }
    for name, value in changes.items():
        if getattr(own, name, None) is not None:
            setattr(own, name, value)
    own.vocab_size, own.tie_word_embeddings = 1, False
    return own


def _with_weight(norm: _Module, weight: torch.Tensor) -> _Module:
    own: Any = copy.deepcopy(norm)
    own.weight.data = weight
    return own  # type: ignore[no-any-return]
