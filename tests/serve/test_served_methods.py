"""Methods that requests may name: what they make at the start is within the memory limit, and nothing comes later."""

from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient

from helpers.checkpoints import make_tokenizer
from helpers.low_bit_model import random_model
from helpers.serving import make_client
from selfspec import AsyncEngine
from selfspec.engine import Engine
from selfspec.errors import OutOfMemoryError, UnsupportedModelError
from selfspec.methods import make_method
from selfspec.runtimes.low_bit import LowBitWeights, low_bit_within
from selfspec.runtimes.precision import Precision
from selfspec.runtimes.target import Target
from selfspec.serve.served_engine import ServedEngine

FOUR, EIGHT = Precision.of(4), Precision.of(8)


def make_engine(method: str = "suffix", **options: Any) -> Engine:
    return Engine(random_model(torch.bfloat16), make_tokenizer(), method, **options)


@pytest.fixture(scope="module")
def weights() -> int:
    """Bytes of the low-bit weights that draft; skips where there are none."""
    target = Target(random_model(torch.bfloat16))
    try:
        return target.low_bit_bytes(make_method("low-bit", target).draft_precision)
    except UnsupportedModelError as error:
        pytest.skip(str(error))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collects the bytes of weights when they are made."""
    found: list[int] = []
    make = LowBitWeights._make

    def noted(self: LowBitWeights, parts: Any) -> None:
        found.append(sum(self._bytes(*part) for part in parts))
        make(self, parts)

    monkeypatch.setattr(LowBitWeights, "_make", noted)
    return found


def test_low_bit_weights_are_taken_from_the_memory_limit(weights: int, made: list[int]) -> None:
    limit = 4 * weights
    served = AsyncEngine(make_engine(memory_limit=limit), methods=["low-bit", "prompt-lookup"])
    assert sum(made) == weights
    assert served.memory_limit == served.stats().cache_limit == limit - weights
    assert served.stats().prefix_cache.limit == (limit - weights) // 2


def test_low_bit_weights_that_exceed_the_limit_are_refused_before_they_are_made(weights: int, made: list[int]) -> None:
    with pytest.raises(OutOfMemoryError, match=r"the method 'low-bit': .* left of the memory limit; raise it, or"):
        AsyncEngine(make_engine(memory_limit=weights), methods=["low-bit"])
    assert not made


def test_a_server_ends_with_what_exceeds_its_limit(weights: int, made: list[int]) -> None:
    engine = make_engine(memory_limit=weights)
    with make_client(ServedEngine(lambda: engine, methods=["low-bit"])) as client:
        assert "left of the memory limit" in str(client.service.failure)
    assert not made


def complete(client: TestClient, method: str) -> Any:
    body = {"prompt": "abcabcabc", "temperature": 0, "max_tokens": 20, "speculative": {"method": method}}
    return client.post("/v1/completions", json=body)


def test_no_request_makes_low_bit_weights(weights: int, made: list[int]) -> None:
    """Neither of a method that is served, whose weights are there, nor of one that is not."""
    engine = make_engine(memory_limit=2 * weights)
    with make_client(ServedEngine(lambda: engine, methods=["low-bit"])) as client:
        count = len(made)
        assert complete(client, "low-bit").status_code == 200
        assert complete(client, "self-spec").status_code == 400
    with make_client(ServedEngine(lambda: engine)) as client:
        refused = complete(client, "low-bit").json()["error"]
        assert (refused["param"], "--methods" in refused["message"]) == ("speculative.method", True)
    assert len(made) == count


def test_a_trial_drops_what_it_has_made_alone(weights: int) -> None:
    """Else the first request of another method would make its weights again, while all others wait."""
    target = Target(random_model(torch.bfloat16))
    target.at(FOUR)
    with low_bit_within(10 * weights) as within:
        target.at(EIGHT)
        assert within.bytes == target.low_bit_bytes(EIGHT)
        target.release_low_bit()
        assert within.bytes == 0
    runner = target.at(FOUR)
    with low_bit_within(0):
        assert target.at(FOUR) is runner, "it is still there"
        with pytest.raises(OutOfMemoryError):
            target.at(EIGHT)
    target.release_low_bit()
    with low_bit_within(0), pytest.raises(OutOfMemoryError):
        target.at(FOUR)


def test_a_method_that_is_the_engines_own_keeps_what_it_has_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()

    def fail(*_: object) -> None:
        raise AssertionError("it was prepared again")

    monkeypatch.setattr(engine.method, "prepare", fail)
    served = AsyncEngine(engine, methods=["suffix"])
    assert served.prepare([1, 2], method="suffix").method is engine.method
