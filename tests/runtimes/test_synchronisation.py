"""One wait for the device in a round, and draft steps begun before the last one's confidence is known.

A CPU waits for nothing, so what is counted here are the places where a device would make the host wait: every value
that the host reads, and every tensor that it sends.
"""

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LogitsProcessor

from helpers.models import SUBLAYERS, build, prompt
from helpers.scripted import Script, Scripted
from selfspec.decoding.draft import ConfidenceThreshold, Draft, LayerDraft, TokenDraft
from selfspec.decoding.drafter import Feedback, Needs
from selfspec.engine import Engine
from selfspec.errors import NonFiniteLogitsError
from selfspec.model import transfer
from selfspec.model.forward import Forward, SequenceState
from selfspec.model.kept import KeptSet
from selfspec.model.transfer import AsyncCopy, pack, unpack
from selfspec.runtimes import runner
from selfspec.runtimes.runner import Runner
from selfspec.runtimes.stack import StackOutput
from selfspec.runtimes.target import Target
from selfspec.sampling.acceptance import TokenTree
from selfspec.types import Generation

RULES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "coupled": {"temperature": 0.9, "seed": 3},
    "speculative": {"temperature": 0.9, "top_k": 20, "seed": 1, "acceptance": "speculative"},
}
PROMPT = prompt(17)
NEW_TOKENS = 40
DEVICE_RUNTIME = "fused"
"""What runs on a device; what the CPU has for itself leaves its choices where the host finds them."""
SIBLINGS = 12


def swift_widths(confidence: float) -> int:
    return 1 if confidence > 0.95 else 3 if confidence > 0.8 else 5 if confidence > 0.5 else 10


# What the host reads


READING = {
    f"aten::{name}"
    for name in (
        "_local_scalar_dense",
        "item",
        "nonzero",
        "nonzero_numpy",
        "is_nonzero",
        "equal",
        "masked_select",
        "_unique2",
        "unique_dim",
        "bincount",
    )
}
"""Operations whose result, or the size of it, makes the host wait."""


class Watch(TorchDispatchMode):
    """Counts what goes through ``transfer``, and notes what reads or sends values past it.

    Attributes:
        waits: reads that wait at once.
        copies: asynchronous copies that are awaited later.
        past: names of operations that a device would make the host wait for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0
        self.copies = 0
        self.past: list[str] = []
        self.inside = False

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operation._schema.name
        indices = args[1] if name.startswith("aten::index") and len(args) > 1 and isinstance(args[1], list) else []
        masks = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)
        if not self.inside and (name in READING or masks or name == "aten::lift_fresh"):
            self.past.append(name)
        return operation(*args, **(kwargs or {}))

    @contextmanager
    def transferring(self) -> Iterator[None]:
        before, self.inside = self.inside, True
        yield
        self.inside = before


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    watch = Watch()
    begin, wait, read = AsyncCopy.__init__, AsyncCopy.wait, transfer.read

    def counted_begin(copied: AsyncCopy, *values: torch.Tensor) -> None:
        watch.copies += 1
        begin(copied, *values)

    def counted_wait(copied: AsyncCopy) -> list[Any]:
        with watch.transferring():
            return wait(copied)

    def counted_read(*values: torch.Tensor) -> list[Any]:
        watch.waits += 1
        watch.copies -= 1  # the one that it makes
        return read(*values)

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            with watch.transferring():
                return function(*arguments)

        return call

    def noted(name: str) -> Any:
        method = getattr(torch.Tensor, name)

        def call(tensor: torch.Tensor, *arguments: Any) -> Any:
            if not watch.inside:
                watch.past.append(name)
            return method(tensor, *arguments)

        return call

    monkeypatch.setattr(transfer, "is_on_host", lambda _: False)
    monkeypatch.setattr(AsyncCopy, "__init__", counted_begin)
    monkeypatch.setattr(AsyncCopy, "wait", counted_wait)
    monkeypatch.setattr(transfer, "read", counted_read)
    monkeypatch.setattr(transfer, "send", watched(transfer.send))
    for name in ("tolist", "numpy"):  # they read memory without an operation
        monkeypatch.setattr(torch.Tensor, name, noted(name))
    return watch


@pytest.mark.parametrize(
    "reading",
    [
        lambda values: float(values[0]),
        lambda values: bool(values.sum() > 0),
        lambda values: [0, 1, 2][values.argmax()],
        lambda values: values[values > 1],
        lambda values: values.nonzero(),
        lambda values: values.tolist(),
        lambda values: values.numpy(),
        lambda values: torch.tensor([1.0]),
    ],
)
def test_the_watch_notices(watch: Watch, reading: Any) -> None:
    values = torch.arange(3.0)
    with watch:
        values[torch.arange(2)] + values.amax()
        assert watch.past == []
        reading(values)
    assert len(watch.past) > 0
    assert watch.waits == watch.copies == 0


def chain(_: tuple[int, ...]) -> Draft:
    return LayerDraft(KeptSet.early_exit(3, SUBLAYERS), 4)


def found_in(text: tuple[int, ...]) -> Script:
    """Drafts two tokens of a text and a wrong one."""

    def script(written: tuple[int, ...]) -> Draft:
        tokens = (*text[len(written) : len(written) + 2], 5)
        return TokenDraft(tokens, TokenTree.chain(len(tokens)))

    return script


def stopping_chain(_: tuple[int, ...]) -> Draft:
    return LayerDraft(KeptSet.early_exit(3, SUBLAYERS), 6, ConfidenceThreshold(0.4))


def stopping_tree(_: tuple[int, ...]) -> Draft:
    return LayerDraft(KeptSet.early_exit(3, SUBLAYERS), 6, ConfidenceThreshold(0.4), swift_widths)


def tree(_: tuple[int, ...]) -> Draft:
    return LayerDraft(KeptSet.early_exit(3, SUBLAYERS), 3, widths=swift_widths)


def play(script: Script, **params: Any) -> tuple[Generation, list[Feedback]]:
    """Writes an output by a script, with all hidden states watched; drafts must have been of use."""
    target = Target(build("llama"), DEVICE_RUNTIME)
    method = Scripted(target, script, Needs(sibling_rows=SIBLINGS), watched=range(0, SUBLAYERS + 1, 3))
    result = Engine(build("llama"), method=method).generate(PROMPT, max_new_tokens=NEW_TOKENS, **params)
    assert result.drafted > 0
    assert result.accepted > 0
    return result, method.feedbacks


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("drafts", ["chain", "found"])
def test_a_round_waits_once(watch: Watch, drafts: str, rule: str) -> None:
    text = (
        Engine(build("llama"), method="autoregressive", runtime=DEVICE_RUNTIME)
        .generate(PROMPT, max_new_tokens=NEW_TOKENS, **RULES[rule])
        .token_ids
    )
    script = chain if drafts == "chain" else found_in(text)
    counts: list[tuple[int, int]] = []

    def counting(written: tuple[int, ...]) -> Draft:
        counts.append((watch.waits, len(watch.past)))
        return script(written)

    watch.waits = 0
    with watch:
        play(counting, **RULES[rule])
    assert watch.past == []
    assert counts[0] == (1, 0), "the first new token"
    assert [later[0] - earlier[0] for earlier, later in itertools.pairwise(counts)] == [1] * (len(counts) - 1)
    assert watch.waits == 1 + len(counts)
    assert watch.copies == 0


@pytest.mark.parametrize("rule", RULES)
def test_a_stopping_rule_reads_each_confidence_once(watch: Watch, rule: str) -> None:
    with watch:
        result, feedbacks = play(stopping_chain, **RULES[rule])
    assert watch.past == []
    assert watch.waits == 1 + len(result.rounds)
    assert watch.copies == result.drafted == sum(len(feedback.proposal.confidences) for feedback in feedbacks)


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
def test_a_tree_waits_no_more_often(watch: Watch, rule: str) -> None:
    with watch:
        result, _ = play(stopping_tree, **RULES[rule])
    assert any(record.candidates > record.drafted for record in result.rounds)
    # The target lays out a tree's positions, and moves the rows of its path, with tensors that the host makes.
    assert set(watch.past) <= {"aten::lift_fresh"}
    assert watch.waits == 1 + len(result.rounds)
    assert watch.copies == result.drafted


@pytest.mark.parametrize(("method", "stops"), [("autoregressive", 0), ("layerskip", 0), ("layerskip-dv", 1)])
@pytest.mark.parametrize("rule", RULES)
def test_the_methods_wait_no_more_often(watch: Watch, method: str, stops: int, rule: str) -> None:
    engine = Engine(build("llama"), method=method, runtime=DEVICE_RUNTIME)
    with watch:
        result = engine.generate(PROMPT, max_new_tokens=NEW_TOKENS, **RULES[rule])
    assert watch.past == []
    assert watch.waits == 1 + len(result.rounds)
    assert watch.copies == result.drafted * stops
    assert method == "autoregressive" or min(result.drafted, result.accepted) > 0


def test_packed_values_are_what_was_copied() -> None:
    """What one copy from a device carries, without the copy."""
    values = (
        torch.tensor([3, 2**52 + 1, -7]),
        torch.tensor(True),
        torch.rand(2, 3, dtype=torch.float64),
        torch.rand(2),
        torch.empty(0, dtype=torch.long),
    )
    lists = [value.tolist() for value in values]
    assert unpack(pack(values), values) == lists == AsyncCopy(*values).wait()
    assert isinstance(unpack(pack(values), values)[0][0], int)


# Steps begun before they are known to be wanted


def assert_same(first: tuple[Generation, list[Feedback]], second: tuple[Generation, list[Feedback]]) -> None:
    """Rounds are the same in every token, confidence, score and hidden state."""
    assert first[0].token_ids == second[0].token_ids
    for one, other in zip(first[1], second[1], strict=True):
        assert one.acceptance == other.acceptance
        assert one.proposal.tree == other.proposal.tree
        assert one.proposal.confidences == other.proposal.confidences
        assert torch.equal(one.proposal.token_ids, other.proposal.token_ids)
        assert torch.equal(one.target_scores, other.target_scores)
        torch.testing.assert_close(one.proposal.scores, other.proposal.scores, rtol=0, atol=0)
        torch.testing.assert_close(dict(one.hidden_states), dict(other.hidden_states), rtol=0, atol=0)


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("script", [stopping_chain, stopping_tree], ids=lambda script: script.__name__)
@pytest.mark.parametrize("kept", [tuple(range(6)), (0, 1, 2, 5, 7, 10), (1, 2, 5, 8)], ids=str)
def test_a_head_start_changes_nothing(
    kept: tuple[int, ...], script: Script, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    ran: list[tuple[int, ...]] = []
    lay_out, run = Runner.lay_out, Runner.run

    def noted(runner: Runner, state: SequenceState, rows: int, **layout: Any) -> Forward:
        if rows == 1 and set(layout) == {"start", "drawing", "seen"}:  # a step of a draft
            begun.append(layout["start"])
        return lay_out(runner, state, rows, **layout)

    def noted_run(runner: Runner, states: torch.Tensor, sublayers: Any, *others: Any, **more: Any) -> StackOutput:
        ran.append(tuple(sublayers))
        return run(runner, states, sublayers, *others, **more)

    def script_of_kept(written: tuple[int, ...]) -> Draft:
        draft = script(written)
        assert isinstance(draft, LayerDraft)
        return LayerDraft(KeptSet(kept, SUBLAYERS), draft.limit, draft.stop, draft.widths)

    monkeypatch.setattr(Runner, "lay_out", noted)
    monkeypatch.setattr(Runner, "run", noted_run)
    expected = play(script_of_kept, **RULES[rule])
    assert len(begun) == expected[0].drafted, "no step in vain without a head start"
    lengths = {len(feedback.proposal.confidences) for feedback in expected[1]}
    assert len(lengths) > 2, "the drafts stop where they want to"
    stopped = sum(feedback.drafted < 6 for feedback in expected[1][:-3])
    for head_start in (1, 3, 8, SUBLAYERS):
        begun.clear()
        ran.clear()
        monkeypatch.setattr(runner, "head_start", lambda _, count=head_start: count)
        assert_same(play(script_of_kept, **RULES[rule]), expected)
        assert len(begun) >= expected[0].drafted + stopped, "a stop finds a step begun"
        assert kept[:head_start] in ran


def test_only_an_accelerator_gets_a_head_start() -> None:
    assert runner.head_start(torch.device("cpu")) == 0
    assert runner.head_start(torch.device("cuda", 1)) == runner.HEAD_START > 0


def test_trees_that_never_stop_need_no_confidence_before_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Widths alone do not hold the next step up."""
    order: list[str] = []
    wait, run = AsyncCopy.wait, Runner.run

    def scored(runner: Runner, *given: Any, logits: bool = False, **others: Any) -> StackOutput:
        order.extend(["logits"] * logits)
        return run(runner, *given, logits=logits, **others)

    monkeypatch.setattr(AsyncCopy, "wait", lambda copied: order.append("wait") or wait(copied))
    monkeypatch.setattr(Runner, "run", scored)
    play(tree)
    assert ["logits"] * 3 + ["wait"] * 3 in [order[start : start + 6] for start in range(len(order))]


# Logits that are no numbers


class Strict(LogitsProcessor):
    """Refuses what is no number, as a user's processor may, and takes one token out.

    Args:
        token: which.
    """

    def __init__(self, token: int = 0) -> None:
        self.token = token
        self.refused = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if scores.isnan().any():
            self.refused += 1
            raise ValueError("not a number")
        return scores.index_fill(1, torch.tensor([self.token]), -torch.inf)


@pytest.mark.parametrize("rule", RULES)
def test_a_processor_is_not_blamed_for_a_draft_that_is_no_numbers(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a draft is dropped, and the round is a plain step; other drafts of the same text stand."""
    healthy = (
        Engine(build("llama"), method="autoregressive", runtime=DEVICE_RUNTIME)
        .generate(PROMPT, max_new_tokens=NEW_TOKENS, **RULES[rule])
        .token_ids
    )
    poison = next(token for token in range(128) if token not in (*healthy, *PROMPT))
    target, strict = Target(copy.deepcopy(build("llama"))), Strict(poison)
    runner = target.at(None)
    embed = runner.embed
    monkeypatch.setattr(runner, "embed", lambda ids, *_: embed(ids).masked_fill((ids == poison)[:, None], torch.nan))

    def script(written: tuple[int, ...]) -> Draft:
        return TokenDraft((1, poison), TokenTree.chain(2)) if len(written) % 2 else chain(written)

    engine = Engine(target.model, method=Scripted(target, script))
    params = {**RULES[rule], "logits_processors": [strict]}
    result = engine.generate(PROMPT, max_new_tokens=NEW_TOKENS, **params)
    assert strict.refused > 0
    assert min(result.drafted, result.accepted) > 0
    assert poison not in result.token_ids
    if rule != "speculative":  # whose text depends on what is drafted
        assert result.token_ids == healthy


def test_a_plain_step_that_is_no_numbers_is_reported_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(copy.deepcopy(build("llama")))
    monkeypatch.setattr(target, "embed", lambda ids, *_: torch.full((len(ids), target.hidden_size), torch.nan))
    engine = Engine(target.model, method=Scripted(target, chain))
    with pytest.raises(NonFiniteLogitsError, match="for new token 1 "):
        engine.generate(PROMPT, max_new_tokens=4, logits_processors=[Strict()])


def test_a_processors_own_mistake_stays_its_own() -> None:
    class Broken(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        Engine(build("llama"), method="autoregressive").generate(PROMPT, max_new_tokens=4, logits_processors=[Broken()])
