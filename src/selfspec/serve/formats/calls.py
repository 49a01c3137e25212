"""What formats of calls have in common."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from selfspec.serve.formats.lark import Rules
from selfspec.serve.formats.scanner import Scanner, Steps, Tools


@dataclass(frozen=True)
class CallFormat(ABC):
    """How a model writes calls in the text of an answer.

    Attributes:
        begin: what a call, or a list of them, begins with.
        end: what it ends with.
    """

    begin: str = ""
    end: str = ""

    @property
    def openers(self) -> Sequence[str]:
        """What calls begin with; the rest of the answer is text."""
        return (self.begin,) if self.begin else ()

    @property
    def bare(self) -> bool:
        """Whether an answer can also begin with a call at once; only tools that are offered count there."""
        return not self.begin

    @property
    def silent(self) -> Sequence[str]:
        """Tags that are no text."""
        return ()

    @abstractmethod
    def read(self, scan: Scanner, opener: str) -> Steps[None]:
        """Reads a call, after its opener."""

    @abstractmethod
    def rule(self, rules: Rules, tools: Tools, *, parallel: bool) -> str:
        """The rule of an answer that calls tools, in Lark's notation."""
