"""When layer drafts end, and what all of the planning loses against the best that is possible."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec.planning.plans import DraftPolicy, Known, Outlook, fill_rows, plain
from selfspec.runtimes.costs.rows import CostTable, filled_up

LIMIT = 8


@dataclass(frozen=True)
class World:
    """Costs, and what may be drafted: layers, and in each round one of several matches."""

    verify: CostTable
    draft: float
    outlook: Outlook
    matches: tuple[tuple[float, ...], ...]
    """Of equal probability; by number of copied tokens the probability that all are right."""


def table(kind: str, source: random.Random) -> CostTable:
    """Seconds by rows: convex, stepped, with dips, or noisy."""
    slope = source.choice([0.01, 0.05, 0.15, 0.4])
    rows = np.arange(1, 40)
    seconds = {
        "convex": 1 + slope * (rows - 1) ** source.choice([1.0, 1.5]),
        "stepped": 1 + slope * 2 * ((rows - 1) // source.choice([2, 3, 4, 8])),
        "dips": 1 + slope * (rows - 1) * np.where(rows % 4, 1.0, 0.5),
        "noisy": 1 + slope * (rows - 1) + np.array([source.uniform(0, 0.3) for _ in rows]),
    }[kind]
    return (0.0, *np.maximum(seconds, 0.7).tolist())


def random_world(source: random.Random) -> World:
    kinds = source.choice([1, 2, 3])
    weights = np.array([source.uniform(0.1, 1.0) for _ in range(kinds)])
    acceptances = np.array([source.choice([0.1, 0.5, 0.8, 0.95, 0.99]) for _ in range(kinds)])
    matches = []
    for _ in range(3):
        rate, length = source.uniform(0.05, 0.98), source.choice([0, 2, 8, 16])
        matches.append(tuple(rate ** (count + 1) for count in range(length)))
    verify = table(source.choice(["convex", "stepped", "dips", "noisy"]), source)
    draft = source.choice([0.05, 0.2, 0.4, 0.8])
    return World(verify, draft, Outlook(weights / weights.sum(), acceptances), tuple(matches))


def best_layers(world: World, rate: float) -> tuple[float, float, float]:
    """Worth, tokens and seconds of the best layer draft, by going through all that can happen."""
    kinds = list(zip(world.outlook.weights, world.outlook.acceptances, strict=True))

    @cache
    def going_on(drafted: int, counts: tuple[int, ...]) -> tuple[float, float, float]:
        survival = float(np.prod([acceptance**count for (_, acceptance), count in zip(kinds, counts, strict=True)]))
        tokens, seconds = 0.0, world.draft + world.verify[drafted + 2] - world.verify[drafted + 1]
        for kind, (weight, acceptance) in enumerate(kinds):
            after = tuple(count + (index == kind) for index, count in enumerate(counts))
            _, more, longer = stop_or_go_on(drafted + 1, after)
            tokens += weight * (survival * acceptance + more)
            seconds += weight * longer
        return tokens - rate * seconds, tokens, seconds

    def stop_or_go_on(drafted: int, counts: tuple[int, ...]) -> tuple[float, float, float]:
        stop = (0.0, 0.0, 0.0)
        return stop if drafted == LIMIT else max(stop, going_on(drafted, counts))

    _, tokens, seconds = going_on(0, (0,) * len(kinds))
    tokens, seconds = 1 + tokens, world.verify[1] + seconds
    return tokens - rate * seconds, tokens, seconds


def best_round(world: World, survival: tuple[float, ...], rate: float) -> tuple[float, float]:
    """Tokens and seconds of the round that is worth most, of all that there are."""
    options = [best_layers(world, rate)]
    expected = 1.0
    for count in range(len(survival) + 1):
        expected += survival[count - 1] if count else 0.0
        options.append((expected - rate * world.verify[count + 1], expected, world.verify[count + 1]))
    _, tokens, seconds = max(options)
    return tokens, seconds


def played_layers(world: World, policy: DraftPolicy) -> tuple[float, float]:
    """Tokens and seconds that a draft really brings if it ends by a policy, by going through all that can happen."""
    kinds = list(zip(world.outlook.weights, world.outlook.acceptances, strict=True))

    def play(path: tuple[float, ...], survival: float) -> tuple[float, float]:
        tokens, seconds = 0.0, world.draft + world.verify[len(path) + 2] - world.verify[len(path) + 1]
        for weight, acceptance in kinds:
            drafted = (*path, float(acceptance))
            stop = policy.begin(lambda confidence: confidence)
            ends = [stop.stops(each) for each in drafted][-1] or len(drafted) == policy.limit
            more, longer = (0.0, 0.0) if ends else play(drafted, survival * acceptance)
            tokens += weight * (survival * acceptance + more)
            seconds += weight * longer
        return tokens, seconds

    tokens, seconds = play((), 1.0)
    return 1 + tokens, world.verify[1] + seconds


def planned_round(world: World, survival: tuple[float, ...], rate: float) -> tuple[float, float]:
    """Tokens and seconds of the round that ``auto`` plans."""
    known = Known("lookup", [0] * len(survival), survival)
    filled = fill_rows(known, world.verify, rate, float("inf"), 0.0, 1.0)
    policy = DraftPolicy(world.outlook, world.draft, world.verify, rate, LIMIT)
    layers = policy.plan
    if layers.worth(rate) > max(filled.worth(rate, 1.0), plain(world.verify).worth(rate)):
        return played_layers(world, policy)
    return filled.plan.tokens, filled.plan.seconds


def paces(world: World, choose: object) -> Iterator[float]:
    """The tokens a second that rounds keep up, where seconds are worth the pace of the rounds before."""
    rate = 1 / world.verify[1]
    while True:
        rounds = [choose(world, survival, rate) for survival in world.matches]  # type: ignore[operator]
        rate = sum(tokens for tokens, _ in rounds) / sum(seconds for _, seconds in rounds)
        yield rate


def regret(world: World) -> float:
    """The share of the best pace that planning loses, with true costs and acceptances.

    Rows may be filled up to more that take less time: by the best of all plans whenever that is so.
    """
    cheapest = (0.0, *np.minimum.accumulate(world.verify[:0:-1])[::-1])
    padded = [world.verify[rows] for rows in filled_up(world.verify)]
    best, own = paces(replace(world, verify=cheapest), best_round), paces(replace(world, verify=padded), planned_round)
    for _ in range(6):
        highest, reached = next(best), next(own)
    return 1 - reached / highest


def regrets(count: int, seed: int) -> list[float]:
    source = random.Random(seed)
    return [regret(random_world(source)) for _ in range(count)]


def test_planning_loses_little_against_the_best_of_all_plans() -> None:
    lost = regrets(100, 0)
    assert np.mean(lost) <= 0.02
    assert max(lost) <= 0.05


@pytest.mark.slow
def test_planning_loses_little_in_the_worst_of_ten_thousand_worlds() -> None:
    lost = regrets(10_000, 1)
    assert np.mean(lost) <= 0.02
    assert max(lost) <= 0.05


def outlook(*acceptances: float) -> Outlook:
    return Outlook(np.full(len(acceptances), 1 / len(acceptances)), np.array(acceptances))


def test_a_dear_row_is_passed_where_cheap_ones_follow_it() -> None:
    """The costs of Qwen in bfloat16 on one machine, for which a rule by the next token alone drafted one token."""
    verify = (0.0, 0.117, 0.117, 0.135, 0.153, 0.1545, 0.156, 0.1575, 0.159, *[0.18] * 28)
    policy = DraftPolicy(outlook(0.9, 1.0), 0.026, verify, 24.5, 16)
    stop = policy.begin(lambda confidence: confidence)
    assert [stop.stops(1.0) for _ in range(4)] == [False] * 4
    assert policy.plan.tokens > 4


@given(
    st.lists(st.floats(0.02, 1.0), min_size=1, max_size=4),
    st.floats(0.02, 1.5),
    st.sampled_from([0.002, 0.05, 0.4]),
    st.floats(0.1, 9.0),
)
def test_the_fastest_policy_brings_as_much_as_that_of_any_rate(
    acceptances: list[float], forward: float, row: float, start: float
) -> None:
    verify, kinds = (0.0, *(1 + row * more for more in range(36))), outlook(*acceptances)
    policies = [DraftPolicy(kinds, forward, verify, rate, 16) for rate in np.linspace(0.2, 6.0, 60)]
    best = max(policy.plan.tokens_per_second for policy in policies)
    fastest = DraftPolicy.fastest(kinds, forward, verify, 16, start)
    assert fastest.rate == pytest.approx(max(1.0, best), rel=0.015)
    most = 0.01 * fastest.rate * fastest.plan.seconds  # rates that differ by a hundredth count as the same
    assert fastest.plan.worth(fastest.rate) <= most + 1e-9


@given(st.lists(st.floats(0.05, 1.0), min_size=1, max_size=12), st.floats(0.5, 3.0), st.floats(0.01, 1.0))
def test_the_threshold_is_where_it_stops(confidences: list[float], rate: float, forward: float) -> None:
    verify = (0.0, *(1 + 0.01 * row for row in range(36)))
    stop = DraftPolicy(outlook(0.3, 0.9), forward, verify, rate, 16).begin(lambda confidence: confidence)
    for confidence in confidences:
        threshold = stop.threshold
        stopped = stop.stops(confidence)
        if abs(threshold - confidence) > 1e-6 and threshold < 1:
            assert stopped == (confidence < threshold)


@given(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=4), st.floats(0.5, 3.0), st.floats(0.01, 1.0))
def test_it_says_what_its_rounds_bring(acceptances: list[float], rate: float, forward: float) -> None:
    verify = (0.0, *(1 + 0.1 * row for row in range(36)))
    world = World(verify, forward, outlook(*acceptances), ())
    policy = DraftPolicy(world.outlook, forward, verify, rate, 6)
    tokens, seconds = played_layers(world, policy)
    assert policy.plan.worth(rate) == pytest.approx(tokens - rate * seconds, abs=0.02)
