"""Checks: the parts of a claim, each with its status, its figures, and the test that decided it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from selfspec_lab.decide import LEAST_PAIRS, Status, Test, describe_test, paired_test


@dataclass(frozen=True)
class Check:
    """One part of a claim.

    Attributes:
        statement: the part, as a sentence that is true or false.
        status: what the data decide.
        figure: the figures from which the status follows.
        counts: whether it counts for the claim. A theorem, a part that could not have failed or could not have shown,
            and a fact about this machine's clock are shown only.
        test: the paired test; ``None`` for a part that is counted out.
    """

    statement: str
    status: Status
    figure: str
    counts: bool = True
    test: Test | None = None

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)


def compare(
    statement: str,
    differences: Sequence[float],
    figure: str = "",
    *,
    what: str = "difference",
    bound: float = 0.0,
    effect: float | None = None,
    same: int = 0,
    counts: bool = True,
    form: str = "+.3f",
) -> Check:
    """A part that is decided by a paired test.

    Args:
        statement: the part.
        differences: one for each prompt, without those that ran the same computation twice.
        figure: further figures.
        what: what the differences are of.
        bound: what the part says that their mean is above.
        effect: the difference from the bound that the paper reports.
        same: prompts left out because both settings ran the same computation.
        counts: see ``Check``.
        form: format of a difference.
    """
    note = f"{same} prompts left out, on which both ran the same rounds" if same else ""
    if not differences:
        return not_applicable(statement, note or "there is nothing to compare")
    test = paired_test(differences, bound=bound, effect=effect)
    told = [figure, f"{what} {describe_test(test, form)}", note]
    return Check(statement, test.status, "; ".join(each for each in told if each), counts, test)


def shown(statement: str, holds: bool, figure: str) -> Check:
    """A part that does not count: a theorem, one that could not have failed, or one of too few observations."""
    return Check(statement, "holds" if holds else "refuted", figure, counts=False)


def not_applicable(statement: str, reason: str) -> Check:
    """A part that these settings or this model cannot show."""
    return Check(statement, "not applicable", reason, counts=False)


def conclude(checks: Sequence[Check]) -> Status:
    """The status of a claim, which is that all its parts hold.

    It holds if all parts that count do, which is no likelier by chance the more there are. It is refuted if one of them
    is, with an interval that is widened for their number. It is not applicable if none counts.
    """
    found = [check for check in checks if check.counts and check.status != "not applicable"]
    if not found:
        return "not applicable"
    if any(
        check.status == "refuted" and (check.test is None or check.test.refuted_among >= len(found)) for check in found
    ):
        return "refuted"
    return "holds" if all(check.status == "holds" for check in found) else "undecided"


def tally(checks: Sequence[Mapping[str, Any]]) -> str:
    """How many of the parts that count have each status, of checks as ``to_dict`` gives them; empty if none counts."""
    counted = Counter(check["status"] for check in checks if check["counts"])
    return ", ".join(f"{count} {status}" for status, count in counted.items())


RULE = (
    f"A part *holds* if the 95 % interval of the mean difference over at least {LEAST_PAIRS} prompts is above what it "
    "says, is *refuted* if the interval is below, and is *undecided* otherwise. The power is the chance that the test "
    "finds the difference that the paper reports, or the difference that it finds with a chance of 0.8. A claim holds "
    "if all its parts do. It is refuted if one of them is and stays so when its interval is widened for the number of "
    "parts that count (Bonferroni); the printed ones are not widened. A part *not counted* is a theorem, could not "
    "have failed, or is about the clock of this machine. Two settings that ran the same rounds on a prompt are not "
    "compared on it."
)
"""How statuses are decided, for pages."""
