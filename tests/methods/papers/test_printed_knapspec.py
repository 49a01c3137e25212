"""``--paper knapspec`` against Algorithm 1 as it is printed (KnapSpec), line by line, and sections 3.4 and 3.5."""

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from helpers.models import LAYERS, SUBLAYERS, build, plain_text, prompt
from selfspec.engine import Engine
from selfspec.methods import find_method, knapspec
from selfspec.methods.knapsack import Candidates, backtrack, fill_table, integer_weights
from selfspec.methods.state import LearnedState
from selfspec.model.kept import KeptSet
from selfspec.runtimes.costs.parts import LatencyProfile
from selfspec.types import Generation

pytestmark = pytest.mark.filterwarnings("ignore::selfspec.errors.ChangedPaperWarning")
TAU = 0.5
"""Section 3.4."""


def cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(one.double(), other.double(), dim=-1).mean())


def printed(x: torch.Tensor, f: list[torch.Tensor], w: tuple[int, int], budget: int) -> dict[int, tuple[int, ...]]:
    """Lines 2 to 22, with sublayers that add a constant: by skipped weight the skipped sublayers (1-based)."""
    g: dict[tuple[int, int], tuple[torch.Tensor, tuple[int, ...]]] = {(0, 0): (x[0], ())}  # 4
    for i in range(1, len(f) + 1):  # 5
        weight = w[0] if i % 2 == 1 else w[1]  # 6
        offers: dict[int, list[tuple[float, bool, torch.Tensor, tuple[int, ...]]]] = {}
        for j in range(budget + 1):  # 7
            if (i - 1, j) not in g:  # 8
                continue
            state, skipped = g[i - 1, j]
            ran = state + f[i - 1]  # 9
            offers.setdefault(j, []).append((cosine(ran, x[i]), True, ran, skipped))  # 10
            if j + weight <= budget:  # 3.4: pruning (ii)
                offer = (cosine(state, x[i]), False, state, (*skipped, i))  # 13, 14
                offers.setdefault(j + weight, []).append(offer)
        for j, each in offers.items():
            best = max(each, key=lambda offer: offer[:2])  # equation 8: runs on a tie
            if best[0] >= TAU or j == 0:  # 11, 15: max(τ, ...)
                g[i, j] = best[2:]
    return {j: skipped for (i, j), (_, skipped) in g.items() if i == len(f)}  # 18 to 22


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.tuples(st.integers(1, 3), st.integers(1, 3)), st.integers(0, 2**16))
def test_the_candidates_are_those_of_the_printed_algorithm(layers: int, w: tuple[int, int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    f = [0.7 * torch.randn(2, 4, generator=generator) for _ in range(2 * layers)]
    x = torch.stack([torch.randn(2, 4, generator=generator), *f]).cumsum(0)
    budget = sum(w) * layers // 2  # 2, 3.4: K / 2
    table = fill_table(x, [*w * layers], budget, TAU, lambda index, states: states + f[index])
    assume(all(abs(float(s) - TAU) > 1e-5 for s in table.similarities if s > -math.inf))
    sets = backtrack(table.skips, [*w * layers])
    found = {j: tuple(int(i) + 1 for i in sets[j].nonzero().flatten()) for j in table.weights}
    assert found == printed(x, f, w, budget)


def profile(attention: float, mlp: float = 1e-3) -> LatencyProfile:
    return LatencyProfile("cpu", "float32", LAYERS, 0.0, attention, mlp, 0.0, 0.0)


def observe(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Candidates, dict[str, Any]]]:
    """From now on the candidates of every selection, and what they were found by."""
    seen: list[tuple[Candidates, dict[str, Any]]] = []
    own = knapspec.find_candidates

    def noted(target: Any, references: torch.Tensor, run: Any, **options: Any) -> Candidates:
        found = own(target, references, run, **options)
        seen.append((found, {**options, "references": references.shape}))
        return found

    monkeypatch.setattr(knapspec, "find_candidates", noted)
    return seen


def write(name: str, latencies: LatencyProfile, tokens: int = 80, **options: Any) -> tuple[Generation, Any]:
    engine = Engine(build(name), **options)
    engine.method.restore(LearnedState({"latency_profile": latencies.to_dict()}))
    result = engine.generate(prompt(30), max_new_tokens=tokens)
    assert result.token_ids == plain_text(name, prompt(30), tokens)
    return result, engine.method


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_selections_are_those_of_sections_3_4_and_3_5(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = observe(monkeypatch)
    latencies = profile(8.2e-3)
    result, method = write(name, latencies, paper="knapspec", settings={"interval": 12})
    candidates, options = seen[0]
    first = result.rounds[:5]
    assert options["weights"] == (8, 1)  # 3.4: rounding alone
    assert options["skip_ratio"] == 0.5  # 3.4: K / 2
    assert options["similarity_threshold"] == TAU
    assert not options["fixed_ends"]  # equation 5
    assert options["references"][:2] == (SUBLAYERS + 1, sum(each.accepted + 1 for each in first))  # equation 6, m = 5
    assert candidates.kept[0] == KeptSet.full(SUBLAYERS)
    skipped = {index for kept in candidates.kept for index in kept.skipped}
    assert skipped & {0, 1}
    assert skipped & {SUBLAYERS - 2, SUBLAYERS - 1}
    for kept in candidates.kept:
        weight = sum((8, 1)[index % 2] for index in kept.skipped)
        assert weight <= 9 * LAYERS // 2
    table = {}
    for kept, alpha in zip(candidates.kept, candidates.acceptance.tolist(), strict=True):
        draft = sum((latencies.attention(0), latencies.mlp)[index % 2] for index in kept.sublayers)
        target = LAYERS * (latencies.attention(0) + latencies.mlp)
        for gamma in range(1, 11):  # 3.5: D = 10
            table[kept, gamma] = sum(alpha**i for i in range(gamma + 1)) / (gamma * draft + target)  # equation 4
    best = max(table.values())
    selected = method.best_of(candidates, 0)
    assert table[selected.kept, selected.draft_length] == pytest.approx(best)
    assert {each.threshold for each in result.rounds if each.kept is not None} == {0.7}  # 3.5: τ_conf
    assert len(seen) > 1
    assert result.accepted > 0


def test_the_authors_code_leaves_the_full_model_and_the_ends_out(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = observe(monkeypatch)
    result, method = write("llama", profile(8.2e-3), paper="knapspec", authors=True)
    candidates, options = seen[0]
    assert options["weights"] == (5, 1)
    assert options["references"][0] == SUBLAYERS - 1
    assert all(not {0, 1, SUBLAYERS - 2, SUBLAYERS - 1} & set(kept.skipped) for kept in candidates.kept)
    assert all(each.kept is not None and each.kept.skipped for each in result.rounds[5:] if each.drafted)
    assert sum(each.accepted for each in result.rounds[5:]) > 0
    only_itself = torch.tensor([1.0] + [0.0] * (len(candidates.kept) - 1), dtype=torch.float64)
    hopeless = Candidates(candidates.kept, candidates.similarities, only_itself)
    chosen = method.best_of(hopeless, 0)
    assert (chosen.kept, chosen.draft_length) == (candidates.kept[1], 0)  # optimize_tpt: the first with d = 0
    paper: Any = Engine(build("llama"), paper="knapspec").method
    paper.restore(LearnedState({"latency_profile": profile(8.2e-3).to_dict()}))
    assert paper.best_of(hopeless, 0).kept == KeptSet.full(SUBLAYERS)


def test_the_whole_model_alone_stays_a_candidate() -> None:
    alone = Candidates((KeptSet.full(SUBLAYERS),), torch.ones(1), torch.ones(1))
    assert alone.that_skip() is alone


@pytest.mark.parametrize(("most", "weights"), [(5, (5, 1)), (None, (13, 1)), (2, (2, 1))])
def test_the_largest_weight(most: int | None, weights: tuple[int, int]) -> None:
    assert integer_weights(13.2, 1.0, most) == weights


def test_our_schedule_takes_the_papers_budget_and_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = observe(monkeypatch)
    settings = {"skip_budget": 0.5, "fixed_ends": False, "recent_tokens": 8, "max_weight": None}
    result, method = write("llama", profile(1e-3), method="knapspec", settings=settings)
    assert seen
    assert seen[0][1]["skip_ratio"] == 0.5
    assert result.drafted > 0
    assert result.accepted > 0
    other: Any = Engine(build("llama"), method="knapspec", settings=settings).method
    other.restore(method.state())
    assert other.last_choice.selection.kept == method.last_choice.selection.kept


def test_the_interval_is_that_of_the_models_size() -> None:
    """Section 5: T = 64, and 128 for 10 billion parameters and more."""
    method: Any = Engine(build("llama"), paper="knapspec").method
    assert method.interval == 64
    assert issubclass(find_method("paper(knapspec)"), knapspec.KnapSpec)
