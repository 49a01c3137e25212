"""The interface of a method."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from selfspec.decoding.draft import Draft, with_precision
from selfspec.decoding.drafter import Drafter, Needs, Prefill
from selfspec.errors import StateError
from selfspec.methods.settings import MethodSettings, PrecisionSettings
from selfspec.methods.state import LearnedState
from selfspec.runtimes.precision import Precision
from selfspec.runtimes.target import Target


class Method(ABC):
    """A way to draft, with its settings and with what it has learned over a stream of requests.

    Subclasses give their name, summary and source, and their settings if they have any. One method object serves all
    requests of an engine, from several threads: it must lock what it shares between requests.

    Args:
        target: the model that drafts and verifies.
        settings: an instance of ``Settings``.

    Attributes:
        name: what ``--method`` takes; of letters, digits and hyphens.
        summary: one line for ``selfspec methods``.
        source: where the method is published.
        Settings: a frozen dataclass of ``setting`` fields; the default has none.
        state_name: the name under which its state is saved, if not its own.
        begins_at_once: whether nothing is to be prepared before its first request, since it learns while it decodes.
        learns: whether it carries anything from one request to the next, which ``state`` then returns.
        target: the model.
        settings: the values of its settings.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    source: ClassVar[str]
    Settings: ClassVar[type[MethodSettings]] = MethodSettings
    learns: ClassVar[bool] = False
    begins_at_once: ClassVar[bool] = False
    state_name: ClassVar[str | None] = None

    def __init__(self, target: Target, settings: Any) -> None:
        self.target = target
        self.settings = settings
        if self.draft_precision is not None:
            target.check_low_bit(self.draft_precision)

    @property
    def draft_precision(self) -> Precision | None:
        """Of the weights that its layer drafts run on; ``None`` for the target's own.

        Settings that inherit ``PrecisionSettings`` choose it. ``plan`` gives it to every layer draft that names none.
        """
        return self.settings.precision if isinstance(self.settings, PrecisionSettings) else None

    @property
    def needs(self) -> Needs:
        """What this method asks of every request."""
        return Needs()

    @abstractmethod
    def begin(self, prefill: Prefill) -> Drafter:
        """Starts on a request.

        Args:
            prefill: the prompt, the first token, and the hidden states that ``needs`` asks for.

        Returns:
            What drafts this request.
        """

    def plan(self, drafters: Sequence[Drafter]) -> list[Draft]:
        """What drafts the next round of several requests of this method, which run as a batch; in their order."""
        drafts = self.arrange(drafters, [drafter.plan() for drafter in drafters])
        return [with_precision(draft, self.draft_precision) for draft in drafts]

    def arrange(self, drafters: Sequence[Drafter], drafts: Sequence[Draft]) -> list[Draft]:
        """Adapts the drafts that the drafters of a batch plan to each other. By default they stay."""
        return list(drafts)

    def prepare(self, progress: Callable[[str], None] = lambda _: None) -> None:
        """Does before the first request what would otherwise slow it down: makes the low-bit weights that draft.

        A method that has more to do, such as measuring latencies, does that too.

        Args:
            progress: is called with a line of text before each part that may take long.

        Raises:
            OutOfMemoryError: they do not fit into the memory that is available.
        """
        if self.draft_precision is not None:
            progress(f"low-bit weights of {self.target.low_bit_bytes(self.draft_precision) / 2**20:.0f} MiB")
            self.target.at(self.draft_precision)

    @property
    def needs_preparation(self) -> bool:
        """Whether its first request would be slow, and slow down others, without ``prepare``."""
        return self.draft_precision is not None or type(self).prepare is not Method.prepare

    def state(self) -> LearnedState:
        """What it has learned so far.

        Raises:
            StateError: it carries nothing from one request to the next.
        """
        raise StateError(f"{self.name} learns nothing from one request to the next, so it has no state to save or load")

    def restore(self, state: LearnedState) -> None:
        """Loads what a method of the same name has learned on the same model.

        Args:
            state: from ``state``.

        Raises:
            StateError: it does not fit this method's settings, or the method carries nothing between requests.
        """
        self.state()
