"""The level of instructions that a trial chooses for a process: once, among levels that are there, and kept."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from helpers.gguf_cases import built
from helpers.gguf_families import save_family
from helpers.kernels import found_again, needs_kernels
from helpers.low_bit_model import random_model
from selfspec import Engine
from selfspec.loading import gguf_model
from selfspec.model.observed import ObservedDecoder
from selfspec.runtimes import kept_file, kernel_build, kernels, levels, reading
from selfspec.runtimes.levels import LevelChoice
from selfspec.runtimes.products import Product
from selfspec.runtimes.target import Target

pytestmark = needs_kernels

USABLE = [*reversed(kernel_build.usable_levels(kernel_build.machine(), kernel_build.processor_features()))]
BUILT = [each.name for each in USABLE[:2]]
needs_two = pytest.mark.skipif(len(BUILT) < 2, reason="this processor has one level alone")


@pytest.fixture(scope="module", autouse=True)
def two_levels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The kernels of the two highest levels are there; a level that was not built is a copy of the highest."""
    found = {level.name: kernels._find_library(level) for level in USABLE}
    highest, origin = found[BUILT[0]]
    for name in BUILT[1:]:
        if not found[name][0].exists():
            found[name] = tmp_path_factory.mktemp("kernels") / highest.name, origin
            shutil.copy(highest, found[name][0])
    absent = tmp_path_factory.mktemp("none") / "absent.so", origin
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_find_library", lambda level: found[level.name] if level.name in BUILT else absent)
        yield


@pytest.fixture(autouse=True)
def another_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """As if nothing had been chosen, of any model, with a cache folder of its own for choices."""
    monkeypatch.delenv(kernel_build.LEVEL_VARIABLE, raising=False)
    monkeypatch.setattr(levels, "_settled", [])
    monkeypatch.setattr(kernel_build, "_preferred", [])
    monkeypatch.setattr(kept_file, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(reading, "_SMALLEST", 0)
    with found_again():
        yield


def find_speeds(monkeypatch: pytest.MonkeyPatch, *speeds: float) -> list[Sequence[str]]:
    """Makes a trial find these speeds, and gives the levels of each trial."""
    trials: list[Sequence[str]] = []

    def measure(sample: Sequence[Product], candidates: Sequence[Any], threads: int) -> dict[str, float]:
        trials.append([each.level for each in candidates])
        return dict(zip(trials[-1], (*speeds, *[0.1] * len(candidates)), strict=False))

    monkeypatch.setattr(levels, "measure_levels", measure)
    return trials


@needs_two
def test_a_process_runs_the_level_that_is_fastest_and_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = find_speeds(monkeypatch, 1.0, 1.3)
    first = Target(random_model(torch.bfloat16))
    assert first.level == LevelChoice(BUILT[1], dict(zip(BUILT, (1.0, 1.3, 0.1, 0.1), strict=False)))
    assert str(first.level).startswith(f"{BUILT[0]} (1.00), {BUILT[1]} (1.30)")
    assert kernels.find().level == kernel_build.choose_level().name == BUILT[1]
    find_speeds(monkeypatch, 1.0, 0.2)
    other = Target(random_model(torch.bfloat16))
    assert other.level is first.level
    assert kernels.find().level == BUILT[1]
    assert len(trials) == 1


@needs_two
def test_the_text_is_that_of_the_chosen_level(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = torch.arange(1, 40) % 128
    find_speeds(monkeypatch, 1.0, 1.3)
    plain, suffix = (
        Engine(random_model(torch.bfloat16), method=method, runtime="compiled").generate(prompt, max_new_tokens=24)
        for method in ("autoregressive", "low-bit")
    )
    assert suffix.token_ids == plain.token_ids
    assert suffix.drafted > 0
    monkeypatch.setenv(kernel_build.LEVEL_VARIABLE, BUILT[1])
    kernels.find.cache_clear()
    named = Engine(random_model(torch.bfloat16), method="autoregressive", runtime="compiled")
    assert named.generate(prompt, max_new_tokens=24).token_ids == plain.token_ids


@needs_two
@pytest.mark.parametrize(("speed", "chosen"), [(1.05, 0), (1.2, 1)])
def test_a_small_gain_keeps_the_highest(speed: float, chosen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    find_speeds(monkeypatch, 1.0, speed)
    found = levels.settle_level(random_model())
    assert found is not None
    assert found.level == kernels.find().level == BUILT[chosen]


@needs_two
def test_a_choice_is_kept_for_other_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trials = find_speeds(monkeypatch, 1.0, 1.3)
    first = levels.settle_level(random_model())
    levels._settled.clear()
    assert levels.settle_level(random_model()) == first
    assert len(trials) == 1
    (kept,) = (tmp_path / "levels").iterdir()
    content = json.loads(kept.read_text())
    others = [json.dumps(content | {"kept": {"speeds": speeds}}) for speeds in ({"avx9": 2.0}, [1.0])]
    for damaged in ("", "{}", *others):
        kept.write_text(damaged)
        levels._settled.clear()
        assert levels.settle_level(random_model()) == first
    assert len(trials) == 5


@needs_two
def test_a_model_of_transformers_modules_chooses_by_its_weights_of_few_bits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trials = find_speeds(monkeypatch, 1.0, 1.3)
    assert Target(built("lfm2")).level is None, "kernels multiply nothing of it"
    assert not trials
    monkeypatch.setattr(gguf_model, "read_tokenizer", lambda _: None)
    path = save_family(built("lfm2"), tmp_path / "model.gguf", quantised=GGMLQuantizationType.Q8_0)
    target = Target(gguf_model.read_gguf(path, torch.bfloat16, packed=True)[0])
    assert isinstance(target.decoder, ObservedDecoder)
    assert target.level is not None
    assert len(trials) == 1
    assert kernels.find().level == BUILT[1]


def test_without_a_choice_it_is_the_highest_or_the_named_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "measure_levels", lambda *_: pytest.fail("tried"))
    monkeypatch.setattr(reading, "_SMALLEST", 1 << 40)
    assert levels.settle_level(random_model()) is None
    assert kernels.find().level == BUILT[0]
    levels._settled.clear()
    monkeypatch.setattr(reading, "_SMALLEST", 0)
    monkeypatch.setenv(kernel_build.LEVEL_VARIABLE, BUILT[0])
    assert levels.settle_level(random_model()) is None
    assert Target(random_model(), "eager").level is None


def test_without_time_for_a_trial_it_is_the_highest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "measure_levels", lambda *_: None)
    assert levels.settle_level(random_model()) is None
    assert kernels.find().level == BUILT[0]


def simulate(monkeypatch: pytest.MonkeyPatch, seconds: Mapping[str, float]) -> Any:
    """A clock that each product moves by what its level takes, for prompts ten times as much."""
    now = [0.0]

    def measure(own: Any, products: Any, rows: int, threads: int, clock: Any) -> float:
        took = seconds[own.level] * (10 if rows > 6 else 1)
        now[0] += took
        return took

    monkeypatch.setattr(levels, "product_seconds", measure)
    return lambda: now[0]


@needs_two
def test_speeds_are_those_beside_the_highest(monkeypatch: pytest.MonkeyPatch) -> None:
    candidates, model = kernels.find_all()[:2], random_model(torch.bfloat16)
    sample = reading.take_sample(levels.find_products(model))
    clock = simulate(monkeypatch, dict(zip(BUILT, (0.0002, 0.0001), strict=False)))
    assert levels.measure_levels(sample, candidates, 1, clock) == pytest.approx(dict(zip(BUILT, (1, 2), strict=False)))
    assert clock() < 1
    clock = simulate(monkeypatch, dict(zip(BUILT, (0.02, 0.01), strict=False)))
    assert levels.measure_levels(sample, candidates, 1, clock) is None
    assert clock() < 1


@needs_two
def test_a_trial_leaves_the_ways_of_reading_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    candidates, model = kernels.find_all()[:2], random_model(torch.bfloat16)
    monkeypatch.setattr(levels, "_SECONDS", 60.0)
    before = [reading.default_ways(torch.bfloat16, each) for each in candidates]
    sample = reading.take_sample(levels.find_products(model))
    speeds = levels.measure_levels(sample, candidates, 1)
    assert speeds is not None
    assert speeds[BUILT[0]] == 1
    assert all(speed > 0 for speed in speeds.values())
    reading._defaults.clear()
    assert [reading.default_ways(torch.bfloat16, each) for each in candidates] == before
