"""The recorder for CUDA, as far as a CPU shows it, and the one that tests play it with."""

from typing import Any
from unittest import mock

import pytest
import torch

from helpers.recorder import StrictRecorder
from selfspec.runtimes.recorder import CudaRecorder, capturing


def test_the_strict_recorder_is_strict() -> None:
    """It notices what a CUDA graph would get wrong: numbers of the host, branches on them, memory given back."""
    counter = iter(range(10))
    stream = torch.zeros(3)
    replay = StrictRecorder().record(lambda: stream.fill_(next(counter)))
    replay()
    assert stream.tolist() == [1, 1, 1], "the number was looked up anew"
    with pytest.raises(RuntimeError, match="cannot be captured"):
        StrictRecorder().record(lambda: stream.fill_(stream.sum().item()))
    held = [torch.ones(3)]
    replay = StrictRecorder().record(lambda: stream.copy_(held[0] * 2))
    replay()
    assert stream.tolist() == [2, 2, 2]
    held.clear()
    with pytest.raises(AssertionError, match="given back"):
        replay()


class FakeGraph:
    """Stands in for ``torch.cuda.CUDAGraph``; its capture ends with an error of its own if something failed in it."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        self._log.append(f"begin in {pool}, {capture_error_mode}")

    def capture_end(self) -> None:
        self._log.append("end")
        if "failed" in self._log:
            raise RuntimeError("the capture was invalidated")

    def replay(self) -> None:
        self._log.append("replay")


@pytest.mark.parametrize("fails", [False, True])
def test_a_capture_is_warmed_up_and_always_ended(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a CPU can show of the recorder for CUDA; the rest is in ``test_gpu.py``."""
    log: list[str] = []
    stream: Any = mock.MagicMock()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: FakeGraph(log))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "the pool")
    for name in ("Stream", "current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, stream)

    def function() -> None:
        log.append("failed" if fails and len(log) > 1 else "run")
        if log[-1] == "failed":
            raise RuntimeError("the reason")

    recorder = CudaRecorder(torch.device("cuda"))
    if fails:
        with pytest.raises(RuntimeError, match="invalidated") as caught:
            recorder.record(function)
        assert str(caught.value.__context__) == "the reason"
    else:
        recorder.record(function)()
    middle = ["failed", "end"] if fails else ["run", "end", "replay"]
    assert log == ["run", "begin in the pool, thread_local", *middle]
    assert not capturing.locked()
