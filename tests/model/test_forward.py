"""A forward of several parts: order, places of the rows, and rotations that are each part's own."""

import pytest
import torch

from helpers.models import ROPE_SWITCH, VARIANTS, build
from selfspec.model.forward import Forward
from selfspec.runtimes.target import Target

ROPES = ["llama", "llama-llama3-rope", "llama-yarn-rope", "llama-dynamic-rope", "phi3", "phi3-longrope", "gemma3"]


def forwards_of(target: Target) -> list[Forward]:
    """Rows of sequences of different lengths: a chain, a tree, one row, and a second part of the first sequence."""
    lengths = (20, ROPE_SWITCH + 30, 5)
    states = [target.new_sequence(length, capacity=length + 10, last_length=length + 6) for length in lengths]
    for state, length in zip(states, lengths, strict=True):
        state.cache.length = length
    return [
        target.lay_out(states[0], 3),
        target.lay_out(states[1], 4, depths=[0, 1, 1, 2], visible=torch.ones(4, 4, dtype=torch.bool)),
        target.lay_out(states[2], 1),
        target.lay_out(states[0], 2, start=23, prefix=18),
    ]


def test_parts_keep_their_order_and_their_rows() -> None:
    forwards = forwards_of(Target(build("llama")))
    joined = Forward.join([Forward.join(forwards[:2]), *forwards[2:]])
    assert list(joined.parts) == [forward.parts[0] for forward in forwards]
    assert joined.rows == 10
    assert joined.slices == (slice(0, 3), slice(3, 7), slice(7, 8), slice(8, 10))
    first, second = ROPE_SWITCH + 30, ROPE_SWITCH + 31
    assert joined.positions.tolist() == [20, 21, 22, first, second, second, second + 1, 5, 18, 19]
    some = joined.only([1, 3])
    assert some.parts == (joined.parts[1], joined.parts[3])
    assert some.slices == (slice(0, 4), slice(4, 6))


def test_a_forward_joined_with_nothing_is_itself() -> None:
    forward = forwards_of(Target(build("llama")))[0]
    assert Forward.join([forward]) is forward


@pytest.mark.parametrize("name", ROPES)
def test_rotations_are_those_of_each_part(name: str) -> None:
    """Bit for bit, also where the frequencies depend on the sequence's length."""
    target = Target(build(name))
    forwards = forwards_of(target)
    joined = Forward.join(forwards)
    kinds = target.config.layer_types if VARIANTS[name]().model_type == "gemma3_text" else [None]
    for kind in set(kinds):
        for index in range(2):  # cosine and sine
            alone = torch.cat([forward.turn(kind)[index] for forward in forwards])
            assert torch.equal(joined.turn(kind)[index], alone)
            alone = torch.cat([forward.rotation(kind)[index] for forward in forwards], dim=1)
            assert torch.equal(joined.rotation(kind)[index], alone)
            assert alone.shape[1] == 10
