"""A draft in one call drafts bit for bit what it drafts forward by forward, alone and beside others."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    LogitsProcessor,
    MistralConfig,
    Qwen2Config,
    RepetitionPenaltyLogitsProcessor,
    SmolLM3Config,
)

from helpers.drafts import counted_forwards
from helpers.kernels import needs_kernels
from helpers.low_bit_model import SIZES, SUBLAYERS
from helpers.models import prompt
from selfspec.decoding.draft import ConfidenceThreshold, Guess, LayerDraft, Proposal
from selfspec.decoding.drafter import Needs
from selfspec.decoding.request import CHOOSER, MANY_ROWS, PROCESSED, REJECTION
from selfspec.decoding.request import Sequence as Generated
from selfspec.decoding.round import propose
from selfspec.decoding.verification import verify
from selfspec.errors import InvalidParameterError
from selfspec.model.kept import KeptSet
from selfspec.runtimes.chain import NATIVE, Path
from selfspec.runtimes.changes import ChangedLogits
from selfspec.runtimes.kernels import row_limit
from selfspec.runtimes.native import NativeForward
from selfspec.runtimes.precision import Precision
from selfspec.runtimes.target import Target
from selfspec.sampling.acceptance import TokenTree
from selfspec.sampling.processors import build_processors
from selfspec.sampling.rules import Coupled, Greedy, Rule, Speculative, seeded_generator
from selfspec.types import SamplingParams
from selfspec_lab.testing import read_text

pytestmark = needs_kernels

LENGTH = 8
TEXT = 24
FULL = KeptSet.full(SUBLAYERS)
DRAFTS = {
    "low-bit": LayerDraft(FULL, LENGTH, precision=Precision.of(4)),
    "low-bit, stopping": LayerDraft(FULL, LENGTH, ConfidenceThreshold(0.1), precision=Precision.of(8)),
    "whole": LayerDraft(FULL, LENGTH),
    "early exit": LayerDraft(KeptSet.early_exit(2, SUBLAYERS), LENGTH),
    "skipped middle": LayerDraft(KeptSet((0, 1, 2, 5, 7), SUBLAYERS), LENGTH, ConfidenceThreshold(0.05)),
    "skipped start": LayerDraft(KeptSet((1, 4, 6), SUBLAYERS), LENGTH),
}
RULES: dict[str, Callable[[], Rule]] = {
    "greedy": Greedy,
    "seed": lambda: Coupled(3),
    "greedy, penalties": Greedy,
    "seed, penalties and mask": lambda: Coupled(3),
}
PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "logit_bias": {3: 2.0, 7: -1.5, 90: 3.0, 91: -100.0},
    "min_tokens": 5,
}
SAMPLING = {
    "greedy": SamplingParams(),
    "seed": SamplingParams(temperature=0.7),
    "greedy, penalties": SamplingParams(**PENALTIES),
    "seed, penalties and mask": SamplingParams(temperature=0.7, top_p=0.95, **PENALTIES),
}
ENDS = {5, 90, 1000}
OTHERS = (RepetitionPenaltyLogitsProcessor(1.3),)
FAMILIES: dict[str, Callable[..., Any]] = {
    "llama": LlamaConfig,
    "window": lambda **sizes: MistralConfig(**sizes, sliding_window=12),
    "two windows": lambda **sizes: Qwen2Config(
        **sizes,
        layer_types=["sliding_attention", "full_attention"] * 2,
        use_sliding_window=True,
        sliding_window=12,
    ),
    "some without rope": lambda **sizes: SmolLM3Config(**sizes, no_rope_layer_interval=2, pad_token_id=None),
    "scaled embeddings, capped logits": lambda **sizes: Gemma2Config(**sizes, head_dim=32, final_logit_softcapping=5.0),
    "scaled embeddings and logits": lambda **sizes: GraniteConfig(
        **sizes, embedding_multiplier=3.0, logits_scaling=1.7
    ),
}
WATCHED = (0, 1, 2, SUBLAYERS)


class Modular(LogitsProcessor):
    """Forbids a third of the tokens, by the sum of those written."""

    vocab_size = SIZES["vocab_size"]

    def forbidden(self, output: Sequence[int]) -> torch.Tensor:
        return (torch.arange(self.vocab_size) + sum(output)) % 3 == 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.masked_fill(self.forbidden(input_ids[0, TEXT:].tolist()), -torch.inf)

    def allowed_after(self, output: Sequence[int], path: Sequence[int]) -> Any:
        return np.packbits(~self.forbidden([*output, *path]).numpy(), bitorder="little")

    def forced_after(self, output: Sequence[int]) -> Sequence[int]:
        return ()


@cache
def target(family: str = "llama", dtype: torch.dtype = torch.float32) -> Target:
    torch.manual_seed(0)
    return Target(AutoModelForCausalLM.from_config(FAMILIES[family](**SIZES)).eval().to(dtype))


@contextmanager
def forward_by_forward() -> Iterator[None]:
    """No draft runs as a chain: the oracle."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NativeForward, "chain_path", lambda *_: Path("an oracle"))
        yield


def context_for(on: Target, rule: str, room: int = 20, seed: int = 0) -> Generated:
    """A text of 24 tokens, and the same token after it by whichever rule."""
    mask: Any = Modular() if rule.endswith("mask") else None
    return sampling(on, RULES[rule](), SAMPLING[rule], room, seed, mask)


def sampling(
    on: Target, rule: Rule, params: SamplingParams, room: int = 20, seed: int = 0, mask: Any = None
) -> Generated:
    processor, needs, text = build_processors(params, TEXT, ENDS, mask), Needs(sibling_rows=12), prompt(TEXT, seed)
    context, _ = read_text(on, text, needs, max_new_tokens=room, rule=rule, processor=processor)
    with torch.inference_mode():
        context.pending.fill_(7)
    if context._changed is not None and processor.changes is not None:
        context._changed = ChangedLogits(processor.changes, text, room)
        context._changed.write([7])
        context.drawing = context._find_drawing()
    return context


def drafted(on: Target, draft: LayerDraft, context: Generated) -> tuple[Proposal, list[int]]:
    """The draft, and the rows of each forward that was run from Python."""
    with torch.inference_mode(), counted_forwards() as forwards:
        (proposal,) = propose(on, [context], [draft])
    return proposal, forwards


def in_a_chain(on: Target, draft: LayerDraft, context: Generated) -> Proposal:
    proposal, forwards = drafted(on, draft, context)
    assert proposal.path == NATIVE
    assert not forwards
    return proposal


def one_by_one(on: Target, draft: LayerDraft, context: Generated) -> Proposal:
    with forward_by_forward():
        proposal, forwards = drafted(on, draft, context)
    assert len(forwards) == proposal.drafted - proposal.guessed
    return proposal


def assert_same(proposal: Proposal, expected: Proposal) -> None:
    assert expected.drafted > 0
    assert torch.equal(proposal.token_ids, expected.token_ids)
    assert proposal.token_ids.dtype == torch.long
    assert proposal.tree == expected.tree
    assert proposal.confidences == expected.confidences
    assert proposal.guessed == expected.guessed
    assert proposal.threshold == expected.threshold
    assert proposal.scores is expected.scores is None


def guess_from(tokens: Sequence[int], most: int = LENGTH) -> Guess:
    """Guesses that the draft is these tokens."""
    return lambda drafted: tokens[len(drafted) : len(drafted) + most]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", DRAFTS)
def test_a_chain_is_its_forwards_one_by_one(name: str, rule: str, dtype: torch.dtype) -> None:
    on, draft = target(dtype=dtype), DRAFTS[name]
    chained, single = context_for(on, rule), context_for(on, rule)
    assert_same(in_a_chain(on, draft, chained), one_by_one(on, draft, single))
    of_chain, of_single = ([*each.cache.keys, *each.cache.values] for each in (chained, single))
    assert all(torch.equal(one, other) for one, other in zip(of_chain, of_single, strict=True))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("family", FAMILIES)
def test_of_every_family(family: str, rule: str) -> None:
    """The text is longer than the windows."""
    on = target(family)
    for draft in (DRAFTS["low-bit"], DRAFTS["skipped middle"]):
        assert_same(in_a_chain(on, draft, context_for(on, rule)), one_by_one(on, draft, context_for(on, rule)))


def test_seeds_draw_different_tokens() -> None:
    rules = "greedy", "seed"
    greedy, drawn = (in_a_chain(target(), DRAFTS["low-bit"], context_for(target(), rule)) for rule in rules)
    assert not torch.equal(greedy.token_ids, drawn.token_ids)


@given(data=st.data())
def test_any_guesses_change_nothing(data: st.DataObject) -> None:
    """Right up to somewhere, then wrong, for a while; also near the end of the output, and after it."""
    on, draft = target(), DRAFTS[data.draw(st.sampled_from(sorted(DRAFTS)), label="draft")]
    rule = data.draw(st.sampled_from(sorted(RULES)), label="rule")
    room = data.draw(st.integers(3, 12), label="room")
    expected = one_by_one(on, draft, context_for(on, rule, room))
    truth = [*expected.token_ids.tolist(), 1, 2, 3]
    right = data.draw(st.lists(st.booleans(), min_size=len(truth), max_size=len(truth)), label="right")
    mixed = [token if is_right else (token + 7) % 128 for token, is_right in zip(truth, right, strict=True)]
    guessing = replace(draft, guess=guess_from(mixed, data.draw(st.integers(0, LENGTH), label="most")))
    proposal = in_a_chain(on, guessing, context_for(on, rule, room))
    assert_same(proposal, one_by_one(on, guessing, context_for(on, rule, room)))
    assert torch.equal(proposal.token_ids, expected.token_ids)


@given(data=st.data())
def test_chains_beside_each_other(data: st.DataObject) -> None:
    """Sequences of different texts, rules, rooms and guesses share the forwards of one chain."""
    on, draft = target("two windows"), DRAFTS[data.draw(st.sampled_from(["low-bit, stopping", "skipped middle"]))]
    sequence = st.tuples(st.sampled_from(sorted(RULES)), st.integers(3, 12), st.integers(0, 4))
    sequences = data.draw(st.lists(sequence, min_size=2, max_size=5))
    drafts, alone = [], []
    for seed, (rule, room, most) in enumerate(sequences):
        truth = one_by_one(on, draft, context_for(on, rule, room, seed)).token_ids.tolist()
        drafts.append(replace(draft, guess=guess_from([*truth[:3], 5, 6, 7, 8, 9], most)))
        alone.append(in_a_chain(on, drafts[-1], context_for(on, rule, room, seed)))
    contexts = [context_for(on, rule, room, seed) for seed, (rule, room, _) in enumerate(sequences)]
    with torch.inference_mode():
        together = propose(on, contexts, drafts)
    for proposal, expected in zip(together, alone, strict=True):
        assert_same(proposal, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=30)
@given(data=st.data())
def test_verified_in_one_call_they_get_what_they_get_row_by_row(
    family: str, dtype: torch.dtype, data: st.DataObject
) -> None:
    """Chains and trees of different lengths, also empty ones, beside each other; with keys and values."""
    on = target(family, dtype)
    sequence = st.tuples(st.sampled_from(sorted(RULES)), st.lists(st.integers(0, 127), max_size=9))
    sequences = data.draw(st.lists(sequence, min_size=1, max_size=4))
    proposals = [proposal_of(tokens, data.draw(trees(len(tokens)))) for _, tokens in sequences]
    watched = [data.draw(st.sampled_from([(), WATCHED])) for _ in sequences]
    ours, others = ([context_for(on, rule, seed=seed) for seed, (rule, _) in enumerate(sequences)] for _ in range(2))
    with torch.inference_mode():
        outputs = verify(on, ours, proposals, watched)
        with forward_by_forward():
            expected = verify(on, others, proposals, watched)
    for context, other, output, wanted in zip(ours, others, outputs, expected, strict=True):
        assert output is not None
        assert wanted is not None
        assert (output.path.native, wanted.path.native) == (True, False)
        assert output.acceptance == wanted.acceptance
        assert output.logits is not None
        assert wanted.logits is not None
        assert torch.equal(output.logits.values, wanted.logits.values)
        if context._changed is None:
            assert torch.equal(output.logits.best, wanted.logits.best)
        assert torch.equal(output.logits.finite, wanted.logits.finite)
        assert output.logits.finite.all()
        assert output.hidden_states.keys() == wanted.hidden_states.keys()
        for index, states in output.hidden_states.items():
            assert torch.equal(states, wanted.hidden_states[index])
        of_chain, of_rows = ([*each.cache.keys, *each.cache.values] for each in (context, other))
        assert all(torch.equal(one, row) for one, row in zip(of_chain, of_rows, strict=True))


def proposal_of(tokens: Sequence[int], tree: TokenTree | None = None) -> Proposal:
    return Proposal(torch.tensor(tokens, dtype=torch.long), tree or TokenTree.chain(len(tokens)))


def trees(nodes: int) -> st.SearchStrategy[TokenTree]:
    """Chains, and trees of any shape."""
    parents = st.tuples(*(st.integers(-1, node - 1) for node in range(nodes)))
    return st.just(TokenTree.chain(nodes)) | parents.map(TokenTree)


def test_what_cannot_be_verified_in_one_call() -> None:
    """More rows than the kernels take."""
    on, context = target(), context_for(target(), "greedy", room=row_limit(torch.float32, attends=True) + 2)
    for rows, path in ((2, NATIVE), (row_limit(torch.float32, attends=True), MANY_ROWS)):
        with torch.inference_mode():
            (verified,) = verify(on, [context], [proposal_of([1] * rows)], [()])
        assert verified is not None
        assert verified.path == path


def test_what_a_stopping_rule_raises_arrives() -> None:
    class Broken(ConfidenceThreshold):
        def stops(self, confidence: float) -> bool:
            raise ValueError("broken rule")

    with pytest.raises(ValueError, match="broken rule"):
        drafted(target(), replace(DRAFTS["low-bit"], stop=Broken(0.1)), context_for(target(), "greedy"))


@pytest.mark.parametrize(
    ("rule", "params", "path"),
    [
        (Greedy(), SamplingParams(logits_processors=OTHERS), PROCESSED),
        (Coupled(3), SamplingParams(temperature=0.7, top_k=5, logits_processors=OTHERS), PROCESSED),
        (Speculative(seeded_generator(3, "cpu")), SamplingParams(temperature=0.7), REJECTION),
    ],
    ids=["processor", "processor and top-k", "rejection"],
)
def test_what_a_chain_cannot_choose_goes_forward_by_forward(rule: Rule, params: SamplingParams, path: Path) -> None:
    proposal, forwards = drafted(target(), DRAFTS["low-bit"], sampling(target(), rule, params))
    assert proposal.path == path
    assert len(forwards) == proposal.drafted == LENGTH


def test_trees_choosers_and_changing_ropes_go_forward_by_forward() -> None:
    dynamic = LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 2.0})
    torch.manual_seed(0)
    cases = [(target(), replace(DRAFTS["skipped middle"], widths=lambda _: 2))]
    cases += [(Target(AutoModelForCausalLM.from_config(dynamic).eval()), DRAFTS["low-bit"])]
    cases += [(target(), replace(DRAFTS["whole"], choose=lambda logits: (logits.argmax(-1, keepdim=True), False)))]
    for on, draft in cases:
        proposal, forwards = drafted(on, draft, context_for(on, "greedy"))
        assert len(forwards) == proposal.drafted > 0
        assert proposal.path is not None
        assert not proposal.path.native


def test_a_head_with_more_tokens_than_the_embedding_goes_forward_by_forward() -> None:
    """A token that cannot be embedded must not be looked up."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, tie_word_embeddings=False)).eval()
    model.lm_head = torch.nn.Linear(SIZES["hidden_size"], SIZES["vocab_size"] + 8, bias=False)
    on = Target(model)
    for each, native in ((on, False), (target(), True)):
        assert each.at(None).path(FULL.sublayers).native is native


def test_a_hook_on_the_embedding_is_noticed() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).eval()
    on = Target(model)
    in_a_chain(on, DRAFTS["whole"], context_for(on, "greedy"))
    model.model.embed_tokens.register_forward_hook(lambda *_: None)
    proposal, forwards = drafted(on, DRAFTS["whole"], context_for(on, "greedy"))
    assert len(forwards) == proposal.drafted > 0


def best_while_clear(logits: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """Stops where the best two are close."""
    two = logits.topk(2)
    return two.indices[:1], bool(two.values[0] - two.values[1] < 0.05)


@pytest.mark.parametrize("name", ["low-bit", "low-bit, stopping", "skipped middle"])
def test_a_chooser_that_takes_the_best_drafts_what_the_kernels_draft(name: str) -> None:
    """Alone, and with the drafts of others beside it."""
    on, draft = target(), DRAFTS[name]
    expected = in_a_chain(on, draft, context_for(on, "greedy"))
    choosing = replace(draft, choose=lambda logits: (logits.argmax(-1, keepdim=True), False))
    proposal, _ = drafted(on, choosing, context_for(on, "seed"))
    assert proposal.path == CHOOSER
    assert_same(proposal, expected)
    contexts = [context_for(on, rule) for rule in ("greedy", "seed", "greedy")]
    with torch.inference_mode():
        together = propose(on, contexts, [choosing, choosing, draft])
    for each in together:
        assert_same(each, expected)


def test_a_chooser_ends_the_draft() -> None:
    on = target()
    whole, _ = drafted(on, DRAFTS["whole"], context_for(on, "greedy"))
    proposal, forwards = drafted(on, replace(DRAFTS["whole"], choose=best_while_clear), context_for(on, "greedy"))
    assert 0 < proposal.drafted < whole.drafted
    assert len(forwards) == proposal.drafted
    assert torch.equal(proposal.token_ids, whole.token_ids[: proposal.drafted])


def test_a_chooser_drafts_no_tree() -> None:
    with pytest.raises(InvalidParameterError, match="leave widths or choose out"):
        replace(DRAFTS["whole"], choose=best_while_clear, widths=lambda _: 2)
