"""Adaptive cosine: the similarities against a plain loop over the model, what is skipped for them, and when."""

import math
from typing import Any

import pytest
import torch

from helpers.models import LAYERS, SUBLAYERS, build, plain_text, prompt
from helpers.recording import record
from selfspec import Engine
from selfspec.errors import InvalidSettingError
from selfspec.methods import make_method
from selfspec.model.kept import KeptSet
from selfspec.runtimes.target import Target
from selfspec.types import Generation
from selfspec_lab.methods.adaptive_cosine import AdaptiveCosine, similarity_sums

CANDIDATES = range(2, SUBLAYERS - 2)


def generate(name: str = "llama", prompt_length: int = 17, new_tokens: int = 40, **settings: Any) -> Generation:
    settings = {"confidence_threshold": 0.2, **settings}
    engine = Engine(build(name), method="adaptive-cosine", settings=settings)
    result = engine.generate(prompt(prompt_length), max_new_tokens=new_tokens)
    assert result.token_ids == plain_text(name, prompt(prompt_length), new_tokens)
    return result


def cosines(name: str, token_ids: list[int]) -> list[list[float]]:
    """For each sublayer the cosine of its input and its output at every token, in one pass without drafts."""
    target = Target(build(name))
    length = len(token_ids)
    sequence = target.new_sequence(length, capacity=length, last_length=length)
    result = []
    with torch.inference_mode():
        step = target.lay_out(sequence, length)
        stream = target.embed(torch.tensor(token_ids))
        for sublayer in range(SUBLAYERS):
            before, stream = stream, target.run(stream, (sublayer,), step).hidden_states
            result.append(
                [
                    float(one @ other) / math.sqrt(float(one @ one) * float(other @ other))
                    for one, other in zip(before.double(), stream.double(), strict=True)
                ]
            )
    return result


def closest(name: str, token_ids: list[int], tokens: range, count: int, step: int = 1) -> tuple[int, ...]:
    """The candidates with the highest mean cosine over some of the tokens."""
    of_token = cosines(name, token_ids)
    means = {index: sum(of_token[index][token] for token in tokens) / len(tokens) for index in CANDIDATES[::step]}
    return tuple(sorted(sorted(means, key=means.__getitem__, reverse=True)[:count]))


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma3", "granite", "mixtral"])
@pytest.mark.parametrize("rows", [1, 8, 64])
def test_it_skips_what_changes_the_prompt_least(name: str, rows: int) -> None:
    result = generate(name, prompt_rows=rows, skip_ratio=0.4, new_tokens=24)
    wanted = closest(name, prompt(17), range(max(0, 17 - rows), 17), count=3)
    assert {record.kept.skipped for record in result.rounds if record.kept} == {wanted}
    assert result.accepted > 0


def test_attention_alone() -> None:
    result = generate(prompt_rows=17, skip_ratio=0.5, candidates="attention")
    wanted = closest("llama", prompt(17), range(17), count=2, step=2)
    assert {record.kept.skipped for record in result.rounds if record.kept} == {wanted}
    assert {record.mlp_share for record in result.rounds} == {1.0}
    assert result.accepted > 0


def test_the_closest_are_skipped_by_hand() -> None:
    method = make_method("adaptive-cosine", Target(build("llama")), {"skip_ratio": 0.5})
    assert isinstance(method, AdaptiveCosine)
    similarities = torch.tensor([0.1, 0.9, -0.5, 0.9, 0.2, 0.95, 0.3, 0.0])  # of sublayers 2 to 9
    assert method.draft(similarities).kept == KeptSet.skipping((3, 5, 7, 8), SUBLAYERS)
    assert method.draft(torch.ones(8)).kept == KeptSet.skipping((2, 3, 4, 5), SUBLAYERS), "ties go by depth"


def test_similarity_sums_by_hand() -> None:
    states = {
        2: torch.tensor([[1.0, 0.0], [3.0, 4.0]]),
        3: torch.tensor([[0.0, 2.0], [6.0, 8.0]]),
        4: torch.tensor([[0.0, -1.0], [8.0, 6.0]]),
    }
    torch.testing.assert_close(similarity_sums(states, (2, 3)), torch.tensor([1.0, -1 + 0.96]))


@pytest.mark.parametrize(("interval", "recent"), [(1, 1), (3, 2), (4, 9)])
def test_later_choices_go_by_the_last_committed_tokens(
    interval: int, recent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    feedbacks = record(AdaptiveCosine, monkeypatch)
    result = generate(update_interval=interval, recent_rounds=recent, skip_ratio=0.4)
    text = prompt(17) + list(result.token_ids)
    committed = [17]
    for number, played in enumerate(result.rounds):
        left = interval - number % interval
        watched = set(feedbacks[number].hidden_states)
        assert watched == (set(range(2, SUBLAYERS - 1)) if left <= recent else set())
        if number and number % interval == 0:
            tokens = range(committed[-1 - min(recent, interval)], committed[-1])
            assert played.kept
            assert played.kept.skipped == closest("llama", text[: committed[-1]], tokens, count=3)
        committed.append(committed[-1] + len(played.token_ids))
    assert len(committed) > 2 * interval
    assert result.accepted > 0


def test_by_default_the_choice_of_the_prompt_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    feedbacks = record(AdaptiveCosine, monkeypatch)
    result = generate()
    assert len({played.kept for played in result.rounds}) == 1
    assert len(feedbacks) == result.round_count
    assert not any(feedback.hidden_states for feedback in feedbacks)


@pytest.mark.parametrize("new_tokens", [1, 2, 3, 4, 5])
def test_near_the_end_of_the_output(new_tokens: int) -> None:
    result = generate(prompt_length=1, new_tokens=new_tokens, update_interval=1)
    assert result.drafted <= max(0, new_tokens - 2)
    assert result.drafted > 0 or new_tokens < 3


@pytest.mark.parametrize("parameters", [{"seed": 5}, {"acceptance": "speculative"}])
def test_sampling(parameters: dict[str, Any]) -> None:
    settings = {"update_interval": 2, "confidence_threshold": 0.0, "draft_length": 4, "skip_ratio": 0.3}
    sampled = {"max_new_tokens": 40, "temperature": 0.8, **parameters}
    result = Engine(build("llama"), method="adaptive-cosine", settings=settings).generate(prompt(17), **sampled)
    assert 0 < result.accepted < result.drafted
    assert result.new_token_count == 40
    if "seed" in parameters:
        assert (
            result.token_ids
            == Engine(build("llama"), method="autoregressive").generate(prompt(17), **sampled).token_ids
        )


def test_drafts_end_at_the_threshold_and_at_the_limit() -> None:
    always = generate(confidence_threshold=0.0, draft_length=3)
    assert {record.threshold for record in always.rounds} == {None}
    assert max(record.drafted for record in always.rounds) == 3
    assert max(record.drafted for record in generate(confidence_threshold=1.0).rounds) == 1


def test_the_prompt_rows_are_bounded() -> None:
    target = Target(build("llama"))
    assert make_method("adaptive-cosine", target).needs.prompt_rows == target.hidden_size // 16
    assert make_method("adaptive-cosine", target, {"prompt_rows": 9}).needs.prompt_rows == 9


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"skip_ratio": 0.1}, r"skip_ratio 0\.1 skips none of the 8 candidates .*; raise it"),
        ({"candidates": "attention", "skip_ratio": 0.2}, r"skips none of the 4 candidates"),
        ({"candidates": "mlp"}, "candidates is one of all, attention"),
        ({"prompt_rows": 0}, "prompt_rows must be at least 1"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    assert len(CANDIDATES) == 2 * (LAYERS - 2)
    with pytest.raises(InvalidSettingError, match=message):
        make_method("adaptive-cosine", Target(build("llama")), settings)
