"""Tokens beside the first known one, in runs: which are accepted, what the cache holds then, and what gives them."""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig, MistralConfig

from helpers.checkpoints import make_tokenizer
from helpers.kernels import needs_kernels
from helpers.low_bit_model import SIZES
from helpers.models import prompt
from helpers.scripted import Scripted
from selfspec import Engine, Generation
from selfspec.decoding import verification
from selfspec.decoding.draft import RunRound, TokenDraft
from selfspec.decoding.drafter import Needs
from selfspec.errors import InvalidParameterError
from selfspec.runtimes.chain import MOST_PROBED
from selfspec.runtimes.costs.rows import MOST_PROBES, MOST_SIBLINGS
from selfspec.runtimes.target import Target
from selfspec.sampling.acceptance import TokenTree
from selfspec.sampling.rules import gumbel_noise

pytestmark = needs_kernels

PROMPT, LENGTH = prompt(21), 40
LATENTS: dict[str, Any] = {
    **{"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 512, "q_lora_rank": 64},
    **{
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 32,
        "v_head_dim": 40,
        "first_k_dense_replace": 3,
    },
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "window": MistralConfig(**SIZES, sliding_window=12),
    "8 bits": LlamaConfig(**SIZES),
    "latents": DeepseekV3Config(**LATENTS),
}
CHOICES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seed": {"temperature": 0.9, "seed": 3},
    "filters": {"temperature": 0.9, "seed": 3, "top_p": 0.9, "top_k": 20},
    "penalties": {"temperature": 0.9, "seed": 3, "repetition_penalty": 1.2, "presence_penalty": 0.3},
    "grammar": {"regex": "[a-z0-9 ]{60}"},
}


@cache
def build(name: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(30)  # so that a text is not one token over and over
    return model.to(dtype)


@dataclass
class Known:
    """Drafts a chain of the text, whose first token is wrong in every second round, and siblings, one of them right.

    Probes stand after the pending row, after the chain, and after the right sibling. ``runs`` says whether rounds
    follow each other in a call.
    """

    text: tuple[int, ...]
    runs: bool
    rounds: int = 0
    written: int = 1
    played: list[tuple[int, RunRound]] = field(default_factory=list)

    def plan(self, written: int) -> TokenDraft:
        self.written, self.rounds = written, self.rounds + 1
        right = self.text[written : written + 3]
        if not right:
            return TokenDraft((), TokenTree.chain(0), follow=self.follow if self.runs else None)
        if self.rounds % 2:
            wrong = [(right[0] + by) % SIZES["vocab_size"] for by in range(1, MOST_SIBLINGS + 1)]
            chain, siblings = (wrong[0], *right[1:]), [*wrong[1:], right[0]]
        else:
            chain, siblings = right, [(right[0] + by) % SIZES["vocab_size"] for by in (1, 2)]
        probes = tuple(sorted({0, len(chain), len(chain) + len(siblings)}))
        tree = TokenTree.chain(len(chain), len(siblings))
        return TokenDraft((*chain, *siblings), tree, probes, self.follow if self.runs else None)

    def follow(self, played: RunRound) -> TokenDraft:
        written = self.written + len(played.token_ids)
        self.played.append((written, played))
        return self.plan(written)


def generate(known: Known, target: Target, **options: Any) -> Generation:
    needs = Needs(sibling_rows=MOST_SIBLINGS + MOST_PROBES)
    method = Scripted(target, lambda written: known.plan(len(written)), needs)
    return engine(target, method).generate(PROMPT, max_new_tokens=LENGTH, ignore_eos=True, **options)


def engine(target: Target, method: Any) -> Engine:
    bits = 8 if target.cache_bits == 8 else None
    return Engine(target.model, make_tokenizer(target.vocab_size), method=method, cache_bits=bits)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_siblings_write_what_plain_decoding_writes(
    name: str, dtype: torch.dtype, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "LONGEST_SECONDS", 60.0)
    options = CHOICES[choice]
    target = Target(build(name, dtype), cache_bits=8 if name == "8 bits" else None)
    text = (
        engine(target, "autoregressive").generate(PROMPT, max_new_tokens=LENGTH, ignore_eos=True, **options).token_ids
    )
    run, alone = Known(text, runs=True), Known(text, runs=False)
    ours, wanted = generate(run, target, **options), generate(alone, target, **options)
    assert ours.token_ids == wanted.token_ids == text
    assert len(run.played) > 4  # rounds of runs
    by_sibling = [own for _, own in run.played if own.siblings and own.token_ids[0] in own.siblings]
    by_chain = [own for _, own in run.played if own.siblings and own.accepted > 1]
    assert by_sibling
    assert by_chain
    assert all(own.accepted == 1 and len(own.token_ids) == 2 for own in by_sibling)
    assert all(own.probed for own in by_sibling if own.probes)
    assert ours.accepted == wanted.accepted
    assert [own.token_ids for own in ours.rounds] == [own.token_ids for own in wanted.rounds]
    assert [own.candidates for own in ours.rounds] == [own.candidates for own in wanted.rounds]
    assert ours.origins == wanted.origins


@pytest.mark.parametrize("choice", ["greedy", "seed"])
def test_what_may_come_by_a_probe_is_what_the_model_would_choose_from_after_it(
    choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "LONGEST_SECONDS", 60.0)
    options, target = CHOICES[choice], Target(build("llama", torch.float32))
    text = (
        engine(target, "autoregressive").generate(PROMPT, max_new_tokens=LENGTH, ignore_eos=True, **options).token_ids
    )
    known = Known(text, runs=True)
    generate(known, target, **options)
    seen = 0
    for written, played in known.played:
        if not played.probed:
            continue
        seen += 1
        given = torch.tensor([[*PROMPT, *text[: written - 1]]])
        embedded = target.model.get_input_embeddings()(given)
        with torch.inference_mode():
            blank = torch.zeros_like(embedded[:, :1])
            logits = target.model(inputs_embeds=torch.cat([embedded, blank], 1)).logits[0, -1].float()
        logits = logits.clone()
        pending, values = text[written - 1], logits.clone()
        if choice == "seed":
            position = torch.tensor([len(PROMPT) + written])
            values = logits / options["temperature"] + gumbel_noise(options["seed"], position, len(logits))[0].float()
        found = [token for token, _ in played.probed]
        assert len(found) == len(set(found)) == MOST_PROBED
        assert pending not in found
        chosen = int(values.argmax())
        logits[pending] = values[pending] = -torch.inf
        wanted = values.argsort(descending=True)[: MOST_PROBED + 1].tolist()
        # Where the probe chose the pending token, the first of the others is the one of the largest logit.
        assert found[0] == (chosen if chosen != pending else int(logits.argmax()))
        assert found[1:] == [each for each in wanted if each != found[0]][: MOST_PROBED - 1]
        chances = [chance for _, chance in played.probed]
        assert all(0 < chance <= 1 for chance in chances)
        assert chances[1:] == sorted(chances[1:], reverse=True)
    assert seen > 4


def test_what_is_accepted_of_a_round_with_siblings() -> None:
    draft = TokenDraft((4, 5, 6, 7), TokenTree.chain(2, 2), (0, 3))
    assert RunRound(draft, (4, 5), (4, 5, 9), siblings=(6, 7)).accepted == 2
    assert RunRound(draft, (4, 5), (7, 9), siblings=(6, 7)).accepted == 1
    assert RunRound(draft, (4, 5), (8,), siblings=(6, 7)).accepted == 0
    assert RunRound(draft, (4, 5), (8,), (0, 3), siblings=(6, 7)).rows == 7


def test_a_run_verifies_chains_and_siblings_of_their_first_token() -> None:
    draft = TokenDraft((4, 5, 6, 7), TokenTree.chain(2, 2), (0, 3), follow=lambda _: None)
    assert draft.tree.chained == 2
    assert TokenTree.chain(2).chained == 2
    for parents in ((-1, 0, 0), (-1, -1, 0), (-1, 0, -1, 2)):
        with pytest.raises(InvalidParameterError, match="leave follow out"):
            TokenDraft((4,) * len(parents), TokenTree(parents), follow=lambda _: None)


def test_siblings_and_probes_need_slots() -> None:
    draft = TokenDraft((4, 5, 6, 7), TokenTree.chain(2, 2), (0, 3))
    assert draft.cut(2, 6) is draft
    assert draft.cut(2, 5).probes == ()
    shorter = draft.cut(1, 6)
    assert (shorter.token_ids, shorter.tree.parents, shorter.probes) == ((4, 6, 7), (-1, -1, -1), ())
