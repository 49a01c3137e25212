"""Kept sets in whole layers: which layers are left out, against all that could be."""

from itertools import combinations
from pathlib import Path

import pytest
import torch

from helpers.models import SUBLAYERS, build, prompt
from selfspec import Engine
from selfspec.errors import InvalidParameterError
from selfspec.methods.fixed import Profile
from selfspec.model.kept import KeptSet
from selfspec.runtimes.target import Target
from selfspec_lab.export.pruned import prune
from selfspec_lab.export.selection import find_kept
from selfspec_lab.export.whole import Text, agreeing, whole_layers, without_layers


def texts(engine: Engine) -> list[Text]:
    prompts = [prompt(9, seed) for seed in range(3)]
    return [(ids, engine.generate(ids, max_new_tokens=20).token_ids) for ids in prompts]


def test_the_layer_that_is_missed_least_is_left_out_first() -> None:
    target, written = Target(build("llama")), texts(Engine(build("llama")))
    right = {
        layer: sum(agreeing(target, without_layers([layer], SUBLAYERS), *text) for text in written)
        for layer in range(1, 5)
    }
    assert len(set(right.values())) > 1
    found = whole_layers(target, KeptSet.skipping((2, 5, 7, 8), SUBLAYERS), written)
    first, second = sorted({sublayer // 2 for sublayer in found.skipped})
    assert max(right, key=lambda layer: right[layer]) in (first, second)
    pairs = {
        pair: sum(agreeing(target, without_layers(pair, SUBLAYERS), *text) for text in written)
        for pair in combinations(range(1, 5), 2)
    }
    assert pairs[first, second] > min(pairs.values())


def test_layers_that_are_skipped_whole_stay_skipped() -> None:
    written = texts(Engine(build("llama")))
    kept = KeptSet.skipping((2, 3, 6, 9), SUBLAYERS)
    found = whole_layers(Target(build("llama")), kept, written)
    assert {2, 3} <= set(found.skipped)
    assert len(found.skipped) == 4
    assert set(found.skipped) - {2, 3} in ({6, 7}, {8, 9})
    assert whole_layers(Target(build("llama")), without_layers([1, 4], SUBLAYERS), written).skipped == (2, 3, 8, 9)


def test_agreement_is_that_of_the_checkpoint() -> None:
    model = build("qwen3")
    kept = without_layers([2, 3], SUBLAYERS)
    before, written = texts(Engine(model))[0]
    with torch.inference_mode():
        logits = prune(model, kept)(torch.tensor([[*before, *written]])).logits[0, len(before) - 1 : -1]
    expected = int((logits.argmax(-1) == torch.tensor(written)).sum())
    assert agreeing(Target(model), kept, before, written) == expected
    assert 0 < expected < len(written)
    assert agreeing(Target(model), KeptSet.full(SUBLAYERS), before, written) == len(written)


def test_a_state_is_taken_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "profile"
    engine = Engine(build("llama"), method="self-spec")
    engine.method.adopt(Profile((3, 6)))  # type: ignore[attr-defined]
    engine.save_state(path)
    kept, written = find_kept(
        Engine(build("llama"), method="self-spec"), [prompt(9)], max_new_tokens=8, iterations=1, state=path
    )
    assert kept.skipped == (3, 6)
    assert len(written) == 1
    assert len(written[0][1]) == 8


def test_a_method_that_selects_nothing_is_refused() -> None:
    engine = Engine(build("llama"), method="knapspec")
    with pytest.raises(InvalidParameterError, match="knapspec selected no sublayers to skip"):
        find_kept(engine, [prompt(9)], max_new_tokens=4, iterations=1)
