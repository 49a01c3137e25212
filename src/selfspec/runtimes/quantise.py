"""Quantised targets: a model whose own weights are low-bit ones, so that the target itself runs at few bits."""

import copy
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from selfspec.errors import InvalidParameterError, UnsupportedModelError
from selfspec.memory import check_memory
from selfspec.model.decoder import Decoder
from selfspec.model.families import Family, require_row
from selfspec.runtimes.formats import PackedFormat
from selfspec.runtimes.latent import latent_linears
from selfspec.runtimes.low_bit import LowBitWeights
from selfspec.runtimes.mixtures import EXPERT_WEIGHTS, expert_bias
from selfspec.runtimes.packed import LowBitEmbedding, LowBitExperts, LowBitLinear, PackedWeights
from selfspec.runtimes.precision import Precision
from selfspec.runtimes.runner import make_runner

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Model = TypeVar("Model", bound="PreTrainedModel")

WEIGHTS = {"int8": Precision.of(8), "int4": Precision(attention=4, mlp=4, head=8)}
"""Precisions of a target by name. Of ``int4``, LM head and embedding have 8 bits, as in llama.cpp's mixtures: at 4 bits
they cost more agreement than they save bytes."""


def parse_weights(weights: str | Precision | None) -> Precision | None:
    """The precision of a name of ``WEIGHTS``; ``None`` for the model's own weights."""
    if isinstance(weights, str):
        if weights not in WEIGHTS:
            raise InvalidParameterError(
                f"there are no weights '{weights}'; choose {', '.join(WEIGHTS)}, or none for the model's own"
            )
        return WEIGHTS[weights]
    return None if weights is None or weights.is_full else weights


def quantise(model: Model, weights: str | Precision) -> Model:
    """A model like another, with low-bit weights in its linear layers and its embedding.

    The new model has the norms and biases of the given one, which stays as it is. Its modules run by transformers too,
    and its own ``generate`` writes what an engine for it writes. A tied head and embedding stay tied; an embedding of
    its own has the bits of the head.

    Args:
        model: a supported model in float32 or bfloat16 on the CPU.
        weights: ``int8``, ``int4``, or a precision. Parts at 16 bits keep their weights.

    Returns:
        The quantised model, in eval mode.

    Raises:
        InvalidParameterError: there are no such weights.
        UnsupportedModelError: there are no low-bit kernels for the model, its sizes do not divide into groups, or it is
            quantised already.
        OutOfMemoryError: the low-bit weights do not fit into the memory that is available; nothing was allocated.
    """
    precision = _checked(model, weights)
    if precision is None:
        return model
    with torch.inference_mode(mode=False), torch.no_grad():
        return _replace(_copy(model, lambda tensor: tensor), precision)


def quantise_in_place(model: Model, weights: str | Precision) -> Model:
    """Like ``quantise``, of a model that is not needed any more: the memory of each weight is given back at once.

    Args:
        model: a model that nothing else uses; see ``quantise``.
        weights: see there.

    Returns:
        The same model.

    Raises:
        SelfSpecError: see ``quantise``; then the model is as it was.
    """
    precision = _checked(model, weights)
    if precision is None:
        return model
    with torch.inference_mode(mode=False), torch.no_grad():
        _replace(model, precision)
        for parameter in model.parameters():
            if parameter.is_floating_point():  # what is left may be views of a mapped file, which they would hold
                parameter.data = parameter.data.clone()
    return model


def quantised_bytes(model: "PreTrainedModel", weights: str | Precision) -> int:
    """What the low-bit weights of a model that is to be quantised take, in bytes."""
    precision = parse_weights(weights)
    if precision is None:
        return 0
    layers = (
        form.bytes(weight.shape[:-1].numel(), weight.shape[-1])
        for _, _, module, form in _layer_parts(model, precision)
        for weight, _ in _weights(module, require_row(model.config))
    )
    return sum(layers) + sum(form.bytes(*tensor.shape) for tensor, form in _tables(model, precision))


def check_quantisable(model: "PreTrainedModel", precision: Precision) -> None:
    """Refuses a model that cannot have low-bit weights. Only shapes are looked at: the model may be on ``meta``."""
    others = {type(weight) for weight in model.parameters()} - {nn.Parameter}  # torchao's, bitsandbytes'
    if others or any(isinstance(module, LowBitLinear) for module in model.modules()):
        kind = f" ({others.pop().__name__})" if others else ""
        raise UnsupportedModelError(f"the model is quantised already{kind}; quantise the model that it was made of")
    device = model.get_input_embeddings().weight.device.type
    if device not in ("cpu", "meta"):
        raise UnsupportedModelError(
            f"low-bit weights of a target run on the CPU only, not on '{device}'; move it there"
        )
    with torch.inference_mode(mode=False), torch.no_grad():
        decoder = Decoder(_copy(model, _without_values), require_row(model.config))
        LowBitWeights(decoder, make_runner(decoder, "compiled")).check(precision)


def _checked(model: "PreTrainedModel", weights: str | Precision) -> Precision | None:
    """The precision, ``None`` where nothing is to be done; refuses what ``quantise`` names."""
    precision = parse_weights(weights)
    if precision is None:
        return None
    check_quantisable(model, precision)
    needed = quantised_bytes(model, precision)
    what = f"low-bit weights take {needed:,} bytes beside the model's own"
    check_memory(needed, what, "choose fewer bits or a smaller model")
    return precision


def _copy(model: Model, place: Callable[[torch.Tensor], torch.Tensor]) -> Model:
    """A model of new modules; ``place`` gives what takes the place of a parameter or a buffer, shared ones once."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, {key: place(tensor) for key, tensor in tensors.items()})


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor or parameter of the same shape and dtype on device ``meta``."""
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty


def _replace(model: Model, precision: Precision) -> Model:
    """Replaces linear layers and embedding of a model by low-bit modules."""
    dtype, family = model.dtype, require_row(model.config)
    for parent, name, module, form in _layer_parts(model, precision):
        layers = [
            LowBitLinear(PackedWeights.of(weight.flatten(0, -2).contiguous(), form), bias, dtype)
            for weight, bias in _weights(module, family)
        ]
        setattr(parent, name, layers[0] if isinstance(module, nn.Linear) else LowBitExperts(module, *layers))
    tables = {id(tensor): PackedWeights.of(tensor.detach(), form) for tensor, form in _tables(model, precision)}
    outer: Any = model
    head, embedding = outer.get_output_embeddings(), outer.get_input_embeddings()
    if (packed := tables.get(id(head.weight))) is not None:
        new_head = LowBitLinear(packed, head.bias, dtype)
        outer.set_output_embeddings(new_head)
        scale = getattr(embedding, "scalar_embed_scale", None)
        if embedding.weight is head.weight:
            if type(embedding) is nn.Embedding or scale is not None:
                outer.set_input_embeddings(LowBitEmbedding(new_head, dtype, scale=scale))
        elif (table := tables.get(id(embedding.weight))) is not None:
            outer.set_input_embeddings(LowBitEmbedding(LowBitLinear(table, None, dtype), dtype))
    return model


def _layer_parts(model: Any, precision: Precision) -> Iterator[tuple[nn.Module, str, Any, PackedFormat]]:
    """What becomes low-bit ones, linear layers and experts: the module that holds it, its name, itself, its format."""
    family = require_row(model.config)
    for index in range(2 * len(model.model.layers)):
        branch, form = (family.attention, family.mlp)[index % 2], precision.of_sublayer(index)
        module = getattr(model.model.layers[index // 2], branch.module)
        if form is None:
            continue
        if not hasattr(module, "experts"):
            latent = family.latent and index % 2 == 0
            names = latent_linears(module) if latent else branch.parts
            yield from ((module, name, getattr(module, name), form) for name in names)
            continue
        yield module, "experts", module.experts, form
        assert family.mixture is not None
        if (shared := getattr(module, family.mixture.shared, None)) is not None:
            yield from ((shared, name, getattr(shared, name), form) for name in branch.parts)


def _weights(module: Any, family: Family) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """The weights of a linear layer, or of experts ``[experts, outputs, inputs]``, and their biases in one axis."""
    if isinstance(module, nn.Linear):
        yield module.weight.detach(), module.bias
        return
    assert family.mixture is not None
    for name in EXPERT_WEIGHTS:
        weight, bias = getattr(module, name).detach(), expert_bias(module, name)
        by_outputs = weight.transpose(1, 2) if family.mixture.transposed else weight
        yield by_outputs, None if bias is None else bias.detach().flatten()


def _tables(model: Any, precision: Precision) -> list[tuple[torch.Tensor, PackedFormat]]:
    """The weights of head and embedding that become low-bit ones, one where they share it.

    An embedding of another class than torch's own (it scales what it looks up) keeps its table, unless the head has it.
    """
    form, head, embedding = precision.of_head(), model.get_output_embeddings(), model.get_input_embeddings()
    if form is None:
        return []
    shared = embedding.weight is head.weight or type(embedding) is not nn.Embedding
    return [(head.weight, form)] + ([] if shared else [(embedding.weight, form)])
