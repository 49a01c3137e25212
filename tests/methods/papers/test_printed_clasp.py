"""``--paper clasp`` against Algorithm 1 as it is printed (CLaSp), line by line, and its three stages of section 3.1."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.models import LAYERS, build, plain_text, prompt
from helpers.recording import record
from selfspec.engine import Engine
from selfspec.methods import clasp
from selfspec.methods.clasp import Clasp, choose_skipped
from selfspec.model.kept import KeptSet

pytestmark = pytest.mark.filterwarnings("ignore::selfspec.errors.ChangedPaperWarning")


def printed(x: list[torch.Tensor], layers: list[Any], m: int) -> list[int]:
    """Algorithm 1 in the order of its lines, with states of one dimension each; returns the skipped layers."""
    count = len(layers)
    g: dict[tuple[int, int], torch.Tensor] = {(0, 0): x[0]}  # g[0, 0] <- x_0

    def near(state: torch.Tensor, aim: torch.Tensor) -> float:
        return float(torch.nn.functional.cosine_similarity(state, aim, dim=0))

    for i in range(1, count + 1):  # for i = 1 to L
        g[i, 0] = x[i]  # g[i, 0] <- x_i
        ell = min(i - 1, m)  # l <- min(i - 1, M)
        for j in range(1, ell + 1):
            ran = layers[i - 1](g[i - 1, j])  # G <- f_(i-1)(g[i - 1, 1 : l + 1])
            skipped = g[i - 1, j - 1]  # F <- cat(G, g[i - 1, : l])
            better = near(ran, x[i]) > near(skipped, x[i])  # if σ[: l] > σ[l :]
            g[i, j] = ran if better else skipped
        if i <= m:
            g[i, i] = g[i - 1, i - 1]  # if i <= M then g[i, i] <- g[i - 1, i - 1]
    skipped_layers = []
    i, j = count, m
    while i > 0 and j > 0:  # backtracking
        if g[i, j] is g[i - 1, j - 1]:  # g[i, j] = g[i - 1, j - 1]
            skipped_layers.append(i - 1)  # S[i - 1] <- 1
            j -= 1
        i -= 1
    return sorted(skipped_layers)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-40, 40), min_size=2, max_size=8), st.data())
def test_the_choice_is_that_of_the_printed_algorithm(degrees: list[int], data: st.DataObject) -> None:
    """Layers that turn a vector by an angle, each a little different, so that no two states are the same."""
    angles = [math.radians(degree + 0.37 * index) for index, degree in enumerate(degrees)]
    skips = data.draw(st.integers(1, len(degrees)))

    def turn(state: torch.Tensor, angle: float) -> torch.Tensor:
        cos, sin = math.cos(angle), math.sin(angle)
        return torch.tensor([[cos, -sin], [sin, cos]], dtype=torch.float64) @ state

    x = [torch.tensor([1.0, 0.0], dtype=torch.float64)]
    for angle in angles:
        x.append(turn(x[-1], angle))
    layers = [lambda state, angle=angle: turn(state, angle) for angle in angles]

    def run(sublayer: int, states: torch.Tensor) -> torch.Tensor:
        if sublayer % 2 == 0:
            return states
        return torch.stack([turn(state[0], angles[sublayer // 2]) for state in states])[:, None]

    chosen = choose_skipped(torch.stack(x), range(len(angles)), skips, run)
    assert list(chosen) == printed(x, layers, skips)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_three_stages_of_section_3(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafting, verification, layer optimisation on the last accepted token, once every LOI rounds (3.1, 3.7)."""
    optimised: list[tuple[int, torch.Tensor, int]] = []
    feedbacks = record(Clasp, monkeypatch)
    own = clasp.choose_skipped

    def noted(states: torch.Tensor, layers: range, skips: int, run: Any) -> tuple[int, ...]:
        optimised.append((len(feedbacks), states.clone(), skips))
        return own(states, layers, skips, run)

    monkeypatch.setattr(clasp, "choose_skipped", noted)
    result = Engine(build(name), paper="clasp", settings={"update_interval": 5}).generate(prompt(40), max_new_tokens=60)
    assert result.token_ids == plain_text(name, prompt(40), 60)
    assert [rounds for rounds, _, _ in optimised] == list(range(0, result.round_count, 5))
    assert {skips for _, _, skips in optimised} == {round(0.55 * LAYERS)}  # 5.3.1: M
    for rounds, states, _ in optimised[1:]:
        feedback = feedbacks[rounds - 1]
        row = feedback.acceptance.rows[-1]
        for place, index in enumerate(sorted(feedback.hidden_states)):
            torch.testing.assert_close(states[place], feedback.hidden_states[index][row])
    for each in result.rounds:
        assert each.kept is not None
        assert len(each.kept.sublayers) == 2 * (LAYERS - round(0.55 * LAYERS))
        assert each.threshold == 0.7  # 5.3.3: DET
        assert each.drafted <= 10
    assert result.accepted > 0


def test_the_ports_first_choice_follows_the_first_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """clasp_generator.py: the whole model drafts the first round, and the set is optimised after it."""
    engine = Engine(build("llama"), paper="clasp", authors=True)
    result = engine.generate(prompt(40), max_new_tokens=40)
    assert result.token_ids == plain_text("llama", prompt(40), 40)
    first, *later = result.rounds
    assert first.kept == KeptSet.full(2 * LAYERS)
    assert first.accepted == first.drafted > 0
    assert {each.kept for each in later if each.kept is not None} == {later[0].kept}
    assert later[0].kept != first.kept
    assert sum(each.accepted for each in later) > 0
