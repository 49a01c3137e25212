"""The rope of a model in a GGUF file, in transformers' words."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from selfspec.loading.gguf_header import GgufTensor
from selfspec.loading.gguf_settings import Settings, refused

Factors = npt.NDArray[np.float64]
"""What the frequencies of a rope are divided by, ``[rotated / 2]``, the highest frequency first."""

_DIVISORS, _LONG, _SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"

ROPE_TENSORS = frozenset({_DIVISORS, _LONG, _SHORT})
"""Tensors that ``read_rope`` reads, or refuses."""

_DEFAULT_BASE = 10000.0
"""Base of the frequencies where a file does not give it."""

_LLAMA3_BOUNDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA4_BOUNDS = {"low_freq_factor": 1.0, "high_freq_factor": 1.0}
_LLAMA3_LENGTH = 8192
"""What all models of Llama 3.1 and later have; those of Llama 4 divide the frequencies below one bound."""

_ENDLESS = 1e29
"""Factors from which on frequencies are none; files have 1e30."""

_ROUNDING = 1e-6
"""How far factors may be from those of the recovered numbers: float32 rounds them."""

_YARN_ROUNDING = 1e-5
"""The same of what YaRN multiplies cosine and sine by, which configs give in decimal numbers."""


def read_rope(
    settings: Settings, tensors: Mapping[str, GgufTensor], head_dim: int, context: int, *, partial: bool
) -> dict[str, Any]:
    """The ``rope_parameters`` of a config.

    Args:
        settings: those of the model.
        tensors: the tensors of the file.
        head_dim: size of a head.
        context: the longest sequence.
        partial: whether the family can rotate a part of a head.

    Raises:
        UnsupportedModelError: the rope is one that transformers cannot compute for this family.
    """
    base = settings.number("rope.freq_base", _DEFAULT_BASE)
    rotated = settings.integer("rope.dimension_count", head_dim)
    share = rotated_share(rotated, head_dim)
    if base <= 1:
        raise refused(f"this GGUF file has a rope with base {base:g}, which is not supported")
    if rotated != head_dim and not partial:
        raise refused(
            f"this GGUF file has {settings.key('rope.dimension_count')} {rotated}, but models of this family rotate "
            f"whole heads of {head_dim}"
        )
    rope: dict[str, Any] = {"rope_theta": base, **({"partial_rotary_factor": share} if partial else {})}
    return rope | _read_scaling(settings, tensors, base, rotated, context)


def rotated_share(rotated: int, head_dim: int) -> float:
    """The share of a head's entries that are rotated.

    Raises:
        UnsupportedModelError: transformers cannot rotate as many.
    """
    share = rotated / head_dim
    if not 0 < share <= 1 or rotated % 2 or int(head_dim * share) != rotated:
        raise refused(f"this GGUF file rotates {rotated} of the {head_dim} entries of a head, which is not supported")
    return share


def _read_scaling(
    settings: Settings, tensors: Mapping[str, GgufTensor], base: float, rotated: int, context: int
) -> dict[str, Any]:
    kind = _scaling_type(settings)
    original = settings.integer("rope.scaling.original_context_length", context) or context
    attention_factor = settings.number("rope.scaling.attn_factor", 1.0)
    found = ROPE_TENSORS & tensors.keys()
    if found == {_LONG, _SHORT} and kind in ("none", "longrope"):
        factors = {"long_factor": _LONG, "short_factor": _SHORT}
        return {
            "rope_type": "longrope",
            **{name: [_decimal(x) for x in _factors(tensors[tensor], rotated)] for name, tensor in factors.items()},
            "original_max_position_embeddings": original,
            **_longrope_attention(context / original, original, attention_factor),
        }
    _check_attention(settings, _scaling_factor(settings) if kind == "yarn" else 1.0)
    if found == {_DIVISORS} and kind == "none":
        divisors = _factors(tensors[_DIVISORS], rotated)
        return _read_proportional(divisors) or _read_llama3(divisors, base, rotated)
    if found or kind == "longrope":
        named = f"by {' and '.join(sorted(found))}" if found else "without a tensor of factors"
        raise refused(f"this GGUF file scales its rope as '{kind}' {named}, which is not supported")
    if kind == "none":
        return {"rope_type": "default"}
    scaled: dict[str, Any] = {"rope_type": kind, "factor": _scaling_factor(settings)}
    if kind == "yarn":
        scaled["original_max_position_embeddings"] = original
        for name in ("beta_fast", "beta_slow"):
            if (key := f"rope.scaling.yarn_{name}") in settings:
                scaled[name] = settings.number(key)
    return scaled


def _check_attention(settings: Settings, factor: float) -> None:
    """Refuses another factor of cosine and sine than the one that follows from YaRN's; without YaRN it is 1.

    Files have it under either name, or not at all; under the first one 1 says nothing of it.
    """
    usual = 0.1 * math.log(factor) + 1
    for name, other in (("rope.scaling.attn_factor", 1.0), ("rope.scaling.yarn_attn_factor", usual)):
        given = settings.number(name, usual)
        if not any(math.isclose(given, each, rel_tol=_YARN_ROUNDING) for each in (usual, other)):
            raise refused(
                f"this GGUF file scales its rope by {settings.key(name)} = {given:g}, which is not supported: by its "
                f"other settings it is {usual:g}"
            )


def _scaling_type(settings: Settings) -> str:
    """How the rope is scaled: ``none``, ``linear``, ``yarn`` or ``longrope``."""
    kind = settings.get("rope.scaling.type")
    if kind is None:  # a factor alone stretches positions evenly
        return "linear" if _scaling_factor(settings) != 1.0 else "none"
    if not isinstance(kind, str) or kind not in ("none", "linear", "yarn", "longrope"):
        raise refused(f"this GGUF file scales its rope as '{str(kind)[:40]}', which is not supported")
    return "none" if kind == "linear" and _scaling_factor(settings) == 1.0 else kind


def _scaling_factor(settings: Settings) -> float:
    """How often longer sequences become; the second name is that of old files."""
    factor = settings.number("rope.scaling.factor", settings.number("rope.scale_linear", 1.0)) or 1.0
    if factor < 1:
        raise refused(f"this GGUF file has {settings.key('rope.scaling.factor')} = {factor:g}, less than 1")
    return factor


def _factors(tensor: GgufTensor, rotated: int) -> Factors:
    if tensor.type != "F32" or math.prod(tensor.shape) != rotated // 2:
        raise refused(f"the tensor {tensor.name} of this GGUF file is no list of {rotated // 2} float32 numbers")
    factors = tensor.data().view(np.float32).astype(np.float64)
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise refused(f"the tensor {tensor.name} of this GGUF file has entries that are not above zero")
    return factors


def _longrope_attention(scale: float, original: int, given: float) -> dict[str, float]:
    """The factor of cosine and sine, where it is not the one that transformers computes."""
    usual = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 and original > 1 else 1.0
    return {} if math.isclose(usual, given, rel_tol=1e-6) else {"attention_factor": given}


def _read_proportional(factors: Factors) -> dict[str, Any] | None:
    """The rope of heads whose last entries do not turn, as their factors are without end; ``None`` for another one."""
    turned = int((factors == 1).sum())
    if turned in (0, len(factors)) or (factors[:turned] != 1).any() or (factors[turned:] < _ENDLESS).any():
        return None
    return {"rope_type": "proportional", "partial_rotary_factor": turned / len(factors)}


def _decimal(value: np.float64) -> float:
    return float(str(np.float32(value)))


def _read_llama3(factors: Factors, base: float, rotated: int) -> dict[str, Any]:
    """Finds the numbers of which a converter has computed the factors; only the factors are in the file."""
    if np.allclose(factors, 1, rtol=_ROUNDING, atol=0):
        return {"rope_type": "default"}
    turns = base ** -(np.arange(0, rotated, 2) / rotated) / (2 * math.pi)
    with np.errstate(all="ignore"):  # numbers that fit nothing may divide by zero
        for numbers in _llama3_candidates(factors, turns):
            if np.allclose(_llama3_factors(turns, **numbers), factors, rtol=_ROUNDING, atol=0):
                return {"rope_type": "llama3", **numbers}
    raise refused(f"the factors of the rope in {_DIVISORS} of this GGUF file are not those of Llama 3.1 or later")


def _llama3_candidates(factors: Factors, turns: Factors) -> Iterator[dict[str, Any]]:
    factor = float(f"{factors.max():.6g}")
    for length in (_LLAMA3_LENGTH, *(2**power for power in range(5, 21))):
        for bounds in (_LLAMA3_BOUNDS, _LLAMA4_BOUNDS):
            yield {"factor": factor, **bounds, "original_max_position_embeddings": length}
    between = (factors > 1 + _ROUNDING) & (factors < factor * (1 - _ROUNDING))
    if between.sum() >= 2:  # there the inverse of a factor grows linearly with the turns that one position makes
        smooth = (1 / factors[between] - 1 / factor) / (1 - 1 / factor)
        slope, start = np.polyfit(turns[between], smooth, 1)
        bounds = {"low_freq_factor": -start / slope, "high_freq_factor": (1 - start) / slope}
        scaled = {name: float(bound * _LLAMA3_LENGTH) for name, bound in bounds.items()}
        yield {"factor": factor, **scaled, "original_max_position_embeddings": _LLAMA3_LENGTH}


def _llama3_factors(
    turns: Factors,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: int,
) -> Factors:
    """What frequencies of ``turns`` turns a position are divided by."""
    cycles = original_max_position_embeddings * turns
    smooth = np.clip((cycles - low_freq_factor) / (high_freq_factor - low_freq_factor), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)
