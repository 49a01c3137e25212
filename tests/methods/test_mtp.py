"""Drafts of the multi-token-prediction head that a checkpoint has, against transformers' own and without a draft."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.mtp_checkpoints import FAMILIES, LAYERS, VOCABULARY, load, save_with_head
from transformers import GenerationConfig, PreTrainedModel

from helpers.kernels import needs_kernels
from helpers.low_bit_model import random_model
from selfspec import Engine, Generation, SamplingParams, quantise
from selfspec.errors import ModelLoadError, UnsupportedModelError
from selfspec.runtimes.mtp_head import first_outputs

PROMPTS = [
    torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (9, 30, 17)
]
TOKENS = 40


@pytest.fixture(scope="module", params=list(FAMILIES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    """A tiny model of each family, of a checkpoint with a head."""
    return load(save_with_head(request.param, tmp_path_factory.mktemp(request.param)))


def mtp(model: PreTrainedModel, **options: Any) -> Engine:
    """An engine that drafts with the head, three tokens each round."""
    settings = {"draft_length": 3, "threshold": 0.0, **options.pop("settings", {})}
    return Engine(model, method="mtp", settings=settings, **options)


def text(generation: Generation) -> tuple[int, ...]:
    """The tokens of an output."""
    return generation.token_ids


def accepted(generation: Generation) -> int:
    """Accepted draft tokens."""
    return sum(each.accepted for each in generation.rounds)


def greedy(model: Any, prompt: list[int]) -> tuple[int, ...]:
    """Transformers' own continuation."""
    with torch.no_grad():
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False)
    return tuple(ids[0, len(prompt) :].tolist())


def test_text_is_the_models_own_alone_and_in_a_batch(model: PreTrainedModel) -> None:
    """In float32 token for token, and the head is right often enough for this to say something."""
    engine = mtp(model)
    expected = [greedy(model, prompt) for prompt in PROMPTS]
    assert [text(engine.generate(prompt, max_new_tokens=TOKENS)) for prompt in PROMPTS[:2]] == expected[:2]
    together = engine.generate(PROMPTS, max_new_tokens=TOKENS)
    assert [text(each) for each in together] == expected
    assert sum(map(accepted, together)) > 10


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_accepts_what_transformers_accepts(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``generate(use_mtp=True)``: the same text, and of every round the same draft is accepted."""
    if not hasattr(GenerationConfig(), "use_mtp"):
        pytest.skip("this transformers has no MTP drafts")
    from transformers.generation.candidate_generator import MTPCandidateGenerator

    model: Any = load(save_with_head(family, tmp_path))
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{LAYERS}.*"]
    counts: list[int] = []
    own = MTPCandidateGenerator.get_candidates

    def candidates(self: Any, *arguments: Any, n_last_matches: int, **options: Any) -> Any:
        counts.append(n_last_matches)
        return own(self, *arguments, n_last_matches=n_last_matches, **options)

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", candidates)
    prompt = PROMPTS[1]
    with torch.no_grad():
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False, use_mtp=True)
    found = mtp(model, settings={"draft_length": 1, "draft_bits": 16}).generate(prompt, max_new_tokens=TOKENS)
    assert text(found) == tuple(ids[0, len(prompt) :].tolist())
    ours = [each.accepted for each in found.rounds]
    theirs = counts[len(counts) - len(ours) :]
    assert sum(ours) > 3
    assert ours[:-1] == theirs[1:]


def test_coupled_sampling_gives_the_text_of_the_seed(model: PreTrainedModel) -> None:
    """Alone, in a batch and without drafts; the head draws with the same noise."""
    params = SamplingParams(max_new_tokens=TOKENS, temperature=0.5, seed=5)
    plain = [text(each) for each in Engine(model, method="autoregressive").generate(PROMPTS, params)]
    found = mtp(model).generate(PROMPTS, params)
    assert [text(each) for each in found] == plain
    assert sum(map(accepted, found)) > 10


def test_speculative_sampling_takes_drafts_of_a_temperature(model: PreTrainedModel) -> None:
    """Its draft has scores, so that tokens are accepted by the ratio of the probabilities."""
    params = SamplingParams(max_new_tokens=TOKENS, temperature=0.3, seed=5, acceptance="speculative")
    engine = mtp(model)
    found = engine.generate(PROMPTS, params)
    assert all(len(text(each)) == TOKENS for each in found)
    assert sum(map(accepted, found)) > 10


def test_after_a_prefix_cache_hit_the_text_is_the_same(model: PreTrainedModel) -> None:
    """The head then reads the rest of the prompt."""
    engine = mtp(model, prefix_cache=2**22)
    prompt = PROMPTS[1]
    first = engine.generate(prompt, max_new_tokens=TOKENS)
    again = engine.generate([*prompt, *text(first)[:8]], max_new_tokens=TOKENS - 8)
    assert text(again) == text(first)[8:]
    if engine.target.keys_depend_on_position_alone:
        assert again.cached_prompt_tokens >= len(prompt)
    assert accepted(again) > 0


def test_a_window_of_the_prompt_is_enough(model: PreTrainedModel) -> None:
    """And so are prompts of one token, and longer ones than the head reads at once."""
    engine = mtp(model, settings={"prompt_rows": 4})
    prompts = (PROMPTS[0], PROMPTS[0][:1], PROMPTS[1] * 4)
    expected = [greedy(model, prompt) for prompt in prompts]
    assert [text(engine.generate(prompt, max_new_tokens=TOKENS)) for prompt in prompts] == expected
    assert text(mtp(model).generate(prompts[-1], max_new_tokens=TOKENS)) == expected[-1]


def test_drafts_end_where_the_head_is_unsure(tmp_path: Path) -> None:
    """A threshold on the product of the confidences."""
    model = load(save_with_head("llama", tmp_path))
    sure = mtp(model, settings={"threshold": 0.9}).generate(PROMPTS[1], max_new_tokens=TOKENS)
    every = mtp(model).generate(PROMPTS[1], max_new_tokens=TOKENS)
    assert text(sure) == text(every)
    assert sum(each.drafted for each in sure.rounds) < sum(each.drafted for each in every.rounds)


def _drop(ending: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("mtp.") and name.endswith(ending)]:
            del tensors[name]

    return change


def _cut(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name][..., :-8].contiguous()

    return change


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (_drop(""), UnsupportedModelError, "has no multi-token-prediction head"),
        (_drop("fc.weight"), ModelLoadError, "the tensor mtp.fc.weight is missing"),
        (_drop("q_proj.weight"), ModelLoadError, "mtp.layers.0.self_attn.q_proj.weight .* is missing"),
        (_cut("mtp.fc.weight"), ModelLoadError, r"mtp.fc.weight is F32 \[64, 120\]"),
        (_cut("mtp.norm.weight"), ModelLoadError, r"mtp.norm.weight is F32 \[56\]"),
        (_cut("mtp.layers.0.mlp.up_proj.weight"), ModelLoadError, "up_proj.weight .* has another shape"),
    ],
)
def test_refuses_a_head_that_does_not_fit(
    change: Callable[[dict[str, torch.Tensor]], None], error: type[Exception], message: str, tmp_path: Path
) -> None:
    """By the name of the tensor, before anything is generated."""
    model = load(save_with_head("llama", tmp_path, change))
    with pytest.raises(error, match=message):
        mtp(model)


def test_refuses_a_model_that_was_not_loaded_from_a_checkpoint(tmp_path: Path) -> None:
    """There is nowhere to read a head from."""
    model = load(save_with_head("llama", tmp_path))
    model.config.name_or_path = ""
    with pytest.raises(UnsupportedModelError, match="has no multi-token-prediction head"):
        mtp(model)


def test_a_head_of_frequent_tokens_drafts_these_alone(tmp_path: Path) -> None:
    """Over a part of the LM head, greedy and sampled; the text is the model's own."""
    model = load(save_with_head("llama", tmp_path))
    engine = Engine(model, method="mtp", settings={"threshold": 0.0, "vocabulary": 48})
    plain = Engine(model, method="autoregressive")
    for params in (
        SamplingParams(max_new_tokens=TOKENS),
        SamplingParams(max_new_tokens=TOKENS, temperature=0.5, seed=2, repetition_penalty=1.1),
    ):
        found, expected = engine.generate(PROMPTS, params), plain.generate(PROMPTS, params)
        assert [text(each) for each in found] == [text(each) for each in expected]
        drafts = [
            token for each in found for token, by in zip(each.token_ids, each.origins, strict=True) if by == "draft"
        ]
        assert drafts
        assert max(drafts) < 48
        assert max(max(text(each)) for each in found) >= 48
    speculative = SamplingParams(max_new_tokens=TOKENS, temperature=0.3, acceptance="speculative", seed=4)
    assert sum(map(accepted, engine.generate(PROMPTS, speculative))) > 0


@needs_kernels
def test_a_part_of_a_low_bit_head_has_its_numbers() -> None:
    """Of weights of few bits whole tiles and the rest of one are views."""
    whole = quantise(random_model(), "int8").lm_head
    rows = torch.randn(3, whole.in_features)
    for count in (48, 50):
        assert torch.equal(first_outputs(whole, count)(rows), whole(rows)[:, :count])
    with pytest.raises(UnsupportedModelError, match="the LM head is a Sequential, of which no part can run"):
        first_outputs(torch.nn.Sequential(whole), 48)
