"""Rounds weights to Q4_K and Q6_K, which the package ``gguf`` reads and does not write; simple rather than good."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


def quantise_k(weights: Floats, kind: str) -> Bytes:
    """Blocks of 256 inputs of weights ``[..., inputs]`` as bytes ``[..., bytes]``."""
    blocks = weights.reshape(-1, 256).astype(np.float32)
    made = _q4_k(blocks) if kind == "Q4_K" else _q6_k(blocks)
    return made.reshape(*weights.shape[:-1], -1)


def _q4_k(blocks: Floats) -> Bytes:
    """A scale and a minimum of 6 bits for each 32 weights, integers of 4 bits."""
    groups = blocks.reshape(-1, 8, 32)
    least = np.minimum(groups.min(2), 0)
    scales = (groups.max(2) - least) / 15
    d, scale_codes = _six_bits(scales)
    least_d, least_codes = _six_bits(-least)
    steps, leasts = d * scale_codes, least_d * least_codes
    codes = (
        np.rint((groups + leasts[..., None]) / np.where(steps == 0, 1, steps)[..., None]).clip(0, 15).astype(np.uint8)
    )
    packed = np.zeros((len(blocks), 12), np.uint8)
    packed[:, :4] = scale_codes[:, :4] | (scale_codes[:, 4:] >> 4) << 6
    packed[:, 4:8] = least_codes[:, :4] | (least_codes[:, 4:] >> 4) << 6
    packed[:, 8:] = (scale_codes[:, 4:] & 15) | (least_codes[:, 4:] & 15) << 4
    pairs = codes.reshape(-1, 4, 2, 32)
    integers = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)
    return np.concatenate([_halves(d), _halves(least_d), packed, integers], 1)


def _q6_k(blocks: Floats) -> Bytes:
    """A scale of 8 bits for each 16 weights, integers of 6 bits."""
    groups = blocks.reshape(-1, 16, 16)
    scales = np.abs(groups).max(2) / 31
    d = np.float16(scales.max(1, keepdims=True) / 127).astype(np.float32)
    scale_codes = np.rint(scales / np.where(d == 0, 1, d)).clip(0, 127).astype(np.int8)
    steps = d * scale_codes
    codes = np.rint(groups / np.where(steps == 0, 1, steps)[..., None]).clip(-32, 31) + 32
    one, two, three, four = np.moveaxis(codes.astype(np.uint8).reshape(-1, 2, 4, 32), 2, 0)
    low = np.concatenate([(one & 15) | (three & 15) << 4, (two & 15) | (four & 15) << 4], 2).reshape(-1, 128)
    high = (one >> 4 | (two >> 4) << 2 | (three >> 4) << 4 | (four >> 4) << 6).reshape(-1, 64)
    return np.concatenate([low, high, scale_codes.view(np.uint8), _halves(d)], 1)


def _six_bits(values: Floats) -> tuple[Floats, Bytes]:
    """Numbers of 6 bits, and what they are multiplied by, as float16 holds it."""
    d = np.float16(values.max(1, keepdims=True) / 63).astype(np.float32)
    return d, np.rint(values / np.where(d == 0, 1, d)).clip(0, 63).astype(np.uint8)


def _halves(values: Floats) -> Bytes:
    return np.ascontiguousarray(values, np.float16).view(np.uint8)
