"""Requests of a batch for which a device has no memory together."""

import warnings

import pytest
import torch

from helpers.models import build, prompt
from selfspec import Engine
from selfspec.decoding import round as one_round
from selfspec.errors import DeviceMemoryWarning, NoLowBitWeightsWarning, OutOfMemoryError
from selfspec.methods.auto.layer_drafts import LateWeights
from selfspec.runtimes.precision import Precision
from selfspec.runtimes.runner import Runner
from selfspec.runtimes.target import Target


def test_requests_run_one_by_one_where_a_round_of_all_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = build("llama"), [prompt(12), prompt(20, seed=3)]
    engine = Engine(model, method="suffix", runtime="fused")
    alone = [engine.generate(each, max_new_tokens=16).token_ids for each in prompts]
    verify, refused = Runner.verify, []

    def too_large(runner: Runner, requests: list[object], **options: object) -> object:
        if len(requests) > 1:
            refused.append(len(requests))
            raise torch.OutOfMemoryError("out of memory")
        return verify(runner, requests, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Runner, "verify", too_large)
    one_round.warn_of_memory.cache_clear()
    with pytest.warns(DeviceMemoryWarning, match=r"run one by one then; lower max_batch") as caught:
        together = engine.generate(prompts, max_new_tokens=16)
    assert len(caught) == 1
    assert len(refused) > 1
    assert [result.token_ids for result in together] == alone


def test_low_bit_weights_that_do_not_fit_are_given_up_and_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(build("llama"), "fused")

    def refuse(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(type(target._low_bit), "_convert", refuse)
    with pytest.raises(OutOfMemoryError, match="do not fit into the memory of 'cpu'"):
        target.at(Precision.of(8))
    weights = LateWeights(target, Precision.of(8))
    with pytest.warns(NoLowBitWeightsWarning, match="auto drafts without low-bit weights: .* do not fit"):
        assert not weights.make_if_it_pays(saving=1e3, tokens=10**6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not weights.make_if_it_pays(saving=1e3, tokens=10**6)
    assert not target._low_bit._made
