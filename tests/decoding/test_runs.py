"""Runs write what single rounds write, end where they end, and give way to others."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
)

from helpers.checkpoints import make_tokenizer
from helpers.kernels import needs_kernels
from helpers.low_bit_model import SIZES
from helpers.models import prompt
from helpers.scripted import Scripted
from selfspec import Engine
from selfspec.decoding import verification
from selfspec.decoding.draft import NoDraft, RunRound, TokenDraft
from selfspec.decoding.drafter import Needs
from selfspec.errors import InvalidParameterError, NonFiniteLogitsError
from selfspec.planning.plans import PADDING
from selfspec.runtimes.native import NativeForward
from selfspec.runtimes.target import Target
from selfspec.runtimes.threads import THREADS
from selfspec.sampling.acceptance import TokenTree
from selfspec.types import Generation

pytestmark = needs_kernels

PROMPT = prompt(21)
CONFIGS = {"llama": LlamaConfig(**SIZES), "window": MistralConfig(**SIZES, sliding_window=12)}
CHOICES: dict[str, dict[str, Any]] = {
    "greedy": {"ignore_eos": True},
    "seed": {"temperature": 0.9, "seed": 3, "ignore_eos": True},
    "penalties": {
        "temperature": 0.9,
        "seed": 3,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "ignore_eos": True,
    },
}


@cache
def build(name: str = "llama") -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(30)  # so that a text is not one token over and over
    return model


@contextmanager
def counted_runs() -> Iterator[list[int]]:
    """The lengths of the runs, of all their sequences."""
    lengths: list[int] = []
    chain = NativeForward.chain

    def counted(self: NativeForward, *arguments: Any) -> Any:
        outputs = chain(self, *arguments)
        lengths.extend(len(output.token_ids) for output in outputs)
        return outputs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NativeForward, "chain", counted)
        patch.setattr(verification, "LONGEST_SECONDS", 60.0)
        yield lengths


def steps_of(count: int) -> NoDraft:
    """A run of that many steps of plain decoding."""
    played = [0]

    def follow(_: RunRound) -> NoDraft | None:
        played[0] += 1
        return NoDraft() if played[0] < count else None

    return NoDraft(follow)


def generate(steps: int, prompts: list[list[int]], name: str = "llama", **params: Any) -> list[Generation]:
    target = Target(build(name))
    tokenizer = make_tokenizer(target.vocab_size)
    return Engine(target.model, tokenizer, method=Scripted(target, lambda _: steps_of(steps))).generate(
        prompts, **params
    )


def assert_same(ours: Generation, wanted: Generation) -> None:
    assert ours.token_ids == wanted.token_ids
    assert ours.finish_reason == wanted.finish_reason
    assert ours.origins == wanted.origins
    assert [(round.token_ids, round.drafted) for round in ours.rounds] == [
        (round.token_ids, round.drafted) for round in wanted.rounds
    ]


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_run_writes_what_single_steps_write(name: str, choice: str) -> None:
    with counted_runs() as lengths:
        (ours,) = generate(7, [PROMPT], name, max_new_tokens=24, **CHOICES[choice])
    (wanted,) = generate(1, [PROMPT], name, max_new_tokens=24, **CHOICES[choice])
    assert lengths == [7, 7, 7, 2]
    assert_same(ours, wanted)
    assert len(ours.rounds) == 23
    assert all(round.seconds.verify > 0 for round in ours.rounds)


@settings(max_examples=50)
@given(data=st.data())
def test_any_prompts_together(data: st.DataObject) -> None:
    """Of different lengths and rooms, some of which end at a token in the middle of a run."""
    steps, room = data.draw(st.integers(2, 9), label="steps"), data.draw(st.integers(2, 20), label="room")
    prompts = [
        prompt(length, seed=length) for length in data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=4))
    ]
    params = {"max_new_tokens": room, **CHOICES[data.draw(st.sampled_from(sorted(CHOICES)))]}
    free = generate(1, prompts, **params)
    ends = data.draw(st.sets(st.sampled_from([token for each in free for token in each.token_ids]), max_size=2))
    with counted_runs() as lengths:
        ours = generate(steps, prompts, stop_token_ids=tuple(ends), **params)
    assert (len(lengths) > 0) == (room > 2 and any(len(each.token_ids) > 1 for each in ours))
    for one, wanted in zip(ours, generate(1, prompts, stop_token_ids=tuple(ends), **params), strict=True):
        assert_same(one, wanted)


@settings(max_examples=30)
@given(data=st.data())
def test_a_stop_string_ends_a_run_at_its_token(data: st.DataObject) -> None:
    prompts = [
        prompt(length, seed=length) for length in data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=3))
    ]
    params: dict[str, Any] = {"max_new_tokens": 20, **CHOICES[data.draw(st.sampled_from(sorted(CHOICES)))]}
    text = generate(1, prompts, **params)[0].text
    start = data.draw(st.integers(1, len(text) - 1), label="start")
    stop = (text[start : start + data.draw(st.integers(1, 3), label="length")], "never there")
    with counted_runs() as lengths:
        ours = generate(data.draw(st.integers(2, 9), label="steps"), prompts, stop=stop, **params)
    assert lengths or all(len(each.token_ids) < 3 for each in ours)
    assert ours[0].finish_reason == "stop_string"
    for one, wanted in zip(ours, generate(1, prompts, stop=stop, **params), strict=True):
        assert_same(one, wanted)


@pytest.mark.parametrize(
    "params",
    [
        {"logits_processors": (RepetitionPenaltyLogitsProcessor(1.3),)},
        {"logprobs": 2},
        {"stopping_criteria": StoppingCriteriaList([lambda ids, _: torch.tensor([ids.shape[1] > 30])])},
        {"temperature": 0.9, "seed": 1, "acceptance": "speculative"},
    ],
    ids=lambda params: next(iter(params)),
)
def test_what_needs_more_than_tokens_goes_step_by_step(params: dict[str, Any]) -> None:
    with counted_runs() as lengths:
        (ours,) = generate(8, [PROMPT], max_new_tokens=16, **params)
    assert not lengths
    assert_same(ours, generate(1, [PROMPT], max_new_tokens=16, **params)[0])


def test_a_run_ends_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with counted_runs() as lengths:
        monkeypatch.setattr(verification, "LONGEST_SECONDS", 0.0)
        generate(8, [PROMPT], max_new_tokens=6)
    assert lengths == [1] * 4  # the last step is none


def test_a_run_ends_where_its_drafter_wants_to_plan() -> None:
    heard: list[int] = []

    def follow(round: RunRound) -> NoDraft | None:
        heard.extend(round.token_ids)
        return None if len(heard) % 3 == 0 else NoDraft()

    target = Target(build())
    with counted_runs() as lengths:
        method = Scripted(target, lambda written: NoDraft(follow))
        ours = Engine(target.model, method=method).generate(PROMPT, max_new_tokens=9)
    assert lengths == [3, 3, 2]
    assert tuple(heard) == ours.token_ids[1:8]  # the last token's round has none after it
    assert_same(ours, generate(1, [PROMPT], max_new_tokens=9)[0])


class Known:
    """Plans what is known of a text, now and then with a mistake, round after round."""

    def __init__(
        self,
        text: tuple[int, ...],
        lengths: list[int],
        wrong: set[int],
        *,
        runs: bool,
        probed: bool = False,
        padding: int = 0,
    ) -> None:
        self.text, self.lengths, self.wrong, self.runs, self.probed = text, lengths, wrong, runs, probed
        self.padding = (PADDING,) * padding  # after what is known, where the answer's end is near, too
        self.mask_embedding = False  # whether probes have an embedding other than zero
        self.rounds = 0
        self.written = 1
        self.probed_tokens: list[tuple[int, int]] = []
        """The choices of probes, by the number of tokens that were written."""

    def plan(self, written: int) -> NoDraft | TokenDraft:
        self.written = written
        length = self.lengths[self.rounds % len(self.lengths)]
        self.rounds += 1
        tokens = [
            token + 1 if place in self.wrong and token + 1 < SIZES["vocab_size"] else token
            for place, token in enumerate(self.text[written : written + length], start=written)
        ]
        tokens += self.padding
        follow = self.follow if self.runs else None
        probes = tuple(row for row in (0, 2, len(tokens)) if row <= len(tokens)) if self.probed else ()
        if not tokens and not probes:
            return NoDraft(follow)
        return TokenDraft(tuple(tokens), TokenTree.chain(len(tokens)), tuple(sorted(set(probes))), follow)

    def follow(self, round: RunRound) -> NoDraft | TokenDraft | None:
        written = self.written + len(round.token_ids)
        if round.probed_token is not None:
            self.probed_tokens.append((written, round.probed_token[0]))
            assert 0 < round.probed_token[1] <= 1
        if len(round.token_ids) == 3 and self.written % 2:
            return None  # some runs end early
        return self.plan(written)


def generate_by(known: Known, target: Target, **params: Any) -> Generation:
    mask_embedding = target.embed(torch.tensor([5]))[0].detach() * 0.5 if known.mask_embedding else None
    method = Scripted(
        target, lambda written: known.plan(len(written)), Needs(sibling_rows=3), mask_embedding=mask_embedding
    )
    generation = Engine(target.model, method=method).generate(PROMPT, **params)
    written = 1
    for feedback in method.feedbacks:
        written += len(feedback.acceptance.token_ids)
        if feedback.probed_token is not None:
            known.probed_tokens.append((written, feedback.probed_token[0]))
    return generation


def test_known_tokens_that_are_right_save_forwards() -> None:
    target, params = Target(build()), {"max_new_tokens": 33, **CHOICES["greedy"]}
    (plain,) = generate(1, [PROMPT], **params)
    timed: list[object] = []
    with counted_runs() as lengths, pytest.MonkeyPatch.context() as patch:
        patch.setattr(THREADS, "measured", lambda kind, *_: timed.append(kind))
        ours = generate_by(Known(plain.token_ids, [3], {9}, runs=True), target, **params)
    assert len(timed) >= len(lengths)  # the number of threads follows the time of every run
    assert ours.token_ids == plain.token_ids
    assert len(lengths) < len(ours.rounds) < 12
    assert (ours.drafted, ours.accepted) == (26, 23)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", CONFIGS)
def test_probes_in_a_run_choose_what_they_choose_in_rounds_of_their_own(name: str, choice: str) -> None:
    target, params = Target(build(name)), {"max_new_tokens": 40, **CHOICES[choice]}
    text = generate(1, [PROMPT], name, **params)[0].token_ids
    found = []
    for mask_embedding in (False, True):
        run, alone = (Known(text, [4, 0, 1], {9, 20}, runs=runs, probed=True) for runs in (True, False))
        run.mask_embedding = alone.mask_embedding = mask_embedding
        ours = generate_by(run, target, **params)
        assert ours.token_ids == generate_by(alone, target, **params).token_ids == text
        assert sum(each.probes for each in ours.rounds) > 20
        assert len(run.probed_tokens) > 10
        assert set(run.probed_tokens) <= set(alone.probed_tokens)
        found.append(run.probed_tokens)
    assert found[0] != found[1]


@given(data=st.data())
def test_known_tokens_in_a_run_are_verified_as_in_rounds_of_their_own(data: st.DataObject) -> None:
    name, choice = data.draw(st.sampled_from(sorted(CONFIGS))), data.draw(st.sampled_from(sorted(CHOICES)))
    room = data.draw(st.integers(3, 40), label="room")
    target = Target(build(name))
    params = {"max_new_tokens": room, **CHOICES[choice]}
    (plain,) = generate(1, [PROMPT], name, **params)
    drafted = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=8).filter(any), label="lengths")
    wrong, probed = data.draw(st.sets(st.integers(1, 40)), label="wrong"), data.draw(st.booleans(), label="probed")
    padding = data.draw(st.integers(0, 4), label="padding")
    ends = tuple(data.draw(st.sets(st.sampled_from(plain.token_ids), max_size=1), label="ends"))

    def play(*, runs: bool) -> tuple[Generation, dict[int, int]]:
        known = Known(plain.token_ids, drafted, wrong, runs=runs, probed=probed, padding=padding)
        return generate_by(known, target, stop_token_ids=ends, **params), dict(known.probed_tokens)

    alone, probed = play(runs=False)
    with counted_runs() as lengths:
        ours, probed_in_runs = play(runs=True)
    assert probed_in_runs.items() <= probed.items() or len(drafted) > 1  # runs that end early plan other lengths
    assert ours.token_ids == plain.token_ids[: len(ours.token_ids)]
    assert sum(lengths) >= len(ours.token_ids) - 2  # the first, and a last one for which there is no room beside it
    for generation in (ours, alone):
        assert sum(len(each.token_ids) for each in generation.rounds) == len(generation.token_ids) - 1
        assert generation.origins.count("draft") == generation.accepted
    assert ours.token_ids == alone.token_ids


def test_prompts_that_are_being_read_take_turns_with_single_steps() -> None:
    """The long prompt is read in several chunks; the short one writes a token after each."""
    engine = Engine(build(), method="autoregressive", prefill_chunk=8)
    with counted_runs() as lengths:
        first, last = engine.generate([PROMPT[:4], prompt(60)], max_new_tokens=30)
    assert sum(lengths) < len(first.rounds) + len(last.rounds)
    assert lengths
    for ours, ids in ((first, PROMPT[:4]), (last, prompt(60))):
        assert ours.token_ids == engine.generate(ids, max_new_tokens=30).token_ids


def test_a_step_without_numbers_is_named() -> None:
    """The steps before it stand."""
    text = generate(1, [PROMPT], max_new_tokens=12)[0].token_ids
    first = next(index for index, token in enumerate(text) if index > 3 and token not in (*PROMPT, *text[:index]))
    model = copy.deepcopy(build())
    with torch.no_grad():  # no other token's logits have it in them, the head is another tensor
        model.get_input_embeddings().weight[text[first]] = torch.nan
    target = Target(model)
    engine = Engine(model, method=Scripted(target, lambda _: steps_of(4)))
    with counted_runs() as lengths, pytest.raises(NonFiniteLogitsError, match=f"for new token {first + 2} "):
        engine.generate(PROMPT, max_new_tokens=12)
    assert lengths


def test_a_tree_begins_no_run() -> None:
    branches = TokenTree((-1, 0, 0))
    with pytest.raises(InvalidParameterError, match="leave follow out"):
        TokenDraft((4, 5, 6), branches, follow=lambda _: None)
    assert TokenDraft((4, 5, 6), branches).tree is branches
