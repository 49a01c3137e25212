"""Gumbel noise that depends only on (seed, position, token), so that draft and target share it.

The Gumbel-max trick: ``argmax(log p + G)`` with independent Gumbel noise ``G`` is a draw from ``p``. If draft and
target use the same ``G`` at the same position, they draw the same token where their distributions agree, and the
target's draw does not depend on the draft.

The numbers come from splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators") used as a
counter-based generator: each position has a key that starts a stream, and token ``t`` takes number ``t + 1`` of it.
"""

from functools import lru_cache

import torch

GAMMA = 0x9E3779B97F4A7C15
"""Increment of splitmix64: 2^64 divided by the golden ratio, rounded to an odd number."""
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)
MASK = (1 << 64) - 1


def gumbel_noise(seed: int, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise for every token of the vocabulary at each position.

    The underlying 64-bit numbers come from integer arithmetic. They are the same on every device, for any grouping of
    the positions and for any padding of the vocabulary. Only the two logarithms (float64, rounded to float32) may
    differ between devices, by at most one float32 rounding. Does not synchronise with the device.

    Args:
        seed: any integer.
        positions: long ``[n]``, the absolute position of the token to choose.
        vocab_size: number of tokens ``V``.

    Returns:
        float32 ``[n, V]``, finite, on the device of ``positions``.
    """
    # On a CPU one position at a time: its numbers stay in the cache, which is several times as fast.
    parts = positions[:, None].unbind() if positions.device.type == "cpu" else (positions,)
    rows = [uniforms(seed, part, vocab_size).log_().neg_().log_().neg_().float() for part in parts]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def uniforms(seed: int, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The uniform numbers of ``gumbel_noise``: float64 ``[n, V]``, odd multiples of 2^-53, inside (0, 1)."""
    keys = _mix_((positions + 1).mul_(_signed(GAMMA)).add_(_signed(seed_key(seed))))
    bits = _mix_(keys[:, None] + _counters(vocab_size, positions.device))
    # 52 bits plus one half: with 53 bits the largest value plus one half would round to 1.
    return _shift_right(bits, 12, bits).double().add_(0.5).mul_(2.0**-52)


@lru_cache(maxsize=8)
def _counters(vocab_size: int, device: torch.device) -> torch.Tensor:
    """What each token adds to the key of a position, long ``[V]``; not to be changed."""
    return torch.arange(1, vocab_size + 1, device=device).mul_(_signed(GAMMA))


def seed_key(seed: int) -> int:
    """Hashes any integer to an unsigned 64-bit key; an integer beyond 64 bits is hashed word by word."""
    words = seed.bit_length() // 64 + 1
    data = seed.to_bytes(8 * words, "little", signed=True)
    key = 0
    for start in range(0, len(data), 8):
        key = _mix_int((key + GAMMA + int.from_bytes(data[start : start + 8], "little")) & MASK)
    return key


def _mix_int(value: int) -> int:
    """The finaliser of splitmix64 on an unsigned Python integer."""
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS, strict=False):
        value = ((value ^ (value >> shift)) * multiplier) & MASK
    return value ^ (value >> SHIFTS[-1])


def _mix_(values: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64, in place. int64 arithmetic wraps around, so it is modulo 2^64."""
    shifted = torch.empty_like(values)
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS, strict=False):
        values.bitwise_xor_(_shift_right(values, shift, shifted)).mul_(_signed(multiplier))
    return values.bitwise_xor_(_shift_right(values, SHIFTS[-1], shifted))


def _shift_right(values: torch.Tensor, bits: int, out: torch.Tensor) -> torch.Tensor:
    """Logical right shift: torch shifts int64 arithmetically, so the mask clears the copies of the sign bit."""
    return torch.bitwise_right_shift(values, bits, out=out).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """The int64 with the same bits as an unsigned 64-bit integer."""
    return value - (1 << 64) if value >> 63 else value
