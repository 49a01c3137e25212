"""The trial of an accelerator, on a CPU that plays one: what is wrong is never chosen, what fails never raises."""

import copy
import dataclasses
import json
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import devices
from helpers.clock import HandClock
from helpers.devices import AMPLE, FAULTS, REFERENCE, SMALL, failing, faulty, random_fault, reasons, slow, small
from helpers.kernels import has_kernels
from helpers.low_bit_model import random_model
from helpers.models import build, prompt
from selfspec import Engine
from selfspec.errors import (
    DeviceError,
    DeviceMemoryWarning,
    NoLowBitWeightsWarning,
    UnsupportedModelError,
)
from selfspec.loading import load_model
from selfspec.methods.auto import preparation
from selfspec.methods.auto.preparation import AutoSettings
from selfspec.methods.auto.preparation import candidates as drafts
from selfspec.model.decoder import Decoder
from selfspec.model.observed import take_apart
from selfspec.runtimes import comparison, device_trial, trial_store
from selfspec.runtimes import target as target_module
from selfspec.runtimes.candidates import CANDIDATES, Candidate, find_candidate
from selfspec.runtimes.comparison import Expected, difference, expect, random_stages, run_stages
from selfspec.runtimes.device_trial import BITS, BUDGET, Trial
from selfspec.runtimes.fused import FusedBlock
from selfspec.runtimes.kept_file import KeptFile
from selfspec.runtimes.logits import Logits
from selfspec.runtimes.low_bit import LowBitWeights, TorchLowBitProduct
from selfspec.runtimes.precision import Precision
from selfspec.runtimes.products import DenseProduct, Product
from selfspec.runtimes.runner import Runner, make_runner
from selfspec.runtimes.target import Target
from selfspec.runtimes.trial_table import DeviceTrial, Tried

FUSED, COMPILED = map(find_candidate, ("fused", "compiled"))
QUICK = (REFERENCE, FUSED)
EMPTY: dict[str, Any] = {"device": "x", "weights": {}, "seconds": 0, "free_bytes": None}


@pytest.fixture(autouse=True)
def _kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has_kernels()  # finds those of the user: in an empty cache folder they would be built again
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU is an accelerator, which has what torch has."""
    monkeypatch.setattr(target_module, "is_accelerator", lambda device: True)
    use(monkeypatch, QUICK)


def use(monkeypatch: pytest.MonkeyPatch, tried: Sequence[Candidate]) -> None:
    """These are the runtimes that there are."""
    monkeypatch.setattr(trial_store, "CANDIDATES", tuple(tried))


# What is compared.


@pytest.mark.parametrize("trials", [25, pytest.param(250, marks=pytest.mark.slow)])
def test_a_wrong_candidate_is_never_chosen(trials: int) -> None:
    """Each trial has its own random texts and four candidates, each with one of nine faults somewhere."""
    decoder = small()
    seen: set[str] = set()
    for seed in range(trials):
        wrong = [random_fault(4 * seed + place, 4) for place in range(4)]
        trial = Trial(decoder, (REFERENCE, *wrong), seed=seed, budget=AMPLE).run()
        assert trial.order == ["eager"]
        assert all(reason is not None and reason.startswith("in ") for _, reason in list(reasons(trial).items())[1:])
        seen |= {each.name.split()[0] for each in wrong}
    assert len(seen) == len(FAULTS)


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral-window", "phi3-longrope", "mixtral", "olmo2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_right_runtimes_pass(name: str, dtype: torch.dtype) -> None:
    decoder = take_apart(copy.deepcopy(build(name)).to(dtype))
    trial = Trial(decoder, (REFERENCE, FUSED, COMPILED), budget=AMPLE).run()
    assert reasons(trial) == {"eager": None, "fused": None, "compiled": None}
    assert all(set(each.seconds) == set(device_trial.ROWS) for each in trial.runtimes)


def test_texts_have_all_kinds_of_forwards_and_fit_their_slots() -> None:
    for seed in range(200):
        stages = random_stages(100, 8, 160, trees=True, seed=seed)
        assert {stage.kind for stage in stages} == {
            "a prompt", "a step", "a verification", "a tree", "a draft", "rows after a rollback", "two sequences"
        }  # fmt: skip
        assert max(stage.start + len(stage.token_ids) for stage in stages) <= 160
        assert all(max(stage.kept, default=0) < len(stage.token_ids) for stage in stages)
    rejected = [s for seed in range(50) for s in random_stages(100, 8, 1024, trees=True, seed=seed) if s.paths]
    assert any(len(stage.kept) < len(stage.token_ids) for stage in rejected)
    prompts = [random_stages(9, 2, 1024, trees=True, seed=seed)[0] for seed in range(50)]
    assert min(len(each.token_ids) for each in prompts) < 16
    assert max(len(each.token_ids) for each in prompts) > 256
    assert all(stage.paths is None for stage in random_stages(100, 8, 1024, trees=False, seed=0))


def test_logits_may_differ_by_rounding_and_tokens_by_ties() -> None:
    reference = torch.tensor([[1.0, 3.0, -4.0], [2.0, 0.0, 1.0]])
    assert difference(Logits(reference + 1e-4), Expected(Logits(reference))) is None
    assert "differ by" in str(
        difference(Logits(reference + torch.tensor([0.0, 0.0, 2e-2])), Expected(Logits(reference)))
    )
    assert "finite" in str(difference(Logits(reference / 0), Expected(Logits(reference))))
    assert "[1, 3]" in str(difference(Logits(reference[:1]), Expected(Logits(reference))))
    wrong_choice = Logits(reference, best=torch.tensor([1, 2]))
    assert "another token" in str(difference(wrong_choice, Expected(Logits(reference))))
    tie = torch.tensor([[3.0, 3.0 + 1e-6, 1.0]])
    assert difference(Logits(tie.flip(-1).flip(-1), best=torch.tensor([0])), Expected(Logits(tie))) is None
    rough = reference.bfloat16()
    assert difference(Logits(rough * 1.05), Expected(Logits(rough))) is None
    assert difference(Logits(rough * 1.2), Expected(Logits(rough))) is not None
    assert difference(Logits(rough * 1.2), Expected(Logits(rough), noise=0.1)) is None
    assert difference(Logits(rough * 1.6), Expected(Logits(rough), noise=0.9)) is not None


def test_a_model_that_carries_rounding_far_keeps_the_runtimes_that_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 the reference itself is as far from the numbers without rounding."""
    decoder = take_apart(random_model(torch.bfloat16, num_hidden_layers=12, initializer_range=0.3))
    stages = random_stages(128, 24, 256, trees=True, seed=0)
    expected = list(expect(REFERENCE.build(decoder), stages, 256))
    found = list(run_stages(COMPILED.build(decoder), stages, 256))
    assert [difference(*pair) for pair in zip(found, expected, strict=True)] == [None] * len(stages)
    monkeypatch.setattr(comparison, "_NOISES", 0.0)
    assert any("differ" in str(difference(*pair)) for pair in zip(found, expected, strict=True))


# What becomes of candidates.


def test_the_fastest_of_those_that_pass_is_chosen() -> None:
    """By a clock that the candidates move."""
    clock = HandClock()

    def taking(name: str, seconds: float) -> Candidate:
        def fault(before: torch.Tensor, stream: torch.Tensor, forward: Any) -> torch.Tensor:
            clock.now += seconds
            return stream

        return faulty(name, fault)

    tried = (taking("slow", 0.010), taking("fast", 0.001), taking("medium", 0.005))
    trial = Trial(small(), tried, clock=clock).run()
    assert trial.order == ["fast", "medium", "slow"]
    assert trial.chosen.seconds[1] == pytest.approx(0.001)
    assert trial.table()["fast"].endswith("(chosen)")


@pytest.mark.parametrize(("seconds", "first"), [(1.09, "exact"), (1.11, "other")])
def test_a_runtime_whose_rows_are_alone_may_take_a_tenth_longer(seconds: float, first: str) -> None:
    exact = Tried("exact", {1: seconds, 8: seconds}, is_exact=True)
    trial = DeviceTrial("a device", (Tried("eager", {1: 9.0}), Tried("other", {1: 1.0, 8: 1.0}), exact))
    assert trial.order[0] == first
    assert trial.table()[first].endswith("(chosen)" if first == "other" else "(chosen: with it drafts change no text)")
    assert DeviceTrial.from_dict(json.loads(json.dumps(trial.to_dict()))) == trial


def test_a_trial_finds_whose_rows_are_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runner, "independent_rows", property(lambda own: 16 * is_fused(own)))
    trial = Trial(small(), QUICK).run()
    assert {each.name: each.is_exact for each in trial.runtimes} == {"eager": False, "fused": True}


def is_fused(runner: Runner) -> bool:
    return isinstance(runner.sublayers[0], FusedBlock)


def test_what_fails_is_out_with_its_reason() -> None:
    tried = (
        REFERENCE,
        failing("no build", RuntimeError("capture failed")),
        failing("no forward", ValueError("no such kernel"), after=3),
        failing("no memory", torch.OutOfMemoryError("CUDA out of memory")),
        failing("no memory later", MemoryError(), after=20),
        failing("late", RuntimeError("a forward failed while it was timed"), after=40),
        Candidate("elsewhere", "", FUSED.build, devices=frozenset({"cuda"})),
        Candidate("lacking", "", FUSED.build, package="no_such_package"),
        FUSED,
    )
    trial = Trial(small(), tried, budget=AMPLE).run()
    found = reasons(trial)
    assert found["no build"] == "RuntimeError: capture failed"
    assert found["no forward"] == "ValueError: no such kernel"
    assert found["no memory"] == "out of memory: CUDA out of memory"
    assert found["late"] is not None
    assert found["elsewhere"] == "it runs on cuda alone"
    assert found["lacking"] == "the package no_such_package is not installed: pip install 'selfspec[no_such_package]'"
    assert trial.lacked_memory == ["no memory", "no memory later"]
    assert set(trial.order) == {"eager", "fused"}


def test_nothing_begins_after_the_time_of_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_trial, "PREPARING", 0.0)
    began = time.perf_counter()
    trial = Trial(small(), (REFERENCE, slow("slow", 0.3), FUSED), budget=0.4).run()
    assert time.perf_counter() - began < 5
    assert "time" in str(reasons(trial)["slow"])
    assert "time" in str(reasons(trial)["fused"])
    assert trial.order == ["eager"]
    assert BUDGET == 60


def test_compiling_does_not_count_up_to_a_limit() -> None:
    clock = HandClock()

    def compiling(name: str, seconds: float) -> Candidate:
        def build(decoder: Decoder) -> Any:
            clock.now += seconds
            return FUSED.build(decoder)

        return Candidate(name, "", build)

    tried = (REFERENCE, compiling("first", 50), compiling("second", 50), compiling("third", 50), FUSED)
    trial = Trial(small(), tried, clock=clock).run()
    assert trial.order[:1] != []
    assert [name for name, reason in reasons(trial).items() if reason is None] == ["eager", "first", "second"]
    assert all("time" in str(reasons(trial)[name]) for name in ("third", "fused"))


@pytest.mark.slow  # a time: beside other processes it may be longer
@pytest.mark.trained
def test_a_trial_takes_seconds_on_a_trained_checkpoint() -> None:
    """At most 5 s of the processor, compiled kernels aside."""
    model, _ = load_model("tiny", device="cpu")
    decoder = take_apart(model)
    make_runner(decoder, "compiled")
    trial = Trial(decoder, CANDIDATES, clock=time.process_time).run()
    assert {"eager", "fused", "compiled"} <= set(trial.order)
    assert all(each.passed for each in trial.weights.values())
    assert trial.seconds < 5


def test_a_device_that_a_candidate_broke_is_said_so_and_the_next_process_leaves_it_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken: list[int] = []
    zeros = torch.zeros

    def build(decoder: Decoder) -> Any:
        broken.append(1)
        raise RuntimeError("an illegal memory access was encountered")

    def unusable(*arguments: Any, **options: Any) -> torch.Tensor:
        if broken and arguments == (1,):
            raise RuntimeError("an illegal memory access was encountered")
        return zeros(*arguments, **options)

    use(monkeypatch, (REFERENCE, Candidate("breaking", "", build), FUSED))
    monkeypatch.setattr(torch, "zeros", unusable)
    decoder = small()
    with pytest.raises(
        DeviceError, match=r"since the runtime 'breaking' was tried .* start again: it is left out then"
    ):
        trial_store.find_trial(decoder, {})
    broken.clear()
    monkeypatch.setattr(trial_store.os, "getpid", lambda: -1)
    monkeypatch.setattr(trial_store, "_lives", lambda process: False)
    trial = trial_store.find_trial(decoder, {})
    assert not broken
    assert reasons(trial)["breaking"] == "an earlier process ended while it was tried"
    assert reasons(trial)["fused"] is None


# Low-bit weights.


def test_low_bit_weights_are_compared_with_the_rounded_ones_in_the_dtype() -> None:
    for each in (FUSED, COMPILED):
        trial = Trial(
            take_apart(random_model()), (REFERENCE, dataclasses.replace(each, name="only")), budget=AMPLE
        ).run()
        if trial.order[0] == "only":
            assert {bits: tried.reason for bits, tried in trial.weights.items()} == dict.fromkeys(BITS)


def test_wrong_low_bit_products_are_out(monkeypatch: pytest.MonkeyPatch) -> None:
    right = TorchLowBitProduct.__call__
    monkeypatch.setattr(TorchLowBitProduct, "__call__", lambda self, rows, widest=None: right(self, rows) * 1.01)
    trial = Trial(take_apart(random_model()), (FUSED,), budget=AMPLE).run()
    assert set(trial.refused_bits) == {8, 4}
    assert all("logits differ" in reason for reason in trial.refused_bits.values())


def test_low_bit_weights_of_other_weights_are_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both the product and what it stands for are wrong in the same way."""
    own = LowBitWeights._convert
    monkeypatch.setattr(LowBitWeights, "_convert", lambda self, product, form: own(self, Turned(product), form))
    trial = Trial(take_apart(random_model()), (dataclasses.replace(COMPILED, name="eager"),), budget=AMPLE).run()
    assert set(trial.refused_bits) == {8, 4}
    assert all("the rounded weights of the LM head differ by" in reason for reason in trial.refused_bits.values())


class Turned(DenseProduct):
    """A product of the same weight rows in another order."""

    def __init__(self, product: Product) -> None:
        super().__init__(product.values().flip(0).contiguous(), product.bias)


# What it is kept for, and what an engine does with it.


@pytest.mark.usefixtures("accelerator")
def test_an_engine_takes_what_the_trial_chose_and_later_ones_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    run = Trial.run
    monkeypatch.setattr(Trial, "run", lambda trial: made.append(1) or run(trial))
    model = random_model(**SMALL)
    first = Target(model)
    assert first.trial is not None
    assert first.chosen_runtime == first.trial.order[0]
    second = Target(model)
    assert second.trial == first.trial
    assert len(made) == 1
    Target(random_model(**SMALL, initializer_range=0.3))  # other weights
    assert len(made) == 2
    monkeypatch.setattr(trial_store, "describe_device", lambda device: {"driver": "another"})
    Target(model)
    assert len(made) == 3


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("method", ["auto", "layerskip"])
def test_the_text_is_the_models_own(method: str) -> None:
    model = random_model()
    settings = {"exit_layer": 2, "draft_length": 4} if method == "layerskip" else {}
    expected = Engine(model, method="autoregressive", runtime="eager").generate(prompt(20), max_new_tokens=24)
    engine = Engine(model, method=method, settings=settings)
    result = engine.generate(prompt(20), max_new_tokens=24)
    assert engine.target.trial is not None
    assert result.token_ids == expected.token_ids
    assert result.drafted > 0


@pytest.mark.usefixtures("accelerator")
def test_auto_expects_what_the_trial_measured_and_drafts_from_what_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(random_model())
    fast, slower = Tried("8 bits", {1: 0.002, 8: 0.003}), Tried("4 bits", {1: 0.004, 8: 0.004})
    runtimes = (Tried("eager", {1: 0.01, 8: 0.02}),)
    target.trial = DeviceTrial("a device", runtimes, {8: fast, 4: slower})
    expected = preparation.expect(target, AutoSettings())
    assert (expected.verify.rows, expected.verify.seconds) == ((1, 8), (0.01, 0.02))
    assert expected.layers is not None
    assert expected.layers.assignment.precision == Precision.of(8)
    assert expected.layers.costs(1) == 0.002

    target.trial = DeviceTrial("a device", runtimes, {8: Tried("8 bits", reason="wrong"), 4: slower})
    target._low_bit.refuse(target.trial.refused_bits)
    expected = preparation.expect(target, AutoSettings())
    assert expected.layers is not None
    assert expected.layers.assignment.precision == Precision.of(4)
    assert {each.precision for each in drafts(target, group=32)} == {Precision.of(4), None}
    with pytest.raises(UnsupportedModelError, match="weights of 8 bits are left out: wrong"):
        target.check_low_bit(Precision.of(8))

    target.trial = DeviceTrial("a device", runtimes, {bits: Tried("no", reason="wrong") for bits in BITS})
    assert preparation.expect(target, AutoSettings()).layers is None
    monkeypatch.setattr(preparation, "free_bytes", lambda device: 10)
    target = Target(random_model())
    target.trial = DeviceTrial("a device", runtimes, {8: fast})
    expected = preparation.expect(target, AutoSettings())
    assert expected.layers is None
    with pytest.warns(NoLowBitWeightsWarning, match="without low-bit weights"):
        preparation.warn_of_memory(expected, AutoSettings())


@pytest.mark.usefixtures("accelerator")
def test_auto_measures_drafts_of_what_passed_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_store, "CANDIDATES", (dataclasses.replace(FUSED, name="eager"),))
    target = Target(random_model(max_position_embeddings=512))
    target._low_bit.refuse({4: "wrong"})
    assert target.trial is not None
    refused = {4: Tried("4 bits", reason="wrong")}
    target.trial = dataclasses.replace(target.trial, weights={**target.trial.weights, **refused})
    tried: list[Any] = []
    attempt = preparation._try
    monkeypatch.setattr(
        preparation, "_try", lambda *arguments: tried.append(arguments[1].precision) or attempt(*arguments)
    )
    found = preparation._find_out(target, AutoSettings(trial_seconds=5.0), lambda _: None)
    assert found.verify(1) > 0
    assert set(tried) == {Precision.of(8), None}


@pytest.mark.usefixtures("accelerator")
def test_a_runtime_that_cannot_be_built_any_more_gives_way_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model()
    chosen = Target(model).chosen_runtime
    broken = failing(chosen, torch.OutOfMemoryError("out of memory"))
    others = [each for each in QUICK if each.name != chosen]
    monkeypatch.setattr(trial_store, "CANDIDATES", (broken, *others))
    with pytest.warns(DeviceMemoryWarning, match=f"'{chosen}' was left out.*smaller batch"):
        again = trial_store.build_fastest(two_that_passed(), take_apart(model))
    assert again[0] is others[0]


def two_that_passed() -> DeviceTrial:
    return DeviceTrial("a device", (Tried("fused", {1: 1.0}), Tried("eager", {1: 2.0})))


@pytest.mark.usefixtures("accelerator")
def test_want_of_memory_is_said_once_and_tried_again_when_there_is_more(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, (*QUICK, failing("large", torch.OutOfMemoryError("out of memory"))))
    free = [1000]
    for module in (trial_store, device_trial):
        monkeypatch.setattr(module, "free_bytes", lambda device: free[0])
    model = random_model()
    with pytest.warns(DeviceMemoryWarning, match="left out large: there is not enough memory; a smaller batch"):
        first = Target(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Target(model).trial == first.trial
    free[0] = 2000
    use(monkeypatch, QUICK)
    monkeypatch.setattr(trial_store, "trial_key", lambda decoder, identity, key=trial_store.trial_key: {})
    KeptFile("trials", {}).write(dataclasses.replace(first.trial, free_bytes=1000).to_dict())  # type: ignore[type-var]
    assert Target(model).trial.lacked_memory == []  # type: ignore[union-attr]


@pytest.mark.usefixtures("accelerator")
def test_without_memory_for_the_trial_transformers_modules_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model, run = random_model(), Trial.run

    def refuse(trial: Trial) -> DeviceTrial:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Trial, "run", refuse)
    with pytest.warns(DeviceMemoryWarning, match="left out fused"):
        engine = Engine(model, method="autoregressive")
    assert engine.target.chosen_runtime == "eager"
    assert len(engine.generate(prompt(5), max_new_tokens=4).token_ids) == 4
    monkeypatch.setattr(Trial, "run", run)
    assert "fused" in Target(model).trial.order  # type: ignore[union-attr]


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("content", [{}, {"device": "x"}, {**EMPTY, "runtimes": []}, {**EMPTY, "runtimes": 3}])
def test_a_damaged_table_is_made_again(content: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_store, "trial_key", lambda decoder, identity: {})
    KeptFile("trials", {}).write(content)
    trial = Target(random_model(**SMALL)).trial
    assert trial is not None
    assert DeviceTrial.from_dict(json.loads(json.dumps(trial.to_dict()))) == trial


def test_a_played_text_is_the_same_each_time() -> None:
    decoder = small()
    stages = random_stages(128, 4, 128, trees=True, seed=1)
    one, other = (list(run_stages(make_runner(decoder, "eager"), stages, 128)) for _ in range(2))
    assert all(torch.equal(a.values, b.values) for a, b in zip(one, other, strict=True))
    assert devices.REFERENCE.name == "eager"
