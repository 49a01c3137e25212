"""DEL: its choices recomputed slowly from truncated models, its sums and thresholds by hand, and when it complains."""

import copy
import functools
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel
from typer.testing import CliRunner

from helpers.checkpoints import make_tokenizer
from helpers.models import FAMILY_NAMES, LAYERS, build, plain_text, prompt
from helpers.recording import Recording
from helpers.truncated import predictions, truncated
from selfspec import load_model
from selfspec.cli.command_line import app
from selfspec.decoding.draft import Draft, LayerDraft, NoDraft
from selfspec.decoding.drafter import Drafter, Feedback, Prefill
from selfspec.engine import Engine
from selfspec.errors import InvalidSettingError, NoGainWarning, StateError
from selfspec.methods import dynamic_exit, make_method
from selfspec.methods.dynamic_exit import Del, DelSettings, Exit, Statistics, choose_exit, count_matches, shadow_tokens
from selfspec.runtimes.shadow_head import ShadowHead
from selfspec.runtimes.target import Target
from selfspec.types import Generation
from selfspec_lab.prompts import PROMPTS
from selfspec_lab.testing import read_text

NEW_TOKENS = 48
PROMPT = 40


class Recorded(Del):
    """DEL, keeping what it chose before every round, and what came of it."""

    def begin(self, prefill: Prefill) -> Drafter:
        self.rounds: list[tuple[Exit, Feedback]] = []
        return _WithChoices(self, super().begin(prefill))


class _WithChoices(Recording):
    def __init__(self, method: Recorded, drafter: Any) -> None:
        super().__init__(drafter, [])
        self.rounds = method.rounds

    def learn(self, feedback: Feedback) -> None:
        drafter: Any = self.drafter
        self.rounds.append((drafter.exit, feedback))
        super().learn(feedback)


@dataclass
class SlowDel:
    """Algorithm 1's bookkeeping, with lists of the whole history and loops over rounds, layers and positions."""

    settings: DelSettings
    predicted: list[list[tuple[int, float]]]

    def __post_init__(self) -> None:
        self.history: list[list[dict[str, float]]] = []  # by round, by layer

    def append(self, positions: list[int]) -> None:
        target = self.predicted[-1]
        counts = []
        for layer in self.predicted[:-1]:
            matched = [layer[at][1] for at in positions if layer[at][0] == target[at][0]]
            mismatched = [layer[at][1] for at in positions if layer[at][0] != target[at][0]]
            counts.append({"u": len(positions), "c": len(matched), "tcs": sum(matched), "fcs": sum(mismatched)})
        self.history.append(counts)

    def decayed(self, layer: int, key: str) -> float:
        rounds = len(self.history)
        return sum(self.settings.omega ** (rounds - i - 1) * self.history[i][layer][key] for i in range(rounds))

    def objective(self, exit_layer: int, length: int) -> float:
        alpha = self.decayed(exit_layer - 1, "c") / self.decayed(exit_layer - 1, "u")
        return sum(alpha**step for step in range(length + 1)) / (length * exit_layer + LAYERS)

    def threshold(self, exit_layer: int) -> float:
        layer, mean = exit_layer - 1, {}
        for key, count in (
            ("tcs", self.decayed(layer, "c")),
            ("fcs", self.decayed(layer, "u") - self.decayed(layer, "c")),
        ):
            mean[key] = self.decayed(layer, key) / count if count > 1e-9 else 0.0
        return (mean["tcs"] + mean["fcs"]) / 2

    def check(self, choice: Exit) -> None:
        table = {
            (layer, length): self.objective(layer, length)
            for layer in range(1, LAYERS)
            for length in range(0 if self.settings.allow_no_draft else 1, self.settings.d_max + 1)
        }
        chosen = choice.exit_layer, choice.draft_length
        assert table[chosen] == pytest.approx(max(table.values()), rel=1e-9), (chosen, max(table, key=table.get))
        assert choice.threshold == pytest.approx(self.threshold(choice.exit_layer), abs=1e-4)


def recorded(name: str, **settings: Any) -> Recorded:
    return Recorded(Target(build(name)), DelSettings(**{"schedule": "paper", **settings}))


def run(method: Recorded, name: str, length: int = PROMPT, **changes: Any) -> Generation:
    return Engine(build(name), method=method).generate(prompt(length), max_new_tokens=NEW_TOKENS, **changes)


def first_rows(method: Recorded, start: int) -> list[int]:
    """For each round the position of its pending token, the first of the output being at ``start``."""
    positions = [start]
    for _, feedback in method.rounds:
        positions.append(positions[-1] + len(feedback.acceptance.token_ids))
    return positions


def check_rounds(method: Recorded, slow: SlowDel, length: int, *, keep: int = 0) -> set[tuple[int, int]]:
    """Replays a request; ``keep`` rounds of the history remain after the first choice."""
    slow.append(list(range(max(0, length - method.settings.context_window), length)))
    chosen = set()
    for (choice, feedback), start in zip(method.rounds, first_rows(method, length), strict=False):
        slow.check(choice)
        chosen.add((choice.exit_layer, choice.draft_length))
        assert_planned(feedback.draft, choice, slow.settings)
        if feedback is method.rounds[0][1] and not method.settings.keep_prompt:
            del slow.history[keep:]
        target = [slow.predicted[-1][start + row][0] for row in range(feedback.drafted + 1)]
        drafted = feedback.proposal.token_ids.tolist()
        wrong = [row for row in range(len(drafted)) if drafted[row] != target[row]]
        slow.append(list(range(start, start + (wrong[0] if wrong else len(drafted)) + 1)))
    return chosen


def assert_planned(draft: Draft, choice: Exit, settings: DelSettings) -> None:
    if choice.draft_length == 0:
        assert draft == NoDraft()
        return
    assert isinstance(draft, LayerDraft)
    assert draft.kept.sublayers == tuple(range(2 * choice.exit_layer))
    assert draft.limit == settings.d_max
    assert draft.stop is not None
    assert draft.stop.threshold == choice.threshold


# The choices


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", {}),
        ("gemma2", {"omega": 0.5, "context_window": 7}),
        ("granite", {"keep_prompt": True}),
        ("mixtral-window", {"omega": 1.0, "d_max": 5, "context_window": 100}),
        ("qwen3-window", {"omega": 0.0, "keep_prompt": True}),
        ("llama", {"keep_prompt": True, "context_window": 3, "allow_no_draft": False}),
    ],
)
def test_choices_follow_from_the_whole_history(name: str, settings: dict[str, Any]) -> None:
    method = recorded(name, **settings)
    result = run(method, name)
    assert result.token_ids == plain_text(name, prompt(PROMPT), NEW_TOKENS)
    assert result.accepted > 0
    slow = SlowDel(method.settings, predictions(name, [*prompt(PROMPT), *result.token_ids]))
    assert len(check_rounds(method, slow, PROMPT)) > 2, "always the same choice"


def test_choices_with_the_counts_of_earlier_requests() -> None:
    method, slow = recorded("llama", carry_over=True), None
    for length in (PROMPT, 17, 9):
        result = run(method, "llama", length)
        history = slow.history if slow else []
        slow = SlowDel(method.settings, predictions("llama", [*prompt(length), *result.token_ids]))
        slow.history = history
        check_rounds(method, slow, length, keep=len(history))


def test_short_prompts_are_all_that_the_first_choice_has() -> None:
    method = recorded("llama")
    result = run(method, "llama", 1)
    slow = SlowDel(method.settings, predictions("llama", [*prompt(1), *result.token_ids]))
    check_rounds(method, slow, 1)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_shadow_tokens_are_those_of_truncated_models(name: str) -> None:
    method = make_method("del", Target(build(name)))
    assert isinstance(method, Del)
    _, prefilled = read_text(method.target, prompt(PROMPT), method.needs, max_new_tokens=4, chunk=16)
    with torch.inference_mode():
        states = [prefilled.hidden_states[boundary] for boundary in method.watched]
        tokens, confidences = shadow_tokens(ShadowHead(method.target, 1), states)
    wanted = [layer[PROMPT - 32 :] for layer in predictions(name, prompt(PROMPT))]
    assert tokens.tolist() == [[token for token, _ in layer] for layer in wanted]
    torch.testing.assert_close(
        confidences, torch.tensor([[confidence for _, confidence in layer] for layer in wanted]), rtol=1e-3, atol=1e-4
    )
    assert int(tokens[-1, -1]) == prefilled.first_token
    assert len(set(map(tuple, tokens.tolist()))) > 2, "the layers all say the same"


def test_shadow_tokens_of_all_layers_are_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    read, rows = ShadowHead.read, []
    monkeypatch.setattr(ShadowHead, "read", lambda head, states: rows.append(len(states)) or read(head, states))
    method = recorded("llama")
    run(method, "llama")
    valid = [min(32, PROMPT), *(feedback.accepted + 1 for _, feedback in method.rounds)]
    assert rows == [count * LAYERS for count in valid]
    assert method.head.one_pass


def test_logits_take_a_small_share_of_the_models_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(dynamic_exit, "ShadowHead", lambda _, memory: given.append(memory))
    recorded("llama")
    weights = sum(parameter.nbytes for parameter in build("llama").parameters())
    assert given == [int(0.005 * weights)]


def test_only_valid_rows_are_counted() -> None:
    method = recorded("llama", omega=1.0, carry_over=True)
    result = run(method, "llama")
    assert any(feedback.accepted < feedback.drafted for _, feedback in method.rounds)
    counts = method.state().tensors["sums"][0].sum(0)
    assert counts.tolist() == [NEW_TOKENS - 1] * (LAYERS - 1), "one row for every token that a round committed"
    assert result.drafted > result.accepted > 0


# Statistics by hand


def test_counts_by_hand() -> None:
    tokens = torch.tensor([[5, 1, 2], [5, 7, 9], [8, 7, 2]])
    confidences = torch.tensor([[0.5, 0.25, 0.75], [0.5, 1.0, 0.125], [0.9, 0.9, 0.9]])
    counts = count_matches(tokens, confidences)
    assert counts[0].tolist() == [[1, 1], [2, 2]]
    assert counts[1].tolist() == [[0.75, 1.0], [0.75, 0.625]]


def test_decayed_sums_by_hand() -> None:
    statistics = Statistics.empty(3)
    for matched, rows in ((4, 5), (0, 1), (2, 3)):
        counts = torch.tensor([[[matched, rows], [rows - matched, 0]]] * 2, dtype=torch.float64)
        counts[1] *= torch.tensor([[0.9], [0.4]])
        statistics = statistics.then(counts, 0.5)
    assert statistics.sums[0].tolist() == [[4 / 4 + 0 / 2 + 2, 5 / 4 + 1 / 2 + 3], [1 / 4 + 1 / 2 + 1, 0]]
    assert statistics.acceptance.tolist() == pytest.approx([3 / 4.75, 1.0])
    assert statistics.thresholds().tolist() == pytest.approx([(0.9 + 0.4) / 2, 0.9 / 2])


def test_a_threshold_without_any_match_is_half_the_mismatched_confidence() -> None:
    statistics = Statistics(torch.tensor([[[0.0, 0.0], [2.0, 0.0]], [[0.0, 0.0], [0.6, 0.0]]], dtype=torch.float64))
    assert statistics.thresholds().tolist() == pytest.approx([0.15, 0.0])


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=40), st.integers(1, 18))
def test_the_choice_is_the_best_of_all(counts: list[tuple[int, int]], d_max: int) -> None:
    matched = [count for count, _ in counts]
    mismatched = [1 + count for _, count in counts]
    sums = torch.tensor([[matched, mismatched], [matched, mismatched]], dtype=torch.float64)
    sums[1] *= torch.linspace(0.1, 0.9, len(counts), dtype=torch.float64)
    choice = choose_exit(Statistics(sums), d_max)
    layers = len(counts) + 1
    table = {}
    for layer in range(1, layers):
        alpha = matched[layer - 1] / (matched[layer - 1] + mismatched[layer - 1])
        for length in range(d_max + 1):
            table[layer, length] = sum(alpha**step for step in range(length + 1)) / (length * layer + layers)
    assert table[choice.exit_layer, choice.draft_length] == pytest.approx(max(table.values()), rel=1e-12)
    if choice.draft_length == 0:
        assert max(table.values()) == pytest.approx(1 / layers)
    confidence = float(sums[1, :, choice.exit_layer - 1].sum() / sums[0, :, choice.exit_layer - 1].sum())
    both = matched[choice.exit_layer - 1] > 0
    assert choice.threshold == pytest.approx(confidence if both else confidence / 2)


def test_choices_by_hand() -> None:
    def with_alphas(*alphas: float) -> Exit:
        matched = torch.tensor(alphas, dtype=torch.float64)
        return choose_exit(Statistics(torch.stack([torch.stack([matched, 1 - matched])] * 2)), 18)

    assert with_alphas(0.0, 0.0, 0.0).draft_length == 0
    assert with_alphas(0.2, 0.4, 0.7).draft_length == 0, (
        "an exit layer has to agree more often than its share of layers"
    )
    assert with_alphas(1.0, 1.0, 1.0) == Exit(1, 18, 0.5), "the earliest of equals, as long as possible"
    assert with_alphas(0.3, 0.0, 0.0) == Exit(1, 1, pytest.approx(1.0))
    assert with_alphas(0.3, 0.9, 0.9).exit_layer == 2


def test_a_choice_of_at_least_one_token() -> None:
    matched = torch.tensor([0.0, 0.4, 0.7], dtype=torch.float64)
    statistics = Statistics(torch.stack([torch.stack([matched, 1 - matched])] * 2))
    assert choose_exit(statistics, 18) == Exit(1, 0, 0.5)
    # One token: 1.0 / 5, 1.4 / 6, 1.7 / 7; two: 1.0 / 6, 1.56 / 8, 2.19 / 10.
    chosen = choose_exit(statistics, 18, shortest=1)
    assert (chosen.exit_layer, chosen.draft_length) == (3, 1)


# The prompt's counts


@pytest.mark.parametrize("keep_prompt", [False, True])
def test_the_second_choice_rests_on_the_prompt_if_that_is_kept(
    keep_prompt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(Del, "choose", lambda method, statistics: seen.append(statistics.sums) or Exit(2, 3, 0.0))
    counted: list[torch.Tensor] = []
    count = Del.count
    monkeypatch.setattr(Del, "count", lambda *arguments: counted.append(count(*arguments)) or counted[-1])
    run(recorded("llama", keep_prompt=keep_prompt, omega=0.5), "llama")
    prompt_counts, first, second, *_ = counted
    assert float(prompt_counts[0].sum()) == 32 * (LAYERS - 1)
    assert torch.equal(seen[0], prompt_counts)
    kept = prompt_counts if keep_prompt else torch.zeros_like(prompt_counts)
    assert torch.equal(seen[1], 0.5 * kept + first)
    assert torch.equal(seen[2], 0.25 * kept + 0.5 * first + second)


# Rounds


def test_without_empty_rounds_every_round_drafts() -> None:
    results = {}
    for allowed in (True, False):
        engine = Engine(late(), method="del", settings={"schedule": "paper", "allow_no_draft": allowed})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NoGainWarning)
            results[allowed] = engine.generate(prompt(17), max_new_tokens=NEW_TOKENS)
    assert results[True].token_ids == results[False].token_ids
    assert any(record.drafted == 0 for record in results[True].rounds[:-1])
    assert all(record.drafted > 0 for record in results[False].rounds[:-1])
    assert results[False].accepted > 0


class StartsPlain(Del):
    """Finds nothing worth drafting at first."""

    def begin(self, prefill: Prefill) -> Drafter:
        drafter: Any = super().begin(prefill)
        drafter.exit = Exit(1, 0, 0.0)
        return drafter


def test_a_round_without_a_draft_teaches_too() -> None:
    method = StartsPlain(Target(build("llama")), DelSettings(schedule="paper"))
    result = Engine(build("llama"), method=method).generate(prompt(17), max_new_tokens=NEW_TOKENS)
    assert result.rounds[0].kept is None
    assert len(result.rounds[0].token_ids) == 1
    assert result.accepted > 0, "it never came back to drafting"
    assert result.token_ids == plain_text("llama", prompt(17), NEW_TOKENS)


def test_sampled_text_with_a_seed_is_the_plain_one() -> None:
    options = {"max_new_tokens": NEW_TOKENS, "temperature": 0.8, "seed": 3}
    plain = Engine(build("qwen3"), method="autoregressive").generate(prompt(20), **options)
    result = Engine(build("qwen3"), method="del").generate(prompt(20), **options)
    assert result.token_ids == plain.token_ids
    assert result.drafted > result.accepted > 0


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_speculative_sampling_of_the_best_token_is_greedy(name: str) -> None:
    options = {"temperature": 0.5, "top_k": 1, "acceptance": "speculative", "seed": 0}
    result = Engine(build(name), method="del").generate(prompt(20), max_new_tokens=NEW_TOKENS, **options)
    assert result.token_ids == plain_text(name, prompt(20), NEW_TOKENS)
    assert result.drafted > result.accepted > 0


def test_repetition_penalty() -> None:
    options = {"max_new_tokens": NEW_TOKENS, "repetition_penalty": 1.3}
    plain = Engine(build("llama"), method="autoregressive").generate(prompt(20), **options)
    result = Engine(build("llama"), method="del").generate(prompt(20), **options)
    assert result.token_ids == plain.token_ids
    assert result.accepted > 0


def shallow(layers: int) -> PreTrainedModel:
    return truncated("llama", layers)


def test_two_layers_are_enough() -> None:
    plain = Engine(shallow(2), method="autoregressive").generate(prompt(20), max_new_tokens=24)
    result = Engine(shallow(2), method="del").generate(prompt(20), max_new_tokens=24)
    assert result.token_ids == plain.token_ids
    assert {record.attention_share for record in result.rounds} <= {None, 0.5}
    assert result.accepted > 0


def test_one_layer_is_not() -> None:
    with pytest.raises(InvalidSettingError, match="at least 2 layers"):
        Engine(shallow(1), method="del")


# State


def test_requests_start_afresh() -> None:
    method = recorded("llama")
    first, _, again = (run(method, "llama", length) for length in (PROMPT, 17, PROMPT))
    assert [record.drafted for record in first.rounds] == [record.drafted for record in again.rounds]
    with pytest.raises(StateError, match="carry_over=true"):
        method.state()


def test_state_is_saved_and_loaded(tmp_path: Path) -> None:
    def engine() -> Engine:
        return Engine(build("llama"), method=recorded("llama", carry_over=True))

    first, second = engine(), engine()
    first.generate(prompt(PROMPT), max_new_tokens=NEW_TOKENS)
    first.save_state(tmp_path / "state")
    second.load_state(tmp_path / "state")
    assert first.method.state().tensors["sums"].sum() > 0
    texts = [one.generate(prompt(17), max_new_tokens=NEW_TOKENS) for one in (first, second, engine())]
    drafted = [[record.drafted for record in text.rounds] for text in texts]
    assert drafted[0] == drafted[1]
    assert drafted[0] != drafted[2], "what it had learned made no difference"
    assert torch.equal(first.method.state().tensors["sums"], second.method.state().tensors["sums"])


@pytest.mark.parametrize(
    ("sums", "message"),
    [
        (None, "no counts for 5 exit layers"),
        (torch.zeros(2, 2, 4, dtype=torch.float64), "no counts for 5 exit layers"),
        (torch.zeros(2, 2, 5), "no counts"),
        (torch.full((2, 2, 5), torch.nan, dtype=torch.float64), "not all numbers"),
        (torch.full((2, 2, 5), -1.0, dtype=torch.float64), "at least 0"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(sums: torch.Tensor | None, message: str) -> None:
    method = recorded("llama", carry_over=True)
    run(method, "llama")
    before = method.state()
    with pytest.raises(StateError, match=message):
        method.restore(dynamic_exit.LearnedState(tensors={} if sums is None else {"sums": sums}))
    assert torch.equal(method.state().tensors["sums"], before.tensors["sums"])


def test_requests_of_several_threads_are_all_counted() -> None:
    method = Del(Target(build("llama")), DelSettings(schedule="paper", omega=1.0, carry_over=True))
    engine = Engine(build("llama"), method=method)
    threads = [
        threading.Thread(target=engine.generate, args=(prompt(length),), kwargs={"max_new_tokens": 16})
        for length in (5, 9, 17, 33)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert method.state().tensors["sums"][0].sum(0).tolist() == [4 * 15] * (LAYERS - 1)


# Models that exit early badly


@functools.cache
def late() -> PreTrainedModel:
    """A model whose last layer decides: exits before it seldom say what it says."""
    with torch.inference_mode(False):
        model = copy.deepcopy(build("llama"))
    with torch.no_grad():
        for name, parameter in model.model.layers[-1].named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.mul_(5)
    return model


def no_gain(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(warning.message) for warning in caught if warning.category is NoGainWarning]


def test_a_model_that_cannot_exit_early_is_told_once() -> None:
    engine = Engine(late(), method="del")
    records = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(4):
            before = len(no_gain(caught))
            records += engine.generate(prompt(17, seed), max_new_tokens=40).rounds
            assert before == 0 or len(no_gain(caught)) == 1
    (message,) = no_gain(caught)
    judged = records[:64]
    accepted, drafted = (sum(getattr(record, key) for record in judged) for key in ("accepted", "drafted"))
    layers = sum(record.drafted * round(6 * (record.attention_share or 0)) + LAYERS for record in judged)
    assert drafted > 0
    assert f"{accepted} of {drafted} draft tokens were accepted" in message
    assert f"a token took {layers / (accepted + 64):.1f} layers where plain decoding takes 6" in message


def test_a_model_that_exits_early_well_is_not_told() -> None:
    engine = Engine(build("llama"), method="del")
    rounds = 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        while rounds < 70:
            rounds += engine.generate(prompt(17, rounds), max_new_tokens=NEW_TOKENS).round_count
    assert no_gain(caught) == []


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_the_command_line_shows_the_warning_as_one_line(tmp_path: Path, form: tuple[str, ...]) -> None:
    late().save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    options = ("--model", str(tmp_path), "--method", "del", "--max-new-tokens", "100", "--ignore-eos")
    with warnings.catch_warnings():
        result: Any = CliRunner().invoke(app, ["generate", *options, *form, "Once"])
    assert result.exit_code == 0
    assert result.stderr.startswith("warning: del gains nothing on this model: ")
    assert result.stderr.count("\n") == 1
    assert "warning" not in result.stdout


@pytest.mark.trained
@pytest.mark.parametrize(("name", "complains"), [("tiny-early-exit", False), ("tiny", True)])
def test_bundled_checkpoints(name: str, complains: bool) -> None:
    model, tokenizer = load_model(name, dtype="float32", device="cpu")
    engine, plain = Engine(model, tokenizer, "del"), Engine(model, tokenizer, method="autoregressive")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [engine.generate(PROMPTS[domain][1], max_new_tokens=64, ignore_eos=True) for domain in PROMPTS]
    assert sum(result.round_count for result in results) >= dynamic_exit.JUDGED_ROUNDS
    assert bool(no_gain(caught)) == complains
    wanted = plain.generate(PROMPTS["math"][1], max_new_tokens=64, ignore_eos=True)
    assert results[list(PROMPTS).index("math")].token_ids == wanted.token_ids
    assert sum(result.accepted for result in results) > 0
