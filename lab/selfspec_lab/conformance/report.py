"""The report of a run, as JSON."""

from dataclasses import dataclass
from typing import Any

from selfspec_lab.conformance.server_info import ServerInfo
from selfspec_lab.conformance.subject import Outcome

FORMAT = 1


@dataclass(frozen=True)
class Settings:
    """What is asked.

    Attributes:
        prompts: number of prompts for each interface.
        tokens: longest answer.
        at_once: numbers of requests at a time.
    """

    prompts: int = 8
    tokens: int = 64
    at_once: tuple[int, ...] = (2, 4, 8, 16)


@dataclass(frozen=True)
class CheckResult:
    """What came of a check by one interface."""

    check: str
    interface: str
    outcome: Outcome

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"check": self.check, "interface": self.interface, **self.outcome.to_dict()}


@dataclass(frozen=True)
class Report:
    """What came of all checks.

    Attributes:
        server: the server under test.
        reference: the same engine without speculation; ``None`` without such a server.
        date: when the run began, in UTC.
        selfspec: version of this package.
        settings: what was asked.
        not_asked: why an interface was not asked, by its name.
        results: of the checks.
    """

    server: ServerInfo
    reference: ServerInfo | None
    date: str
    selfspec: str
    settings: Settings
    not_asked: dict[str, str]
    results: tuple[CheckResult, ...]

    @property
    def diverged(self) -> bool:
        """Whether a text was another one."""
        return any(each.outcome.status == "diverged" for each in self.results)

    @property
    def failed(self) -> bool:
        """Whether a check could not be made, since the server did not answer as it has to."""
        return any(each.outcome.status == "failed" for each in self.results)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "format": FORMAT,
            "server": self.server.to_dict(),
            "reference": None if self.reference is None else self.reference.to_dict(),
            "date": self.date,
            "selfspec": self.selfspec,
            "settings": {**vars(self.settings), "at_once": list(self.settings.at_once)},
            "not_asked": self.not_asked,
            "results": [each.to_dict() for each in self.results],
        }
