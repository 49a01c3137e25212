"""CLaSp's dynamic program against forwards one by one, against brute force, and by hand; when it runs, and on what."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.models import LAYERS, build, plain_text, prompt
from helpers.recording import record
from selfspec import Engine, load_model
from selfspec.decoding.drafter import Needs, Prefill, Probe
from selfspec.decoding.request import Sequence as Generated
from selfspec.errors import InvalidSettingError
from selfspec.methods import clasp, make_method
from selfspec.methods.clasp import Clasp, choose_skipped, program
from selfspec.runtimes.target import Target
from selfspec_lab.prompts import PROMPTS
from selfspec_lab.testing import read_text

LENGTH = 40
FAMILIES = ["llama", "mistral-window", "gemma3", "granite", "phi3-longrope", "qwen3-moe-window"]


def started(target: Target, prompt_ids: list[int], needs: Needs) -> tuple[Generated, Prefill]:
    """The context of a request after its prefill, and what a method is given of it."""
    return read_text(target, prompt_ids, needs, max_new_tokens=4, chunk=16)


def cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(one.double(), other.double(), dim=-1))


class Alone:
    """The state of a prompt's last token after any layers, each by a plain forward of one row."""

    def __init__(self, target: Target, prompt_ids: list[int]) -> None:
        self.target = target
        self.context, _ = started(target, prompt_ids, Needs())
        self.context.cache.length = len(prompt_ids) - 1
        self.known = {(): target.embed(torch.tensor(prompt_ids[-1:]))}

    def layer(self, layer: int, state: torch.Tensor) -> torch.Tensor:
        forward = self.target.lay_out(self.context.state, 1)
        return self.target.run(state, (2 * layer, 2 * layer + 1), forward).hidden_states

    def after(self, layers: tuple[int, ...]) -> torch.Tensor:
        if layers not in self.known:
            self.known[layers] = self.layer(layers[-1], self.after(layers[:-1])[None])
        return self.known[layers][0]


def every_state(
    after: Callable[[tuple[int, ...]], torch.Tensor], layers: range, skips: int
) -> dict[tuple[int, int], tuple[int, ...]]:
    """Algorithm 1 as a double loop over whole layer sets, with nothing shared: by (i, j) the layers that ran."""
    before = tuple(range(layers.start))
    best: dict[tuple[int, int], tuple[int, ...]] = {(0, 0): before}
    for i, layer in enumerate(layers, start=1):
        aim = after(tuple(range(layer + 1)))
        for j in range(min(i, skips) + 1):
            run = best[i - 1, j] + (layer,) if (i - 1, j) in best else None
            skip = best.get((i - 1, j - 1))
            if run is None or skip is None:
                best[i, j] = run or skip or ()
            else:
                best[i, j] = run if cosine(after(run), aim) > cosine(after(skip), aim) else skip
    return best


def compare_with_every_state(target: Target, prompt_ids: list[int], **settings: Any) -> None:
    method = make_method("clasp", target, settings)
    assert isinstance(method, Clasp)
    _, prefilled = started(target, prompt_ids, method.needs)
    aims = torch.stack([prefilled.hidden_states[index][-1] for index in sorted(method.watched)])
    alone = Alone(target, prompt_ids)
    wanted = every_state(alone.after, method.layers, method.skips)
    rows = program(aims, method.layers, method.skips, prefilled.probe.branches(1).run)
    compared = 0
    for i, row in enumerate(rows, start=1):
        for j, state in enumerate(row.states, start=row.lowest):
            torch.testing.assert_close(state, alone.after(wanted[i, j]), rtol=1e-4, atol=1e-4)
            compared += 1
    assert compared > len(rows)
    assert max(len(row.runs) for row in rows) == method.needs.probe_rows
    skipped = choose_skipped(aims, method.layers, method.skips, prefilled.probe.branches(1).run)
    assert skipped == tuple(layer for layer in method.layers if layer not in wanted[len(rows), method.skips])


@pytest.mark.parametrize("name", FAMILIES)
def test_states_equal_forwards_one_by_one(name: str) -> None:
    target = Target(build(name))
    with torch.inference_mode():
        for skips in range(1, LAYERS):
            compare_with_every_state(target, prompt(LENGTH), skipped_layers=skips)
        compare_with_every_state(target, prompt(LENGTH), skipped_layers=2, fixed_first_layers=1, fixed_last_layers=1)
        compare_with_every_state(target, prompt(1), skipped_layers=3)


class Rotations:
    """Layers that turn a vector of the plane by an angle each: the nearest state is the one that lags least."""

    def __init__(self, *degrees: float) -> None:
        self.angles = [math.radians(angle) for angle in degrees]
        self.forwards: list[tuple[int, int]] = []

    def run(self, sublayer: int, states: torch.Tensor) -> torch.Tensor:
        if sublayer % 2 == 0:
            return states
        self.forwards.append((sublayer // 2, len(states)))
        return torch.stack([self.turned(state[0], self.angles[sublayer // 2]) for state in states])[:, None]

    def turned(self, state: torch.Tensor, angle: float) -> torch.Tensor:
        cos, sin = math.cos(angle), math.sin(angle)
        return torch.tensor([[cos, -sin], [sin, cos]], dtype=state.dtype) @ state

    def after(self, layers: tuple[int, ...]) -> torch.Tensor:
        return self.turned(torch.tensor([1.0, 0.0], dtype=torch.float64), sum(self.angles[layer] for layer in layers))

    def aims(self, layers: range) -> torch.Tensor:
        return torch.stack([self.after(tuple(range(end))) for end in range(layers.start, layers.stop + 1)])

    def choose(self, skips: int, layers: range | None = None) -> tuple[int, ...]:
        layers = layers or range(len(self.angles))
        return choose_skipped(self.aims(layers), layers, skips, self.run)


def test_rotations_by_hand() -> None:
    assert Rotations(10, 1, 20, 2).choose(1) == (1,)
    assert Rotations(10, 1, 20, 2).choose(2) == (1, 3)
    assert Rotations(10, 1, 20, 2).choose(3) == (0, 1, 3)
    assert Rotations(10, 1, 20, 2).choose(4) == (0, 1, 2, 3)
    # Skipping 0 and 2 would end exactly where the target ends; after layer 1 the program has given that way up.
    assert Rotations(30, 5, -30, 40).choose(2) == (1, 2)
    assert Rotations(1, 10, 9, 20, 2).choose(1, range(1, 4)) == (2,), "only the free layers"
    assert Rotations(0, 0, 10).choose(1) == (1,), "of two equals the later is skipped: skipping wins ties"


def test_a_row_is_one_forward_of_the_states_that_matter() -> None:
    layers = Rotations(10, 1, 20, 2, 5, 7)
    layers.choose(3)
    # Layer 0 has nothing to run but the target's own way; then 1, 2, 3 states, fewer once the rest must be skipped.
    assert layers.forwards == [(1, 1), (2, 2), (3, 3), (4, 2), (5, 1)]


@settings(max_examples=50)
@given(st.lists(st.integers(-30, 30), min_size=1, max_size=7), st.data())
def test_every_state_is_the_nearer_of_its_two(degrees: list[int], data: st.DataObject) -> None:
    """Equation 2 at every (i, j)."""
    rotations = Rotations(*degrees)
    layers = range(data.draw(st.integers(0, len(degrees) - 1)), len(degrees))
    skips = data.draw(st.integers(1, len(layers)))
    aims = rotations.aims(layers)
    before = {0: aims[0]}
    for i, row in enumerate(program(aims, layers, skips, rotations.run), start=1):
        states = dict(enumerate(row.states, start=row.lowest))
        assert set(states) == set(range(max(0, skips - len(layers) + i), min(i, skips) + 1))
        for j, state in states.items():
            ran = [rotations.turned(before[j], rotations.angles[layers[i - 1]])] if j in before else []
            skipped = [before[j - 1]] if j - 1 in before else []
            nearest = max(cosine(candidate, aims[i]) for candidate in ran + skipped)
            assert cosine(state, aims[i]) == pytest.approx(nearest, abs=1e-6)
        before = states
    assert len(set(rotations.choose(skips, layers))) == skips


def every_set(alone: Alone, layers: range, skips: int, state: torch.Tensor) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Every way to skip ``skips`` of the layers, with the state it ends in."""
    if not layers:
        yield (), state
        return
    layer, rest = layers[0], layers[1:]
    if skips:
        yield from (((layer, *skipped), end) for skipped, end in every_set(alone, rest, skips - 1, state))
    if len(rest) >= skips:
        yield from every_set(alone, rest, skips, alone.layer(layer, state))


def rank(target: Target, prompt_ids: list[int], **settings: Any) -> tuple[float, float, float]:
    """Of the chosen set: its cosine, the best of all sets, and the share of sets that are worse."""
    method = make_method("clasp", target, settings)
    assert isinstance(method, Clasp)
    _, prefilled = started(target, prompt_ids, method.needs)
    aims = torch.stack([prefilled.hidden_states[index][-1] for index in sorted(method.watched)])
    chosen = choose_skipped(aims, method.layers, method.skips, prefilled.probe.branches(1).run)
    alone = Alone(target, prompt_ids)
    start = alone.after(tuple(range(method.layers.start)))[None]
    similarities = {
        skipped: cosine(state[0], aims[-1]) for skipped, state in every_set(alone, method.layers, method.skips, start)
    }
    assert len(similarities) == math.comb(len(method.layers), method.skips)
    worse = sum(value <= similarities[chosen] for value in similarities.values()) / len(similarities)
    return similarities[chosen], max(similarities.values()), worse


@pytest.mark.parametrize("name", FAMILIES)
def test_the_chosen_set_against_every_set(name: str) -> None:
    target = Target(build(name))
    shares = []
    with torch.inference_mode():
        for skips in range(1, LAYERS):
            found, best, worse = rank(target, prompt(LENGTH), skipped_layers=skips)
            assert found <= best + 1e-6
            shares.append(worse)
    assert sum(shares) / len(shares) > 0.7, "no better than a random set"


@pytest.mark.trained
def test_on_trained_weights_the_chosen_set_is_near_the_best() -> None:
    """Figure 3b: 12 free layers, half of them skipped, against all 924 sets."""
    model, tokenizer = load_model("tiny", dtype="float32", device="cpu")
    target = Target(model)
    shares = []
    with torch.inference_mode():
        for prompts in PROMPTS.values():
            ids = tokenizer(prompts[0])["input_ids"]
            found, best, worse = rank(target, ids, skipped_layers=6, fixed_first_layers=2, fixed_last_layers=2)
            assert found <= best + 1e-6
            shares.append(worse)
    assert min(shares) >= 0.95, shares


def generate(name: str = "llama", prompt_length: int = 17, new_tokens: int = 40, **settings: Any) -> Any:
    settings = {"schedule": "paper", "skipped_layers": 2, "draft_exit_threshold": 0.2, **settings}
    result = Engine(build(name), method="clasp", settings=settings).generate(
        prompt(prompt_length), max_new_tokens=new_tokens
    )
    assert result.token_ids == plain_text(name, prompt(prompt_length), new_tokens)
    return result


@pytest.mark.parametrize("interval", [1, 3, 1000])
def test_it_chooses_once_every_interval(interval: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[tuple[int, ...]] = []

    def choose(*arguments: Any) -> tuple[int, ...]:
        chosen.append(choose_skipped(*arguments))
        return chosen[-1]

    monkeypatch.setattr(clasp, "choose_skipped", choose)
    feedbacks = record(Clasp, monkeypatch)
    result = generate(update_interval=interval, skipped_layers=3)
    assert result.round_count > 6
    assert result.accepted > 0
    assert len(chosen) == math.ceil(result.round_count / interval)
    for number, (played, feedback) in enumerate(zip(result.rounds, feedbacks, strict=True)):
        skipped = chosen[number // interval]
        assert played.kept.skipped == tuple(sublayer for layer in skipped for sublayer in (2 * layer, 2 * layer + 1))
        watched = set(feedback.hidden_states)
        assert watched == (set(range(0, 2 * LAYERS + 1, 2)) if (number + 1) % interval == 0 else set())
    if interval == 1:
        assert len(set(chosen)) > 1, "the choice never changed"


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_it_chooses_by_the_states_of_the_last_committed_token(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[list[int], torch.Tensor]] = []
    points = Probe.points
    heads: list[list[int]] = []

    def noted(probe: Probe, places: list[int], *options: Any) -> Any:
        assert places == [probe.committed - 1]
        heads.append(probe.token_ids[: probe.committed].tolist())
        return points(probe, places, *options)

    def choose(states: torch.Tensor, *arguments: Any) -> tuple[int, ...]:
        seen.append((heads[-1], states.clone()))
        return choose_skipped(states, *arguments)

    monkeypatch.setattr(Probe, "points", noted)
    monkeypatch.setattr(clasp, "choose_skipped", choose)
    result = generate(name, update_interval=2)
    assert len(seen) > 3
    text = prompt(17) + list(result.token_ids)
    for number, (ids, states) in enumerate(seen):
        # The pending token is not among them: nothing was computed for it yet.
        committed = 17 + sum(len(record.token_ids) for record in result.rounds[: 2 * number])
        assert ids == text[:committed]
        with torch.inference_mode():
            wanted = build(name)(torch.tensor([ids]), output_hidden_states=True).hidden_states
        # The last of transformers' states has been through the final norm.
        torch.testing.assert_close(
            states[:-1], torch.stack([state[0, -1] for state in wanted[:-1]]), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("new_tokens", [1, 2, 3, 4, 5])
def test_near_the_end_of_the_output(new_tokens: int) -> None:
    result = generate(prompt_length=1, new_tokens=new_tokens, update_interval=1)
    assert result.drafted <= max(0, new_tokens - 2)
    assert result.drafted > 0 or new_tokens < 3


@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_coupled_sampling_writes_the_plain_text(name: str) -> None:
    settings = {"skipped_layers": 2, "update_interval": 2, "draft_exit_threshold": 0.0, "draft_length": 4}
    sampled = {"max_new_tokens": 40, "temperature": 0.8, "seed": 5}
    plain = Engine(build(name), method="autoregressive").generate(prompt(17), **sampled)
    result = Engine(build(name), method="clasp", settings=settings).generate(prompt(17), **sampled)
    assert result.token_ids == plain.token_ids
    assert result.drafted > 0
    assert result.accepted > 0


def test_speculative_sampling_drafts_and_accepts() -> None:
    settings = {"skipped_layers": 2, "update_interval": 2, "draft_exit_threshold": 0.0, "draft_length": 4}
    engine = Engine(build("llama"), method="clasp", settings=settings)
    result = engine.generate(prompt(17), max_new_tokens=40, temperature=0.8, acceptance="speculative")
    assert (result.new_token_count, result.finish_reason) == (40, "length")
    assert 0 < result.accepted < result.drafted


def test_drafts_end_at_the_threshold_and_at_the_limit() -> None:
    always = generate(draft_exit_threshold=0.0, draft_length=3)
    assert {record.threshold for record in always.rounds} == {None}
    assert max(record.drafted for record in always.rounds) == 3
    unsure = generate(draft_exit_threshold=1.0)
    assert {record.threshold for record in unsure.rounds} == {1.0}
    assert max(record.drafted for record in unsure.rounds) == 1


@pytest.mark.parametrize(
    ("settings", "skips"),
    [
        ({}, 1),
        ({"skip_ratio": 0.5}, 3),
        ({"skip_ratio": 0.34}, 2),
        ({"skip_ratio": 0.8}, 5),
        ({"skipped_layers": 4}, 4),
    ],
)
def test_number_of_skipped_layers(settings: dict[str, Any], skips: int) -> None:
    result = generate(**{"skipped_layers": None, **settings})
    assert {len(record.kept.skipped) for record in result.rounds} == {2 * skips}


def test_fixed_layers_are_never_skipped() -> None:
    result = generate(skipped_layers=3, fixed_first_layers=2, fixed_last_layers=1)
    assert {record.kept.skipped for record in result.rounds} == {(4, 5, 6, 7, 8, 9)}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"skipped_layers": 2, "skip_ratio": 0.5}, "both set the number of layers; give only one"),
        ({"skipped_layers": 6}, r"skipped_layers 6 skips 6 layers: this model has 6; skip 1 to 5"),
        ({"skip_ratio": 0.05}, r"skip_ratio 0\.05 skips 0 layers: this model has 6; skip 1 to 5"),
        (
            {"skip_ratio": 0.5, "fixed_first_layers": 4},
            r"skips 3 layers: this model has 6, 2 of them free, skip 1 to 2",
        ),
        ({"fixed_first_layers": 4, "fixed_last_layers": 4}, "0 of them free, fix fewer of them"),
        ({"skipped_layers": 0}, "skipped_layers must be at least 1"),
        ({"update_interval": 0}, "update_interval must be at least 1"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSettingError, match=message):
        make_method("clasp", Target(build("llama")), settings)
