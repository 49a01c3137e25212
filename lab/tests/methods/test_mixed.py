"""``mixed``: its knapsack against brute force and KnapSpec's, its losses against whole forwards, its text."""

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.low_bit_model import SUBLAYERS, random_model
from helpers.models import build, prompt
from selfspec import Engine, SamplingParams
from selfspec.errors import InvalidSettingError, UnsupportedModelError
from selfspec.methods.knapsack import backtrack, fill_table
from selfspec.methods.objective import expected_tokens
from selfspec.runtimes.formats import LOW_BITS
from selfspec.runtimes.precision import Precision
from selfspec.runtimes.target import Target
from selfspec_lab.methods.mixed import measuring
from selfspec_lab.methods.mixed.losses import SKIP, measure_losses
from selfspec_lab.methods.mixed.measuring import Conditions, Found, find_plan
from selfspec_lab.methods.mixed.multiple_choice import Choice, best_fillings
from selfspec_lab.methods.mixed.plan import Candidate, Plan, choose_plan, expected_acceptance, fill, search_plan
from selfspec_lab.methods.mixed.precision import MixedPrecision

MODEL = random_model()
CONDITIONS = Conditions(max_draft_length=4, most_seconds=1.0, group=32)
PLAN = Plan((16, 8, 8, 4, SKIP, 6, 8, 8, 8), draft_length=4, acceptance=0.5, seconds=1e-3, tokens_per_second=2e3)

CHOICES = st.lists(st.builds(Choice, st.integers(0, 6), st.integers(0, 20).map(float)), min_size=1, max_size=4)


@given(st.lists(CHOICES, min_size=1, max_size=5))
def test_fillings_are_those_of_brute_force(items: list[list[Choice]]) -> None:
    least: dict[int, float] = {}
    for chosen in itertools.product(*items):
        weight, loss = sum(each.weight for each in chosen), sum(each.loss for each in chosen)
        least[weight] = min(loss, least.get(weight, math.inf))
    wanted = [
        (weight, loss)
        for weight, loss in sorted(least.items())
        if all(loss < other for lighter, other in least.items() if lighter < weight)
    ]
    found = best_fillings(items)
    assert [(each.weight, each.loss) for each in found] == wanted
    for filling in found:
        chosen = [choices[index] for choices, index in zip(items, filling.choices, strict=True)]
        assert (filling.weight, filling.loss) == (
            sum(each.weight for each in chosen),
            sum(each.loss for each in chosen),
        )


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 40)), min_size=1, max_size=7))
def test_with_skip_and_full_alone_it_is_knapspecs_knapsack(sublayers: list[tuple[int, int]]) -> None:
    """A sublayer turns the state by an angle, so that the angle to the target's is the sum of the skipped ones.

    The closest state of every skipped weight is then the one of least total angle, which is what both minimise.
    """
    angles = [loss * math.pi / 400 for _, loss in sublayers]  # at most 7 · 40 / 400 of half a turn
    weights: list[int | None] = [weight for weight, _ in sublayers]
    total = sum(weight for weight, _ in sublayers)
    at = torch.tensor([0.0, *itertools.accumulate(angles)])
    references = torch.stack([at.cos(), at.sin()], -1)[:, None]

    def turn(index: int, states: torch.Tensor) -> torch.Tensor:
        cosine, sine = math.cos(angles[index]), math.sin(angles[index])
        return states @ torch.tensor([[cosine, sine], [-sine, cosine]])

    table = fill_table(references, weights, total, -1.0, turn)
    skipped = backtrack(table.skips, weights)
    losses = dict.fromkeys(range(total + 1), math.inf)
    for weight in table.weights:
        left_out = skipped[weight].tolist()
        losses[weight] = sum(loss for (_, loss), skip in zip(sublayers, left_out, strict=True) if skip)
        assert sum(own for (own, _), skip in zip(sublayers, left_out, strict=True) if skip) == weight
    items = [[Choice(weight, 0.0), Choice(0, float(loss))] for weight, loss in sublayers]
    for filling in best_fillings(items):
        assert filling.loss == losses[total - filling.weight]


def slow_loss(target: Target, token_ids: torch.Tensor, part: int, bits: int) -> float:
    """One forward of the whole model with that change, and the divergence of each row."""
    rows = len(token_ids)
    precision = MixedPrecision(
        head=bits if part == SUBLAYERS else 16,
        sublayers=tuple(bits if index == part and bits != SKIP else 16 for index in range(SUBLAYERS)),
    )
    sublayers = [index for index in range(SUBLAYERS) if index != part or bits != SKIP]

    def scores(model: Any, which: Any) -> torch.Tensor:
        forward = target.lay_out(target.new_sequence(rows, rows, rows), rows)
        return torch.log_softmax(
            model.logits(model.run(target.embed(token_ids), which, forward).hidden_states).float(), -1
        )

    own, changed = scores(target, range(SUBLAYERS)), scores(target.at(precision), sublayers)
    return float(torch.nn.functional.kl_div(changed[4:], own[4:], log_target=True, reduction="batchmean"))


@torch.inference_mode()
def test_losses_are_divergences_of_whole_forwards() -> None:
    target, token_ids = Target(MODEL), torch.tensor(prompt(24))
    losses = measure_losses(target, token_ids, LOW_BITS, group=32, most_seconds=math.inf)
    assert len(losses) == SUBLAYERS + 1
    for part, by_bits in enumerate(losses):
        assert set(by_bits) == {16, *LOW_BITS} | ({SKIP} if part < SUBLAYERS else set())
        assert by_bits[16] == 0
        for bits in by_bits.keys() - {16}:
            assert by_bits[bits] == pytest.approx(slow_loss(target, token_ids, part, bits), rel=1e-2, abs=1e-5)
        assert by_bits[4] > by_bits[8]


def test_measuring_stops_in_time() -> None:
    """Then a part has the losses of the nearest measured one of its kind."""
    ticks = itertools.count()
    target, token_ids = Target(MODEL), torch.tensor(prompt(12))
    losses = measure_losses(target, token_ids, [4], group=32, most_seconds=2.5, clock=lambda: float(next(ticks)))
    attention, mlp = losses[:-1:2], losses[1:-1:2]
    assert len({each[4] for each in attention}) < len(attention)
    assert all(each in (losses[0], losses[4]) for each in attention)
    assert all(each in (losses[1], losses[5]) for each in mlp)
    assert losses[0] != losses[1]


@given(st.dictionaries(st.floats(1e-6, 4.0), st.floats(0.0, 1.0), max_size=6), st.floats(0.0, 9.0), st.floats(0.0, 9.0))
def test_expected_acceptance_falls_with_the_loss(tried: dict[float, float], one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert 0 <= expected_acceptance(high, tried) <= expected_acceptance(low, tried) + 1e-9 <= 1 + 2e-9
    assert expected_acceptance(0.0, tried) == 1


def test_expected_acceptance_goes_through_what_was_tried() -> None:
    tried = {0.04: 0.9, 0.16: 0.7}
    assert [expected_acceptance(loss, tried) for loss in (0.04, 0.16)] == pytest.approx([0.9, 0.7])
    assert expected_acceptance(0.09, tried) == pytest.approx(0.8)
    assert expected_acceptance(0.64, tried) == pytest.approx(0.4)


LOSSES: list[Mapping[int, float]] = [{SKIP: 0.3, 4: 0.05, 8: 0.001, 16: 0.0}, {4: 0.2, 8: 0.002, 16: 0.0}] * 2
SECONDS: list[Mapping[int, float]] = [{SKIP: 0.0, 4: 0.3, 8: 0.5, 16: 1.0}, {4: 0.4, 8: 0.7, 16: 1.2}] * 2


def verification(rows: float) -> float:
    return 4.0 + 0.3 * rows


def test_the_plan_promises_most_of_all() -> None:
    """Over every assignment and length, spelled out."""
    best = 0.0
    for bits in itertools.product(*LOSSES):
        loss = sum(each[chosen] for each, chosen in zip(LOSSES, bits, strict=True))
        step = 0.1 + sum(each[chosen] for each, chosen in zip(SECONDS, bits, strict=True))
        alpha = max(0.0, 1 - math.sqrt(loss))
        for length in range(1, 7):
            tokens = float(expected_tokens(alpha, length))
            best = max(best, tokens / (length * step + verification(1 + length)))
    plan = choose_plan(
        fill(LOSSES, SECONDS), lambda loss: max(0.0, 1 - math.sqrt(loss)), verification, outside=0.1, longest=6
    )
    assert plan.tokens_per_second == pytest.approx(best, rel=1e-3)


def test_the_search_tries_what_it_plans() -> None:
    tried: list[Candidate] = []

    def measure(candidate: Candidate) -> float:
        tried.append(candidate)
        return max(0.0, 1 - 0.6 * math.sqrt(candidate.loss))

    plan = search_plan(fill(LOSSES, SECONDS), measure, verification, outside=0.1, longest=6)
    chosen = next(each for each in tried if each.bits == plan.bits)
    assert plan.acceptance == pytest.approx(1 - 0.6 * math.sqrt(chosen.loss))
    assert len(tried) == len({each.loss for each in tried}) <= 8


def engine(found: Found, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Engine:
    monkeypatch.setattr("selfspec_lab.methods.mixed.method.find_plan", lambda *_: found)
    return Engine(MODEL, method="mixed", settings={"joint_confidence": 0.0, **settings})


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "seed"])
def test_the_text_is_the_models_own(sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_new_tokens=40, ignore_eos=True, **sampling)
    prompts = [prompt(length, length) for length in (30, 9)]
    expected = [Engine(MODEL).generate(each, params).token_ids for each in prompts]
    drafting = engine(Found(PLAN, pays=True), monkeypatch)
    results = drafting.generate(prompts, params)
    assert [result.token_ids for result in results] == expected
    assert sum(result.drafted for result in results) > 0
    assert sum(result.accepted for result in results) > 0
    played = results[0].rounds[0]
    assert played.kept is not None
    assert played.kept.skipped == (4,)
    assert played.precision == MixedPrecision(head=8, sublayers=(16, 8, 8, 4, 16, 6, 8, 8))
    assert played.drafted == PLAN.draft_length


def test_only_the_low_bit_weights_that_draft_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    drafting = engine(Found(PLAN, pays=True), monkeypatch)
    drafting.warmup()
    held = drafting.target._low_bit._made
    assert {(part, form.bits) for part, form in held} == {(-1, 8), (1, 8), (2, 8), (3, 4), (5, 6), (6, 8), (7, 8)}


def test_nothing_drafts_where_nothing_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    result = engine(Found(PLAN, pays=False), monkeypatch).generate(prompt(17), max_new_tokens=20)
    assert result.drafted == 0
    assert result.token_ids == Engine(MODEL).generate(prompt(17), max_new_tokens=20).token_ids


def test_a_plan_is_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = find_plan(Target(MODEL), CONDITIONS)
    assert len(found.plan.bits) == SUBLAYERS + 1
    assert 1 <= found.plan.draft_length <= 4
    with monkeypatch.context() as patched:
        patched.setattr(measuring, "measure_plan", lambda *_: pytest.fail("it was measured again"))
        assert find_plan(Target(MODEL), CONDITIONS) == found
    (kept,) = (tmp_path / "selfspec" / "mixed").iterdir()
    for damage in ("{", "[]", kept.read_text().replace('"bits"', '"bots"')):
        kept.write_text(damage)
        monkeypatch.setattr(measuring, "measure_plan", lambda *_: Found(PLAN, pays=True))
        assert find_plan(Target(MODEL), CONDITIONS) == Found(PLAN, pays=True)


def test_what_it_cannot_do_is_refused_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfspec_lab.methods.mixed.method.find_plan", lambda *_: pytest.fail("it measured"))
    with pytest.raises(InvalidSettingError, match="no groups of 48"):
        Engine(MODEL, method="mixed", settings={"group": 48})
    with pytest.raises(UnsupportedModelError, match="groups of 64"):
        Engine(MODEL, method="mixed", settings={"group": 64})
    for model, runtime in ((build("gemma2"), "auto"), (MODEL, "eager")):
        with pytest.raises(UnsupportedModelError, match="low-bit"):
            Engine(model, method="mixed", runtime=runtime)
    with pytest.raises(UnsupportedModelError, match="no product of 6 bits"):
        Engine(MODEL, method="mixed", runtime="fused")
    with pytest.raises(UnsupportedModelError, match="8 bits themselves"):
        Engine(MODEL, method="mixed", weights="int8")


def test_all_precisions_share_the_group() -> None:
    precision = PLAN.precision(32)
    forms = [precision.of_sublayer(index) for index in range(SUBLAYERS)] + [precision.of_head()]
    assert {form.group for form in forms if form is not None} == {32}


def test_precisions_share_low_bit_weights() -> None:
    target = Target(random_model())
    target.at(Precision.of(4))
    made = set(target._low_bit._made)
    target.at(MixedPrecision(head=4, sublayers=(4,) * SUBLAYERS))
    assert set(target._low_bit._made) == made
    assert target.at(MixedPrecision(sublayers=(16,) * SUBLAYERS)) is target.at(None)


@pytest.mark.parametrize(
    "wrong", [{"sublayers": (4, 5)}, {"sublayers": (4, 4), "head": 2}, {"sublayers": (4, 4), "group": 48}], ids=str
)
def test_precisions_that_there_are_not(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidSettingError):
        MixedPrecision(**wrong)


def test_bits_of_too_few_sublayers() -> None:
    with pytest.raises(UnsupportedModelError, match="5 sublayers have bits"):
        Target(MODEL).check_low_bit(MixedPrecision(sublayers=(4,) * 5))
