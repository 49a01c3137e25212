"""Rounds with a multi-token-prediction head in native runs, against the same rounds one by one from Python."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.helpers.mtp_checkpoints import VOCABULARY, load, save_with_head
from transformers import PreTrainedModel

from helpers.kernels import needs_kernels
from selfspec import Engine, Generation, SamplingParams
from selfspec.decoding import round as one_round
from selfspec.decoding import verification
from selfspec.runtimes.native import NativeForward

pytestmark = needs_kernels

FAMILIES = ("llama", "qwen2", "glm4_moe", "deepseek_v3")
TOKENS = 40
PROMPTS = [
    torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (9, 30, 1)
]
GREEDY = SamplingParams(TOKENS)


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., PreTrainedModel]:
    """Tiny models of checkpoints with a head, by family and dtype."""
    made: dict[Any, PreTrainedModel] = {}

    def model(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        if (family, dtype) not in made:
            made[family, dtype] = load(save_with_head(family, tmp_path_factory.mktemp(family)), dtype)
        return made[family, dtype]

    return model


def engine(model: PreTrainedModel, **settings: Any) -> Engine:
    return Engine(model, method="mtp", settings={"draft_length": 3, "threshold": 0.0, **settings})


def one_by_one(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[Generation]:
    """What the same engine writes without runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_round, "run", lambda *_: None)
        found = engine.generate(prompts, params)
    assert not any(each.drafting and each.drafting.native for own in found for each in own.rounds)
    return found


def rounds(generation: Generation) -> list[tuple[int, int, tuple[int, ...], float | None]]:
    return [(each.drafted, each.accepted, each.token_ids, each.threshold) for each in generation.rounds]


def assert_same(found: list[Generation], wanted: list[Generation]) -> None:
    for own, other in zip(found, wanted, strict=True):
        assert own.token_ids == other.token_ids
        assert (own.finish_reason, own.origins) == (other.finish_reason, other.origins)
        assert rounds(own) == rounds(other)


def drafts_natively(found: list[Generation]) -> bool:
    """Whether all drafts were native, some accepted and some rejected."""
    each = [own for generation in found for own in generation.rounds]
    paths = {str(path) for own in each for path in (own.drafting, own.verification) if path is not None}
    assert paths == {"native"}
    return any(own.accepted for own in each) and any(own.accepted < own.drafted for own in each)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rounds_are_those_from_python(family: str, dtype: torch.dtype, model_of: Any) -> None:
    """Alone: the same drafts of every round; the text is plain decoding's."""
    own = engine(model_of(family, dtype))
    plain = Engine(own.target.model, method="autoregressive")
    for prompt in PROMPTS:
        found = own.generate([prompt], GREEDY)
        assert_same(found, one_by_one(own, [prompt], GREEDY))
        assert found[0].token_ids == plain.generate(prompt, GREEDY).token_ids
        assert found[0].rounds[0].seconds.draft > 0
    assert drafts_natively(own.generate(PROMPTS, GREEDY))


@pytest.mark.parametrize(
    ("settings", "params"),
    [
        ({"threshold": 0.9}, GREEDY),
        ({"vocabulary": 48}, GREEDY),
        ({"prompt_rows": 4}, GREEDY),
        ({"draft_bits": 16}, GREEDY),
        ({}, SamplingParams(TOKENS, temperature=0.5, seed=5)),
        ({"threshold": 0.3, "vocabulary": 48}, SamplingParams(TOKENS, temperature=0.5, seed=6)),
    ],
    ids=["threshold", "vocabulary", "window", "bits", "seed", "seed of a part"],
)
def test_settings_and_seeds(settings: dict[str, Any], params: SamplingParams, model_of: Any) -> None:
    own = engine(model_of("llama"), **settings)
    for prompts in ([PROMPTS[1]], PROMPTS):
        found = own.generate(prompts, params)
        assert_same(found, one_by_one(own, prompts, params))
        assert sum(each.accepted for one in found for each in one.rounds) > 3


@pytest.mark.parametrize("family", FAMILIES)
def test_sequences_run_together_and_end_by_themselves(family: str, model_of: Any) -> None:
    """One of them at a token that its draft has in the middle of a round."""
    own = engine(model_of(family))
    free = own.generate(PROMPTS, GREEDY)
    assert drafts_natively(free)
    played = next(each for each in free[1].rounds[2:] if each.accepted > 1)
    ends = SamplingParams(TOKENS, stop_token_ids=(played.token_ids[0],))
    found = own.generate(PROMPTS, ends)
    plain = Engine(own.target.model, method="autoregressive").generate(PROMPTS, ends)
    assert [each.token_ids for each in found] == [each.token_ids for each in plain]
    assert [each.finish_reason for each in found] == [each.finish_reason for each in plain]
    assert found[1].finish_reason == "stop_token"
    assert_same(found, one_by_one(own, PROMPTS, ends))


def test_the_head_follows_from_run_to_run_and_through_single_rounds(model_of: Any) -> None:
    """Where every second round is a run of one, the drafts stay the same."""
    own, turn, run = engine(model_of("llama")), [0], verification.run

    def sometimes(*arguments: Any) -> Any:
        turn[0] += 1
        return run(*arguments) if turn[0] % 2 else None

    wanted = one_by_one(own, [PROMPTS[1]], GREEDY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verification, "LONGEST_SECONDS", 0.0)
        patch.setattr(one_round, "run", sometimes)
        found = own.generate([PROMPTS[1]], GREEDY)
    assert_same(found, wanted)
    natively = [each.drafting.native for each in found[0].rounds if each.drafting is not None]
    assert True in natively
    assert False in natively


def test_several_rounds_are_one_native_call(model_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, chain = [0], NativeForward.chain

    def counted(self: NativeForward, *arguments: Any) -> Any:
        calls[0] += 1
        return chain(self, *arguments)

    monkeypatch.setattr(NativeForward, "chain", counted)
    monkeypatch.setattr(verification, "LONGEST_SECONDS", 60.0)
    (found,) = engine(model_of("llama")).generate([PROMPTS[1]], GREEDY)
    assert calls == [1]
    assert len(found.rounds) > 5


def test_what_needs_more_than_tokens_is_drafted_from_python(model_of: Any) -> None:
    own = engine(model_of("llama"))
    (found,) = own.generate([PROMPTS[1]], SamplingParams(TOKENS, logprobs=2))
    assert found.token_ids == own.generate(PROMPTS[1], GREEDY).token_ids
    reasons = {each.drafting.reason for each in found.rounds if each.drafting is not None}
    assert reasons == {"a multi-token-prediction head drafts"}
    assert sum(each.accepted for each in found.rounds) > 3


def test_a_stopping_rule_that_fails_ends_the_request(model_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it raises passes the native call."""

    def fails(self: object, confidence: float) -> bool:
        raise ZeroDivisionError("of a test")

    own = engine(model_of("llama"), threshold=0.5)
    monkeypatch.setattr("selfspec.decoding.draft.JointConfidence.stops", fails)
    with pytest.raises(ZeroDivisionError, match="of a test"):
        own.generate([PROMPTS[0]], GREEDY)
