"""Checks of the recipes that need no data: ``pytest recipes``."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

import mtp
from data import Domain, Mixer
from export import read_checkpoint, write_checkpoint
from measure import choose_skip_set, encode_text, exit_agreement, skip_agreement
from model import Llama, Shape, causal_attention, initial_weights, rms_norm
from mtp import Head, from_checkpoint, initial_head, to_checkpoint, train_head
from objectives import (
    DistilledSubsetObjective,
    EarlyExitObjective,
    MutualExitObjective,
    MutualHalfDepthObjective,
    Objective,
    SubsetObjective,
    distilled_loss,
)
from optimizer import Rates, orthogonalize
from own_texts import OwnTexts
from phases import Phase, Recipe, Stage
from sample import Writer, renew_samples
from selfspec import Engine
from selfspec.decoding.round import propose
from selfspec_lab.prompts import PROMPTS
from selfspec_lab.testing import read_text
from tokenizer import train_tokenizer
from train import blend
from training import Settings, initial_checkpoint, train_phase

TEXTS = [f"Question: what is {n} + 1?\nAnswer: {n + 1}\n        indented\n#### {n + 1}" for n in range(200)]
MIXTURE = {"math": 0.5, "code": 0.5}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A tokenizer of a few entries."""
    return train_tokenizer(TEXTS, 300)


def tiny_shape(tokenizer: Tokenizer) -> Shape:
    """The smallest shape with middle sublayers."""
    return Shape(vocabulary=tokenizer.get_vocab_size(), layers=4, hidden=32, heads=4, key_value_heads=2, mlp=48)


def random_weights(shape: Shape) -> dict[str, torch.Tensor]:
    """Weights whose branches all write something."""
    generator = torch.Generator().manual_seed(1)
    weights = initial_weights(shape, seed=0)
    return {
        name: (weight + 0.1 * torch.randn(weight.shape, generator=generator)).bfloat16().float()
        for name, weight in weights.items()
    }


def test_exported_checkpoint_gives_the_training_models_logits(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """The names, the rotary layout and the tied head survive the export."""
    shape = tiny_shape(tokenizer)
    write_checkpoint(tmp_path / "model", random_weights(shape), shape, tokenizer)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    weights, read_shape, _ = read_checkpoint(tmp_path / "model")
    llama = Llama(read_shape, weights, compiled=False)
    tokens = torch.randint(shape.vocabulary, (2, 70), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = exported(tokens).logits
        actual = llama.logits(llama.run(llama.embed(tokens), range(shape.sublayers)))
    assert read_shape == shape
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_tokenizer_adds_bos_splits_digits_and_comes_back(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Through AutoTokenizer, as a user loads it."""
    shape = tiny_shape(tokenizer)
    write_checkpoint(tmp_path / "model", random_weights(shape), shape, tokenizer)
    loaded = AutoTokenizer.from_pretrained(tmp_path / "model")
    ids = loaded("4827\n        indented")["input_ids"]
    assert ids[0] == loaded.bos_token_id
    assert loaded.convert_ids_to_tokens(ids)[1:5] == ["4", "8", "2", "7"]
    assert loaded.decode(ids, skip_special_tokens=True) == "4827\n        indented"
    chat = loaded.apply_chat_template([{"role": "user", "content": "Why?"}], tokenize=False)
    assert chat == "<|bos|>Question: Why?\nAnswer:"


@pytest.mark.parametrize("length", [64, 100, 200])
def test_blocked_attention_equals_scaled_dot_product_attention(length: int) -> None:
    """Lengths within, across and off the block size."""
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(2, 4, length, 16, generator=generator)
    keys, values = (torch.randn(2, 2, length, 16, generator=generator) for _ in range(2))
    expected = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(causal_attention(queries, keys, values), expected)


def test_orthogonalize_brings_singular_values_near_one() -> None:
    """Five iterations bring them into Muon's usual band."""
    matrices = torch.randn(3, 64, 32, generator=torch.Generator().manual_seed(0))
    singular = torch.linalg.svdvals(orthogonalize(matrices).float())
    assert singular.min() > 0.3
    assert singular.max() < 1.3


OBJECTIVES = [
    SubsetObjective,
    DistilledSubsetObjective,
    MutualHalfDepthObjective,
    EarlyExitObjective,
    MutualExitObjective,
]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_interrupted_phase_ends_where_an_uninterrupted_one_does(tmp_path: Path, objective: type[Objective]) -> None:
    """A checkpoint holds all that the next step depends on."""
    shape = Shape(vocabulary=64, layers=8, hidden=32, heads=4, mlp=48)
    mixer = Mixer({name: torch.arange(2000) % 61 + 3 for name in MIXTURE}, bos=0, seed=0)

    def train(work: Path, *stages: int) -> dict[str, torch.Tensor]:
        work.mkdir(exist_ok=True)
        settings = Settings(shape, Rates(), 0, torch.device("cpu"), False, work)
        for steps in stages:
            phase = Phase("phase", objective, (Stage(steps, 4, 16),), mixture=MIXTURE)
            checkpoint = train_phase(phase, mixer, initial_checkpoint(settings), settings)
        return checkpoint["masters"]

    whole, resumed = train(tmp_path / "whole", 6), train(tmp_path / "resumed", 3, 6)
    for name, weight in whole.items():
        torch.testing.assert_close(resumed[name], weight)


@pytest.mark.parametrize("mutual", [False, True])
def test_the_divergence_teaches_the_full_model_only_where_it_is_mutual(mutual: bool) -> None:
    """With the full model's states as the only leaf, its gradient without the loss's own is the divergence's."""
    generator = torch.Generator().manual_seed(3)
    hidden_states, draft_states = (torch.randn(2, 5, 8, generator=generator, requires_grad=True) for _ in range(2))
    embedding, targets = torch.randn(11, 8, generator=generator), torch.zeros(2, 5, dtype=torch.long)
    _, divergence = distilled_loss(hidden_states, draft_states, torch.ones(8), embedding, targets, 1e-5, mutual)
    gradients = torch.autograd.grad(divergence, [hidden_states, draft_states], allow_unused=True)
    assert [gradient is not None and bool(gradient.any()) for gradient in gradients] == [mutual, True]


def test_a_blend_is_the_mean_of_two_phases(tmp_path: Path) -> None:
    """A quarter of the earlier phase, three quarters of the last one; without a blend the last one's as they are."""
    last = {"masters": {"weight": torch.tensor([4.0, 8.0])}}
    torch.save({"masters": {"weight": torch.tensor([0.0, 4.0])}}, tmp_path / "earlier.pt")
    phases = (Phase("last", SubsetObjective, (Stage(1, 1, 1),)),)
    assert blend(Recipe(phases, "earlier", 0.25), last, tmp_path)["weight"].tolist() == [3.0, 7.0]
    assert blend(Recipe(phases), last, tmp_path) is last["masters"]


def test_skip_sets_and_exits_are_measured_against_the_full_model(tokenizer: Tokenizer) -> None:
    """Two branches that write nothing are found and cost nothing."""
    shape = tiny_shape(tokenizer)
    weights = random_weights(shape)
    stacked = {name: list(w) if w.dim() > 1 and name != "embedding" else [w] for name, w in weights.items()}
    for part in stacked["down"][1:2] + stacked["out"][2:3]:
        part.zero_()
    llama = Llama(shape, stacked, compiled=False)
    text = encode_text(tokenizer, random.Random(0).sample(TEXTS, 20), window=64)
    with torch.no_grad():
        assert sorted(choose_skip_set(llama, text, 2)) == [3, 4]
        assert skip_agreement(llama, text, {3, 4}) == 1.0
        assert set(exit_agreement(llama, text)) == {1, 2, 3}
    assert text.bytes == sum(len(document.encode()) for document in random.Random(0).sample(TEXTS, 20))


CHECKPOINT = Path(__file__).parents[1] / "lab" / "selfspec_lab" / "checkpoints" / "tiny"


def test_renewed_samples_start_from_own_prompts_and_keep_the_figures(tmp_path: Path) -> None:
    """The card shows the new samples; neither its text before them nor any figure changes."""
    folder = shutil.copytree(CHECKPOINT, tmp_path / "tiny")
    before = json.loads((CHECKPOINT / "evaluation.json").read_text(encoding="utf-8"))
    quoted = {"prompt": "A sentence of another text.", "completion": " It goes on.", "well_formed": True}
    (folder / "evaluation.json").write_text(json.dumps({**before, "samples": {"math": [quoted]}}), encoding="utf-8")
    renew_samples(folder, samples=1)
    after = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    assert {**after, "samples": None} == {**before, "samples": None}
    prompts = {name: [sample["prompt"] for sample in samples] for name, samples in after["samples"].items()}
    assert prompts == {name: [own[0]] for name, own in PROMPTS.items()}
    renewed, bundled = ((each / "README.md").read_text(encoding="utf-8") for each in (folder, CHECKPOINT))
    assert renewed.split("## Samples")[0] == bundled.split("## Samples")[0]
    assert "another text" not in renewed
    assert all(
        f"{samples[0]['prompt']}>>>{samples[0]['completion']}" in renewed for samples in after["samples"].values()
    )


def test_the_form_of_held_out_text_is_counted_without_the_text() -> None:
    """Only the first documents are continued, and only counts come back."""
    held_out = [
        "Question: How many legs have two cows?\nAnswer: They have 2*4=<<2*4=8>>8 legs.\n#### 8",
        "not asked for",
    ]
    form = Writer(CHECKPOINT).form(Domain("math", [], held_out), 1)
    assert form["documents"] == 1
    assert set(form) == {"documents", "well_formed"}
    assert form["well_formed"] in (0, 1)


def test_an_interrupted_head_goes_on_where_it_was(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, from the newest checkpoint; one of another run is refused."""
    shape = tiny_shape(tokenizer)
    write_checkpoint(tmp_path / "model", random_weights(shape), shape, tokenizer)
    read, _, _ = read_checkpoint(tmp_path / "model")
    weights = {name: [part.bfloat16() for part in parts] for name, parts in read.items()}
    stream = torch.tensor(tokenizer.encode("".join(TEXTS)).ids)
    mixer = Mixer(dict.fromkeys(("math", "code", "prose"), stream), tokenizer.token_to_id("<|bos|>"), 0)
    llama, stage = Llama(shape, weights, compiled=False), Stage(4, 2, 32)
    whole = train_head(llama, mixer, stage, tmp_path / "whole.pt")
    monkeypatch.setattr(mtp, "STEPS_BETWEEN_CHECKPOINTS", 2)
    batch, count = mixer.batch, itertools.count()

    def interrupted(*given: Any) -> Any:
        if next(count) == 3:
            raise KeyboardInterrupt
        return batch(*given)

    monkeypatch.setattr(mixer, "batch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train_head(llama, mixer, stage, tmp_path / "head.pt")
    assert torch.load(tmp_path / "head.pt")["step"] == 2
    rest = train_head(llama, mixer, stage, tmp_path / "head.pt")
    assert next(count) == 6, "two steps were repeated, not four"
    assert all(torch.equal(rest[name], part) for name, part in whole.items())
    with pytest.raises(ValueError, match="of another model, --seed or --steps"):
        train_head(llama, mixer, stage, tmp_path / "head.pt", steps=5)


def test_a_head_is_read_as_it_was_written(tokenizer: Tokenizer) -> None:
    """Its tensors have the names of a checkpoint."""
    shape = tiny_shape(tokenizer)
    llama = Llama(shape, {name: [*part] for name, part in random_weights(shape).items()}, compiled=False)
    head = {name: part.bfloat16().float() for name, part in initial_head(llama).items()}
    read = from_checkpoint(to_checkpoint(head, shape))
    assert read.keys() == head.keys()
    assert all(torch.equal(read[name], part) for name, part in head.items())


def test_most_rows_are_gone_on_with_by_the_model(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Three of four, after their first tokens, greedily; the last one is as it was drawn."""
    shape = tiny_shape(tokenizer)
    write_checkpoint(tmp_path / "model", random_weights(shape), shape, tokenizer)
    stream = torch.tensor(tokenizer.encode("".join(TEXTS)).ids)
    mixer = Mixer(dict.fromkeys(("math", "code", "prose"), stream), tokenizer.token_to_id("<|bos|>"), 0)
    engine = Engine.from_pretrained(str(tmp_path / "model"), method="autoregressive", dtype="float32")
    drawn, _ = mixer.batch(3, 4, 24, MIXTURE)
    inputs, targets = OwnTexts(mixer, engine, prompt=8).batch(3, 4, 24, MIXTURE)
    assert inputs.shape == targets.shape == (4, 24)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(inputs[:, :8], drawn[:, :8])
    assert torch.equal(inputs[3], drawn[3])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    for row, target in zip(inputs[:3], targets[:3], strict=True):
        with torch.no_grad():
            wanted = model(row[None]).logits[0].argmax(-1)
        assert torch.equal(target[7:], wanted[7:])


def test_a_trained_head_drafts_as_it_did_in_training(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Its passes give the drafts of ``--method mtp``, and training brings it nearer to the model."""
    shape = tiny_shape(tokenizer)
    write_checkpoint(tmp_path / "model", random_weights(shape), shape, tokenizer)
    weights, _, _ = read_checkpoint(tmp_path / "model")
    llama = Llama(shape, weights, compiled=False)
    stream = torch.tensor(tokenizer.encode("".join(TEXTS)).ids)
    mixer = Mixer(dict.fromkeys(("math", "code", "prose"), stream), tokenizer.token_to_id("<|bos|>"), 0)
    half = Llama(shape, {name: [part.bfloat16() for part in parts] for name, parts in weights.items()}, compiled=False)
    head = train_head(half, mixer, Stage(3, 2, 32), tmp_path / "head.pt")
    tensors = load_file(tmp_path / "model" / "model.safetensors") | to_checkpoint(head, shape)
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    engine = Engine(model, method="mtp", settings={"draft_length": 3, "threshold": 0.0})
    prompt = stream[:20].tolist()
    text = [*prompt, *engine.generate(prompt, max_new_tokens=1).token_ids]
    with torch.no_grad():
        states = llama.run(llama.embed(torch.tensor([text])), range(shape.sublayers))
        states = rms_norm(states, llama.weights["final_norm"][0], shape.epsilon)[:, :20]
        exact = {name: part.bfloat16().float() for name, part in head.items()}
        own = Head(shape, exact, llama.weights["embedding"][0])
        drafted: list[int] = []
        for _ in range(3):
            tokens = torch.tensor([[*text[1:], *drafted]])
            padded = torch.cat([states, states[:, : len(drafted)]], dim=1)
            output = own.passes(padded, tokens, len(drafted) + 1)[-1][:, 19]
            drafted.append(int(functional.linear(output, llama.weights["embedding"][0]).argmax()))
    found, _ = read_text(engine.target, prompt, engine.method.needs, max_new_tokens=8)
    drafter = engine.method.begin(found.prefill)
    with torch.inference_mode():
        (proposal,) = propose(engine.target, [found], [drafter.plan()])
    assert proposal.token_ids.tolist() == drafted
