"""``--paper del`` against Algorithm 1 as it is printed (DEL, appendix A), line by line, with truncated models."""

import math
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest

from helpers.models import LAYERS, build, plain_text, prompt
from helpers.recording import record
from helpers.truncated import predictions, predictions_of
from selfspec.decoding.draft import LayerDraft
from selfspec.engine import Engine
from selfspec.errors import InvalidParameterError, InvalidSettingError
from selfspec.methods.dynamic_exit import Del, Statistics
from selfspec.model.kept import KeptSet
from selfspec.types import Generation

PROMPT, NEW_TOKENS = 40, 48
pytestmark = pytest.mark.filterwarnings("ignore::selfspec.errors.ChangedPaperWarning")
D_MAX, OMEGA, CONTEXT = 18, 0.95, 32
"""Appendix B.2."""


@dataclass
class Algorithm1:
    """The printed algorithm. Numbers are those of its lines."""

    name: str
    text: list[int]
    c: list[list[int]] = field(default_factory=list)  # 4
    u: list[int] = field(default_factory=list)
    tcs: list[list[float]] = field(default_factory=list)
    fcs: list[list[float]] = field(default_factory=list)

    def decayed(self, values: list[Any]) -> float:
        """S(a) of section 4.2."""
        r = len(values)
        return sum(OMEGA ** (r - i - 1) * values[i] for i in range(r))

    def update(self, positions: range) -> tuple[int, float]:
        """DEL_UPDATE (18 to 30): the exit layer and the threshold of the next round."""
        shadow = predictions(self.name, self.text)  # 19
        target = shadow[-1]
        matches = [[layer[at][0] == target[at][0] for at in positions] for layer in shadow[:-1]]
        sure = [[layer[at][1] for at in positions] for layer in shadow[:-1]]
        self.c.append([sum(layer) for layer in matches])  # 21, 22: the rows up to the first mismatch, that one too
        self.u.append(len(positions))  # 20: their number; see test_equation_2
        pairs = [list(zip(*each, strict=True)) for each in zip(sure, matches, strict=True)]
        self.tcs.append([math.fsum(s for s, matched in layer if matched) for layer in pairs])  # 25
        self.fcs.append([math.fsum(s for s, matched in layer if not matched) for layer in pairs])  # 26
        alpha = [self.decayed([c[layer] for c in self.c]) / self.decayed(self.u) for layer in range(LAYERS - 1)]  # 23
        best, exit_layer = -1.0, 0
        for layer, d in product(range(1, LAYERS), range(D_MAX + 1)):  # 24
            tpl = sum(alpha[layer - 1] ** i for i in range(d + 1)) / (d * layer + LAYERS)  # equation 1
            if tpl > best * (1 + 1e-12):
                best, exit_layer = tpl, layer
        return exit_layer, self.threshold(exit_layer - 1)

    def threshold(self, layer: int) -> float:
        """τ (28). 0 / 0 is not a number, and no confidence is below it."""
        matched = self.decayed([c[layer] for c in self.c])
        missed = self.decayed([u - c[layer] for u, c in zip(self.u, self.c, strict=True)])
        if min(matched, missed) < 1e-9:
            return math.nan
        sums = self.decayed([t[layer] for t in self.tcs]), self.decayed([f[layer] for f in self.fcs])
        return (sums[0] / matched + sums[1] / missed) / 2

    def draft(self, exit_layer: int, threshold: float, room: int) -> list[int]:
        """Lines 6 to 13."""
        drafted: list[int] = []
        for _ in range(min(D_MAX, room)):  # 7; the last tokens of an output leave less room
            token, s = predictions_of(self.name, exit_layer, [*self.text, *drafted])[-1]  # 8
            if s < threshold:  # 9
                break  # 10
            drafted.append(token)  # 12
        return drafted

    def rounds(self, new_tokens: int) -> list[tuple[int, list[int]]]:
        """Every round's exit layer and the tokens that it verifies."""
        played: list[tuple[int, list[int]]] = []
        prompt_length = len(self.text)
        exit_layer, threshold = self.update(range(max(0, prompt_length - CONTEXT), prompt_length))  # 2
        self.c, self.u, self.tcs, self.fcs = [], [], [], []  # 4
        self.text.append(predictions_of(self.name, LAYERS, self.text)[-1][0])
        while (room := prompt_length + new_tokens - len(self.text)) > 0:  # 5
            drafted = self.draft(exit_layer, threshold, room - 1)
            target = [token for token, _ in predictions_of(self.name, LAYERS, [*self.text, *drafted])]
            first = len(self.text) - 1
            accepted = 0  # 14
            while accepted < len(drafted) and drafted[accepted] == target[first + accepted]:
                accepted += 1
            played.append((exit_layer, drafted))
            self.text += [*drafted[:accepted], target[first + accepted]]
            exit_layer, threshold = self.update(range(first, first + accepted + 1))  # 15
        return played


def write(name: str, new_tokens: int = NEW_TOKENS, **settings: Any) -> Generation:
    engine = Engine(build(name), paper="del", settings=settings)
    result = engine.generate(prompt(PROMPT), max_new_tokens=new_tokens)
    assert result.token_ids == plain_text(name, prompt(PROMPT), new_tokens)
    return result


@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3"])
def test_every_round_is_that_of_the_printed_algorithm(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    feedbacks = record(Del, monkeypatch)
    result = write(name)
    played = Algorithm1(name, prompt(PROMPT)).rounds(NEW_TOKENS)
    assert [feedback.proposal.token_ids.tolist() for feedback in feedbacks] == [drafted for _, drafted in played]
    for each, (exit_layer, _) in zip(result.rounds, played, strict=True):
        if each.kept is not None:
            assert each.kept.sublayers == tuple(range(2 * exit_layer))
    assert result.drafted > 0
    assert result.accepted > 0
    assert any(not drafted for _, drafted in played), "no round dropped its first token"
    assert len({exit_layer for exit_layer, drafted in played if drafted}) > 1


def test_equation_2_counts_the_rows_that_it_compares() -> None:
    """Printed, u_r is the index of the first mismatch, where c_r has u_r + 1 rows: then α passes 1."""
    matched, rows = 5.0, 6.0
    statistics = Statistics.empty(2)
    statistics.sums[0, 0, 0], statistics.sums[0, 1, 0] = matched, rows - matched
    assert float(statistics.acceptance[0]) == pytest.approx(matched / rows)
    all_match_but_last_of_exit = 6.0
    assert all_match_but_last_of_exit / (rows - 1) > 1


def test_ablation_e_drafts_the_chosen_length() -> None:
    """Figure 3(a), DEL-ℰ: exit layer and length by TPL alone."""
    method: Any = Engine(build("llama"), paper="del", settings={"dynamic_length": False}).method
    result = write("llama", dynamic_length=False)
    assert method.stop(0.9) is None
    assert result.drafted > 0
    assert result.accepted > 0
    assert all(each.threshold is None for each in result.rounds)
    played = Algorithm1("llama", prompt(PROMPT))
    played.update(range(PROMPT - CONTEXT, PROMPT))
    alpha = [played.c[0][layer] / played.u[0] for layer in range(LAYERS - 1)]
    table = {
        (layer, d): sum(alpha[layer - 1] ** i for i in range(d + 1)) / (d * layer + LAYERS)
        for layer, d in product(range(1, LAYERS), range(D_MAX + 1))
    }
    first = result.rounds[0]
    chosen = (len(first.kept.sublayers) // 2, first.drafted) if first.kept else (1, 0)
    assert table[chosen] == pytest.approx(max(table.values()))


@pytest.mark.parametrize("exit_layer", [1, 3, LAYERS - 1])
def test_ablation_gamma_fixes_the_exit_layer(exit_layer: int) -> None:
    """Figure 3(a), DEL-γ: the exit layer is fixed, the length follows the confidence."""
    result = write("llama", fixed_exit=exit_layer)
    kept = {each.kept.sublayers for each in result.rounds if each.kept is not None}
    assert kept == {tuple(range(2 * exit_layer))}
    assert len({each.drafted for each in result.rounds}) > 1
    assert result.accepted > 0


def test_ablation_e_lim_leaves_early_layers_out() -> None:
    """Figure 3(a), DEL-ℰ-lim: 3 < ℓ."""
    result = write("llama", shallowest_exit=4)
    exits = {len(each.kept.sublayers) // 2 for each in result.rounds if each.kept is not None}
    assert exits <= {4, 5}
    assert result.drafted > 0
    assert result.accepted > 0
    assert {len(r.kept.sublayers) // 2 for r in write("llama").rounds if r.kept is not None} - {4, 5}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"fixed_exit": LAYERS}, "fixed_exit 6 is not below the 6 layers"),
        ({"shallowest_exit": LAYERS}, "shallowest_exit 6 is not below"),
        ({"fixed_exit": 2, "shallowest_exit": 2}, "leave shallowest_exit out"),
    ],
)
def test_exits_that_do_not_fit_are_refused(settings: dict[str, int], said: str) -> None:
    with pytest.raises(InvalidSettingError, match=said):
        Engine(build("llama"), paper="del", settings=settings)


def test_a_dropped_token_is_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines 9 to 12: every verified token is as sure as the threshold; by default the last one need not be."""
    feedbacks = record(Del, monkeypatch)

    def unsure() -> int:
        return sum(c < (f.proposal.threshold or 0) for f in feedbacks for c in f.proposal.confidences)

    write("llama")
    assert feedbacks
    assert unsure() == 0
    default = Engine(build("llama"), method="del", settings={"schedule": "paper", "allow_no_draft": False})
    default.generate(prompt(PROMPT), max_new_tokens=NEW_TOKENS)
    assert unsure() > 0


def test_a_tree_has_no_token_to_drop() -> None:
    with pytest.raises(InvalidParameterError, match="drop_unsure"):
        LayerDraft(KeptSet.early_exit(1, 4), 2, widths=lambda _: 2, drop_unsure=True)


@pytest.mark.parametrize("changes", [{"repetition_penalty": 1.3}, {"temperature": 0.8, "seed": 3}], ids=str)
@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_dropped_tokens_change_no_text(name: str, changes: dict[str, Any]) -> None:
    wanted = Engine(build(name), method="autoregressive").generate(prompt(PROMPT), max_new_tokens=NEW_TOKENS, **changes)
    result = Engine(build(name), paper="del").generate(prompt(PROMPT), max_new_tokens=NEW_TOKENS, **changes)
    assert result.token_ids == wanted.token_ids
    assert result.drafted > 0
    assert result.accepted > 0
