"""Rows without a token beside a verification: never accepted, changing nothing, and chosen from as the model would."""

from typing import Any

import pytest
import torch

from helpers.kernels import needs_kernels
from helpers.low_bit_model import random_model
from helpers.models import build, prompt
from selfspec import Engine
from selfspec.decoding import verification
from selfspec.decoding.draft import Draft, Proposal, RunRound, TokenDraft
from selfspec.decoding.drafter import Drafter, Feedback, Needs, Prefill
from selfspec.methods.base import Method
from selfspec.model.rope import Rope
from selfspec.runtimes.costs.rows import MOST_PROBES
from selfspec.sampling.acceptance import TokenTree

LENGTH = 40


class Probing(Method):
    """Verifies what the probe of the last round gave, and probes again; after the rows that ``probed`` names."""

    name = "probing"
    summary = "probes in every round"
    source = "this test"
    probed: tuple[int, ...] = (0, 1)

    mask_embedding: torch.Tensor | None = None

    @property
    def needs(self) -> Needs:
        return Needs(sibling_rows=2)

    def begin(self, prefill: Prefill) -> Drafter:
        return _Prober(self.probed, self.mask_embedding)


class ChainProbing(Probing):
    """One probe, after the last row: rows are a chain, which runs natively."""

    name = "chain-probing"
    probed = (-1,)


class _Prober(Drafter):
    def __init__(self, probed: tuple[int, ...], mask_embedding: torch.Tensor | None) -> None:
        self._probed, self._known, self._blank = probed, (), mask_embedding
        self.seen: list[tuple[int, tuple[int, float]]] = []
        self.right = 0
        self.written = 0
        SEEN.append(self)

    def plan(self) -> Draft:
        rows = tuple(row % (1 + len(self._known)) for row in self._probed if row <= len(self._known))
        return TokenDraft(self._known, TokenTree.chain(len(self._known)), rows)

    @property
    def mask_embedding(self) -> torch.Tensor | None:
        return self._blank

    def learn(self, feedback: Feedback) -> None:
        self.right += feedback.accepted
        self.written += len(feedback.acceptance.token_ids)
        self._known = ()
        if feedback.probed_token is not None:
            self.seen.append((self.written, feedback.probed_token))
            self._known = (feedback.probed_token[0],)


SEEN: list[_Prober] = []


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    SEEN.clear()


@pytest.mark.parametrize("method", [Probing, ChainProbing])
@pytest.mark.parametrize("runtime", ["eager", pytest.param("auto", marks=needs_kernels)])
@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 3.0, "seed": 7}, {"temperature": 1.0, "top_p": 0.9, "seed": 7}]
)
def test_probes_change_nothing(method: type[Method], runtime: str, sampling: dict[str, Any]) -> None:
    model = random_model()
    options: dict[str, Any] = {"max_new_tokens": LENGTH, "ignore_eos": True, **sampling}
    plain = Engine(model, method="autoregressive", runtime=runtime).generate(prompt(12), **options)
    result = Engine(model, method=method, runtime=runtime).generate(prompt(12), **options)
    assert result.token_ids == plain.token_ids
    assert sum(record.probes for record in result.rounds) > LENGTH / 2
    assert len(SEEN[0].seen) > LENGTH / 4
    assert result.accepted == SEEN[0].right


@pytest.mark.parametrize("runtime", ["eager", pytest.param("auto", marks=needs_kernels)])
@pytest.mark.parametrize("method", [Probing, ChainProbing])
@pytest.mark.parametrize("zero", [True, False])
def test_what_follows_a_probe_is_what_the_model_expects_after_its_embedding(
    method: type[Probing], runtime: str, zero: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, given = build("llama"), prompt(12)
    if runtime == "auto":
        model = random_model()
    options: dict[str, Any] = {"max_new_tokens": LENGTH, "ignore_eos": True}
    plain = Engine(model, method="autoregressive", runtime=runtime).generate(given, **options)
    last = plain.token_ids[LENGTH // 2]  # after which the model writes one of the tokens of the text
    mask_embedding = model.get_input_embeddings().weight.detach()[last].clone()
    monkeypatch.setattr(method, "mask_embedding", None if zero else mask_embedding)
    result = Engine(model, method=method, runtime=runtime).generate(given, **options)
    text = [*given, *result.token_ids]
    others = 0
    for written, (token, probability) in SEEN[0].seen:
        # The probe stood where the last committed token is now.
        known = torch.tensor([text[: len(given) + written]])
        embedded = model.get_input_embeddings()(known)
        blank = torch.zeros_like(embedded[:, :1]) if zero else mask_embedding[None, None]
        with torch.inference_mode():
            logits = model(inputs_embeds=torch.cat([embedded, blank], 1)).logits[0, -1].float()
        probabilities = logits.softmax(-1)
        others += int(logits.argmax()) == text[len(known[0])]
        probabilities[text[len(known[0])]] = 0.0  # the probe stood in its place
        assert token == probabilities.argmax()
        assert probability == pytest.approx(float(probabilities.max()), rel=1e-3)
    assert len(SEEN[0].seen) > others
    assert zero or others or runtime == "auto"


@pytest.mark.parametrize("method", [Probing, ChainProbing])
def test_without_a_seed_no_probe_is_accepted(method: type[Method]) -> None:
    options: dict[str, Any] = {"max_new_tokens": LENGTH, "ignore_eos": True, "acceptance": "speculative"}
    result = Engine(random_model(), method=method).generate(prompt(12), temperature=2.0, **options)
    assert min(result.token_ids) >= 0
    assert len(result.token_ids) == LENGTH


def test_rows_of_a_proposal_are_its_tree_and_its_probes() -> None:
    chain = Proposal(torch.tensor([4, 5]), TokenTree.chain(2), probes=(2,))
    assert chain.rows.is_chain
    assert (len(chain.rows), chain.drafted) == (3, 2)
    tree = Proposal(torch.tensor([4, 5]), TokenTree.chain(2), probes=(0, 2))
    assert tree.rows.parents == (-1, 0, -1, 1)
    assert tree.drafted == 2


def test_where_little_may_be_written_nothing_is_probed() -> None:
    draft = TokenDraft((4, 5), TokenTree.chain(2), (0, 2))
    assert draft.cut(5, 7) is draft
    assert draft.cut(1, 3).probes == ()
    assert TokenDraft((), TokenTree.chain(0), (0,)).cut(1, 2).probes == ()


class Following(Method):
    """Knows the text, in chains of seven tokens with a probe after the last, all in one native run."""

    name = "following"
    summary = "knows the text"
    source = "this test"
    text: tuple[int, ...] = ()

    @property
    def needs(self) -> Needs:
        return Needs(sibling_rows=MOST_PROBES)

    def begin(self, prefill: Prefill) -> Drafter:
        return _Follower(self.text)


class _Follower(Drafter):
    def __init__(self, text: tuple[int, ...]) -> None:
        self._text, self._written = text, 1

    def plan(self) -> TokenDraft:
        known = self._text[self._written :][:7]
        return TokenDraft(known, TokenTree.chain(len(known)), (len(known),), follow=self._next)

    def _next(self, played: RunRound) -> TokenDraft:
        self._written += len(played.token_ids)
        return self.plan()


@needs_kernels
def test_a_probe_after_the_last_row_of_a_run_has_a_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given, tokens = random_model(), prompt(12), verification.MOST_TOKENS
    options: dict[str, Any] = {"max_new_tokens": 2 * tokens, "ignore_eos": True}
    plain = Engine(model, method="autoregressive").generate(given, **options)
    monkeypatch.setattr(Following, "text", tuple(plain.token_ids))
    monkeypatch.setattr(verification, "LONGEST_SECONDS", 60.0)
    reserved: list[int] = []
    reserve = Rope.reserve
    monkeypatch.setattr(
        Rope, "reserve", lambda self, like, length: (reserved.append(length), reserve(self, like, length))[1]
    )
    result = Engine(model, method=Following).generate(given, **options)
    assert result.token_ids == plain.token_ids
    written = [len(record.token_ids) for record in result.rounds]
    probed = [sum(written[: index + 1]) for index, record in enumerate(result.rounds) if record.probes]
    assert tokens in probed, probed
    assert len(given) + tokens + 1 in reserved, reserved
