"""The table of what each strategy of a method drafted, and where it is printed."""

import pytest

from helpers.auto import give
from helpers.low_bit_model import SUBLAYERS, random_model
from helpers.models import prompt
from selfspec import Engine
from selfspec.cli.stats import draft_lines, draft_table, plain_reasons
from selfspec.methods.auto.preparation import Assignment, Preparation, TriedAssignment
from selfspec.model.kept import KeptSet
from selfspec.runtimes.costs.rows import RowCosts
from selfspec.runtimes.precision import Precision
from selfspec.types import Forecast, PhaseSeconds, Round


def played(name: str | None, drafted: int, accepted: int, seconds: float, forecast: Forecast | None = None) -> Round:
    tokens = (7,) * (accepted + 1)
    phases = PhaseSeconds(draft=seconds / 4, verify=3 * seconds / 4)
    return Round(drafted, drafted, accepted, tokens, None, None, phases, drafted_by=name, forecast=forecast)


PLAIN = played("plain", 0, 0, 0.010, Forecast(100.0, 100.0))
HELD_BACK = played("plain", 0, 0, 0.010, Forecast(100.0, 100.0, held_back=True))
COPIED = played("lookup", 4, 3, 0.016, Forecast(200.0, 100.0))
REJECTED = played("lookup", 2, 0, 0.014, Forecast(150.0, 100.0))


def test_speeds_are_those_of_the_rounds_against_a_step_of_plain_decoding() -> None:
    header, *rows = draft_table([PLAIN, COPIED, REJECTED])
    assert header == (
        "drafted by",
        "rounds",
        "rows",
        "drafted",
        "guessed",
        "accepted",
        "tokens",
        "seconds",
        "ms/token",
        "speedup",
        "expected",
    )
    assert rows == [
        ("plain", "1", "1.00", "0.00", "0.00", "-", "1.00", "0.01", "10.00", "1.00x", "1.00x"),
        ("lookup", "2", "4.00", "3.00", "0.00", "50%", "2.50", "0.03", "6.00", "1.67x", "1.75x"),
    ]


def test_strategies_without_forecasts_have_times_alone() -> None:
    header, row = draft_table([played("suffix", 4, 1, 0.010)])
    assert header[-1] == "ms/token"
    assert row == ("suffix", "1", "5.00", "4.00", "0.00", "25%", "2.00", "0.01", "5.00")
    assert plain_reasons([played("suffix", 4, 1, 0.010)]) == ""


def test_methods_without_strategies_have_no_table() -> None:
    assert draft_table([played(None, 4, 1, 0.010)]) == draft_lines([]) == []


def test_lines_are_aligned_and_say_why_rounds_were_plain() -> None:
    *table, reasons = draft_lines([PLAIN, HELD_BACK, HELD_BACK, COPIED])
    assert len({len(line) for line in table}) == 1
    assert reasons == (
        "plain rounds: no draft within the saved time was expected to be faster in 1, "
        "no time was saved yet that a draft could cost in 2"
    )


def test_auto_says_what_it_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    verify, draft = RowCosts((1, 64), (1.0, 1.001)), RowCosts((1, 64), (0.2, 0.4))
    trial = TriedAssignment(Assignment(KeptSet.full(SUBLAYERS), Precision.of(8)), 0.9, draft, ())
    give(monkeypatch, Preparation(verify, trial))
    rounds = Engine(random_model()).generate(prompt(20), max_new_tokens=60, ignore_eos=True).rounds
    assert sum(record.accepted for record in rounds) > 0
    for record in rounds:
        assert record.forecast is not None
        if record.drafted_by == "plain":
            assert record.forecast.speedup <= 1
        else:
            assert record.forecast.speedup > 0.99  # a busy machine takes some of the cheapest guesses' gain
    assert any(record.drafted_by == "8 bits" for record in rounds)
    table = {row[0]: row for row in draft_table(rounds)}
    assert float(table["8 bits"][-1].removesuffix("x")) > 1.5
