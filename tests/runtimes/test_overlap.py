"""Tasks that run as native forwards begin."""

import threading
from collections.abc import Callable

import pytest
import torch

from helpers.kernels import needs_kernels
from helpers.low_bit_model import random_model
from selfspec.runtimes.target import Target
from selfspec.runtimes.threads import overlapped, start_overlapped


def test_a_task_runs_once_before_the_first_forward_or_at_the_end() -> None:
    ran: list[str] = []
    with overlapped(lambda: ran.append("task")):
        ran.append("before")
        start_overlapped()
        start_overlapped()
        ran.append("after")
    with overlapped(lambda: ran.append("last")):
        ran.append("no forward")
    start_overlapped()
    assert ran == ["before", "task", "after", "no forward", "last"]


def test_an_error_does_not_keep_a_task_from_running() -> None:
    ran: list[int] = []
    with pytest.raises(ValueError, match="mine"), overlapped(lambda: ran.append(1)):
        raise ValueError("mine")
    assert ran == [1]


def test_a_task_waits_for_its_own_thread() -> None:
    ran: list[str] = []
    with overlapped(lambda: ran.append("task")):
        other = threading.Thread(target=start_overlapped)
        other.start()
        other.join()
        ran.append("first")
    assert ran == ["first", "task"]


@needs_kernels
@torch.inference_mode()
def test_native_forwards_begin_what_waits() -> None:
    target = Target(random_model(torch.float32))
    sequence = target.new_sequence(8, 8, 8)

    def ran_in(forward: Callable[[], object]) -> bool:
        ran: list[int] = []
        with overlapped(lambda: ran.append(1)):
            forward()
            return bool(ran)

    tokens = torch.tensor([1, 2])
    everything = range(target.sublayer_count)
    assert ran_in(lambda: target.run(target.embed(tokens), everything, target.lay_out(sequence, 2), logits=True))
    assert not ran_in(lambda: target.embed(tokens))
