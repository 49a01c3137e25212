"""The bridge to vLLM: with arrays as vLLM's runner keeps them, without the package."""

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from helpers.simulated_engine import common, repeating
from selfspec.bridges import versions, vllm
from selfspec.bridges.vllm import SuffixProposer
from selfspec.errors import EngineVersionWarning, InvalidSettingError, MissingPackageError

LENGTH = 400


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The version of a build for the CPU."""
    monkeypatch.setattr(versions, "version", lambda _: f"{vllm.TESTED}+cpu")
    versions._warned.clear()
    yield
    versions._warned.clear()


def config(tokens: int = 8, **options: Any) -> SimpleNamespace:
    """Of vLLM, what the bridge reads."""
    given = {"row_costs": {"1": 1.0, "256": 1.2}} | options
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=tokens),
        model_config=SimpleNamespace(max_model_len=LENGTH),
        additional_config={"selfspec": given, "another": 1},
    )


class FakeRunner:
    """The arrays of vLLM's runner: a row a request; rows move up when a request before them ends."""

    def __init__(self, proposer: SuffixProposer, texts: list[tuple[list[int], list[int]]]) -> None:
        self.proposer = proposer
        self.whole = [[*prompt, *output] for prompt, output in texts]
        self.lengths = [len(prompt) for prompt, _ in texts]
        self.requests = list(range(len(texts)))
        self.drafts: list[list[int]] = [[] for _ in texts]
        self.steps = 0

    def step(self, reading: int | None = None) -> None:
        """One step; the prompt of the request in the row ``reading`` is not read to its end yet."""
        sampled = []
        for row, request in enumerate(self.requests):
            following = self.whole[request][self.lengths[request] :]
            new = [] if row == reading else following[: 1 + common(self.drafts[row], following)]
            self.lengths[request] += len(new)
            sampled.append(new)
        counts = np.array([self.lengths[request] for request in self.requests], dtype=np.int32)
        token_ids = np.full((len(self.requests), LENGTH), 99, dtype=np.int32)
        for row, (request, count) in enumerate(zip(self.requests, counts, strict=True)):
            token_ids[row, :count] = self.whole[request][:count]
        self.drafts = self.proposer.propose(sampled, counts, token_ids, slot_mappings=None)
        assert len(self.drafts) == len(self.requests)
        for row, count in enumerate(counts):
            assert count + len(self.drafts[row]) < LENGTH or not self.drafts[row]
            assert row != reading or not self.drafts[row]
        self.steps += 1
        kept = [row for row, request in enumerate(self.requests) if self.lengths[request] < len(self.whole[request])]
        self.requests, self.drafts = [self.requests[row] for row in kept], [self.drafts[row] for row in kept]


def test_each_request_of_a_batch_is_drafted_for() -> None:
    proposer = SuffixProposer(config())
    lengths = random.Random(0).sample(range(60, 140), 5)
    runner = FakeRunner(proposer, [repeating(seed, 0.95, length) for seed, length in enumerate(lengths)])
    runner.step(reading=2)
    while runner.requests:
        runner.step()
    assert proposer.drafts.drafted > proposer.drafts.accepted > 0.4 * proposer.drafts.drafted
    assert runner.steps < 0.8 * max(lengths)


def test_drafts_end_where_the_model_ends() -> None:
    proposer = SuffixProposer(config(tokens=16))
    runner = FakeRunner(proposer, [([1, 2, 3, 4] * 10, [1, 2, 3, 4] * ((LENGTH - 40) // 4))])
    while runner.requests:
        runner.step()
    assert proposer.drafts.accepted > 100


def test_nothing_is_drafted_before_the_prompt_is_read() -> None:
    proposer = SuffixProposer(config())
    counts, token_ids = np.array([4], dtype=np.int32), np.tile(np.array([1, 2, 1, 2], dtype=np.int32), (1, 100))
    assert proposer.propose([[]], counts, token_ids) == [[]]
    assert proposer.drafts.drafted == 0


def test_no_more_is_drafted_than_the_configuration_allows() -> None:
    proposer = SuffixProposer(config(tokens=2))
    runner = FakeRunner(proposer, [repeating(3, 1.0)])
    longest = 0
    while runner.requests:
        runner.step()
        longest = max([longest, *map(len, runner.drafts)])
    assert longest == 2


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(InvalidSettingError, match="has no option length; choose from credit, delta, memory_tokens"):
        SuffixProposer(config(length=3))
    with pytest.raises(InvalidSettingError, match="delta must be at least 0 and at most 1"):
        SuffixProposer(config(delta=3))
    with pytest.raises(InvalidSettingError, match="row_costs"):
        SuffixProposer(config(row_costs={"one": 1}))


def test_another_version_is_said_and_a_missing_package_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise versions.PackageNotFoundError(name)

    monkeypatch.setattr(versions, "version", lambda _: "0.33.1")
    with pytest.warns(EngineVersionWarning, match=r"vllm is 0\.33\.1"):
        SuffixProposer(config())
    monkeypatch.setattr(versions, "version", missing)
    with pytest.raises(MissingPackageError, match=r"pip install vllm==0\.32\.0"):
        SuffixProposer(config())
