"""Rounds whose acceptance is drawn at random."""

import math
import random
from typing import Any

import pytest
import torch

from helpers.models import build, prompt
from selfspec import Engine
from selfspec.sampling.acceptance import DraftedTree, TokenTree
from selfspec_lab.bench.forced import ForcedAcceptance, ForcedEngine


def accept(rule: ForcedAcceptance, tree: TokenTree) -> Any:
    drafted = torch.arange(100, 100 + len(tree))
    scores = torch.eye(len(tree) + 1, 200)  # row r of the target chooses token r
    return rule.accept(DraftedTree(tree, drafted), scores, ()).read()


@pytest.mark.parametrize("probability", [0.3, 0.8])
def test_tokens_stand_with_the_forced_probability(probability: float) -> None:
    rule = ForcedAcceptance(probability, random.Random(1))
    rounds, length = 4000, 5
    accepted = [len(accept(rule, TokenTree.chain(length)).rows) - 1 for _ in range(rounds)]
    trials = sum(min(length, count + 1) for count in accepted)
    deviation = math.sqrt(probability * (1 - probability) / trials)
    assert abs(sum(accepted) / trials - probability) < 4 * deviation
    for count in range(length):  # each next token stands with the same probability
        reached = sum(each >= count for each in accepted)
        share = sum(each > count for each in accepted) / reached
        assert abs(share - probability) < 4 * math.sqrt(probability * (1 - probability) / reached)


def test_the_target_does_not_matter_and_the_last_token_is_its_own() -> None:
    everything = accept(ForcedAcceptance(1.0, random.Random(0)), TokenTree.chain(3))
    assert everything.token_ids == (100, 101, 102, 3)
    nothing = accept(ForcedAcceptance(0.0, random.Random(0)), TokenTree.chain(3))
    assert (nothing.rows, nothing.token_ids) == ((0,), (0,))
    tree = accept(ForcedAcceptance(1.0, random.Random(0)), TokenTree((-1, 0, -1, 0)))
    assert (tree.rows, tree.token_ids) == ((0, 1, 2), (100, 101, 2))


def test_forced_engine_accepts_without_the_model() -> None:
    settings = {"exit_layer": 1, "draft_length": 5}
    forced = ForcedEngine(build("llama"), None, "layerskip", settings=settings, probability=1.0)
    result = forced.generate(prompt(9), max_new_tokens=25, ignore_eos=True)
    assert result.acceptance_rate == 1.0
    assert result.mean_generated_length == 6.0
    honest = Engine(build("llama"), None, "layerskip", settings=settings).generate(prompt(9), max_new_tokens=25)
    assert honest.acceptance_rate < 1.0
