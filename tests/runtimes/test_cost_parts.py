"""Latency profiles: what they say of a forward, and what measuring them takes for what."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from helpers.models import LAYERS, SUBLAYERS, build
from selfspec import timing
from selfspec.model.forward import Forward
from selfspec.model.kept import KeptSet
from selfspec.runtimes.costs.parts import LatencyProfile, PartSeconds, SharedCache, measure_latencies
from selfspec.runtimes.target import Target

PROFILE = LatencyProfile(
    device="cpu",
    dtype="float32",
    layers=LAYERS,
    attention_per_token=0.5,
    attention_base=2.0,
    mlp=3.0,
    head=7.0,
    embedding=1.0,
)


def test_steps_by_hand() -> None:
    kept = KeptSet((0, 1, 2, 5, 7, 10, 11), SUBLAYERS)  # three attention branches, four MLPs
    assert PROFILE.attention(4) == 4.0
    assert PROFILE.draft_step(kept, 4, with_head=False) == 3 * 4.0 + 4 * 3.0
    assert PROFILE.draft_step(kept, 4) == 3 * 4.0 + 4 * 3.0 + 8.0
    assert PROFILE.target_step(10, with_head=False) == LAYERS * (7.0 + 3.0)
    assert PROFILE.target_step(10) == LAYERS * (7.0 + 3.0) + 8.0


def test_a_profile_survives_json() -> None:
    assert LatencyProfile.from_dict(json.loads(json.dumps(PROFILE.to_dict()))) == PROFILE


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mlp": -1.0}, "mlp must be seconds, not -1.0"),
        ({"mlp": 0.0}, "above 0"),
        ({"attention_base": 0.0}, "above 0"),
        ({"head": float("nan")}, "head must be seconds"),
        ({"embedding": float("inf")}, "embedding must be seconds"),
        ({"attention_per_token": "fast"}, "attention_per_token must be seconds"),
        ({"mlp": True}, "mlp must be seconds"),
        ({"layers": 0}, "layers must be a whole number"),
        ({"layers": 2.0}, "layers must be a whole number"),
        ({"device": None}, "device must be text"),
        ({"extra": 1}, "has the fields"),
    ],
)
def test_damaged_profiles_are_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        LatencyProfile.from_dict({**PROFILE.to_dict(), **change})


def test_a_profile_with_a_field_missing_is_refused() -> None:
    values = PROFILE.to_dict()
    del values["head"]
    with pytest.raises(ValueError, match="has the fields"):
        LatencyProfile.from_dict(values)


def line(contexts: list[int], seconds: list[float]) -> tuple[float, float]:
    """Slope and base of what was measured at some contexts."""
    return PartSeconds(tuple(contexts), tuple(seconds), mlp=1.0, head=1.0, embedding=1.0).attention_line


def test_the_line_is_that_of_least_squares() -> None:
    contexts = [10, 50, 200, 1000]
    seconds = [3.0, 4.5, 7.0, 31.0]
    slope, base = np.polyfit(contexts, seconds, 1)
    assert line(contexts, seconds) == pytest.approx((slope, base))


@pytest.mark.parametrize(("contexts", "seconds"), [([1, 2, 3], [3.0, 2.0, 1.0]), ([5], [2.0])])
def test_attention_never_gets_cheaper_with_the_context(contexts: list[int], seconds: list[float]) -> None:
    slope, base = line(contexts, seconds)
    assert slope == 0.0
    assert base == pytest.approx(seconds[-1])


def test_an_intercept_stays_above_nothing() -> None:
    slope, base = line([1, 2, 3], [0.0, 2.0, 4.0])
    assert slope == 2.0
    assert 0 < base < 1e-6


def test_a_disturbed_short_context_does_not_flatten_the_line() -> None:
    undisturbed = PartSeconds((10, 20, 30), (2.0, 3.0, 4.0), mlp=1.0, head=1.0, embedding=1.0)
    assert undisturbed.attention_line == pytest.approx((0.1, 1.0))
    disturbed = PartSeconds((10, 20, 30), (9.0, 3.0, 4.0), mlp=1.0, head=1.0, embedding=1.0)
    assert disturbed.attention_line == pytest.approx(np.polyfit([10, 20, 30], [3.0, 3.0, 4.0], 1))
    assert disturbed.attention == (9.0, 3.0, 4.0)  # what was measured stays what it was


class SlowTarget(Target):
    """A target on a clock of its own: every part takes a known time once, and longer whenever else it runs."""

    def __init__(self) -> None:
        super().__init__(build("llama"))
        self.now = 0.0
        self.seen: dict[str, int] = {}

    def spend(self, part: str, seconds: float) -> None:
        self.seen[part] = self.seen.get(part, 0) + 1
        # Unused before at first, and then disturbed by something else all the time but once.
        self.now += seconds if self.seen[part] == 4 else seconds + 1000.0 / self.seen[part]

    def embed(self, token_ids: torch.Tensor, forward: Forward | None = None) -> torch.Tensor:
        self.spend("embed", 0.25)
        return super().embed(token_ids, forward)

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        self.spend("head", 4.0)
        return super().logits(hidden_states)

    def run(self, hidden_states: torch.Tensor, sublayers: Any, step: Any, capture: Any = ()) -> Any:
        for index in sublayers:
            kind = "mlp" if index % 2 else f"attention at {step.parts[0].start}"
            layer = 1 + index // 2  # layers differ; the profile is their mean
            self.spend(f"{kind} of {index}", layer * (3.0 if index % 2 else 2.0 + 0.125 * step.parts[0].start))
        return super().run(hidden_states, sublayers, step, capture)


def test_measuring_finds_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    target = SlowTarget()
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: target.now))
    profile = measure_latencies(target, contexts=(8, 64, 400))
    mean_layer = sum(range(1, LAYERS + 1)) / LAYERS
    assert (profile.device, profile.dtype, profile.layers) == ("cpu", "float32", LAYERS)
    assert profile.attention_per_token == pytest.approx(0.125 * mean_layer)
    assert profile.attention_base == pytest.approx(2.0 * mean_layer)
    assert profile.mlp == pytest.approx(3.0 * mean_layer)
    assert profile.head == 4.0
    assert profile.embedding == 0.25
    assert profile.attention(5000) == pytest.approx((2.0 + 0.125 * 5000) * mean_layer)


@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3-longrope", "mixtral-window", "llama-eager"])
def test_measuring_on_the_real_clock(name: str) -> None:
    target = Target(build(name))
    before = {key: value.clone() for key, value in build(name).state_dict().items()}
    profile = measure_latencies(target, repeats=2)
    assert profile.fits(target)
    assert profile.mlp > 0
    assert profile.head > 0
    assert profile.embedding > 0
    assert 0 < profile.attention(1) <= profile.attention(2000)
    assert all(torch.equal(before[key], value) for key, value in build(name).state_dict().items())


def test_layers_share_the_scratch_memory() -> None:
    target = Target(build("llama"))
    cache = SharedCache(target.new_sequence(1, 1, 1).cache, slots=100)
    assert (len(cache.keys), len(set(cache.addresses)), cache.capacity) == (LAYERS, 2, 100)
    row = torch.full((1, 2, 1, 24), 7.0)
    cache.write(LAYERS - 1, 5, row, row)
    keys, values = cache.seen(LAYERS - 1, 5, 1)
    assert torch.equal(keys, row)
    assert torch.equal(values, row)
