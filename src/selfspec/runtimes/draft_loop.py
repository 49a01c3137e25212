"""Drafts tokens of several sequences: in one native call where kernels choose them, else forward by forward."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from selfspec.model import transfer
from selfspec.model.forward import Forward
from selfspec.model.transfer import AsyncCopy
from selfspec.runtimes.chain import Drafted, DraftRequest
from selfspec.runtimes.logits import Logits
from selfspec.runtimes.stack import Stack

HEAD_START = 4
"""Sublayers of the next draft step that a device is given before the host reads the last step's confidence.

They keep the device busy while the confidence is copied and the host launches the rest, some tens of microseconds. More
would hide nothing more, and a draft that stops has run them in vain.
"""


def head_start(device: torch.device) -> int:
    """Sublayers of the next draft step to run early; none on a CPU, which does not run ahead of its host."""
    return HEAD_START if device.type == "cuda" else 0


def draft(runner: Stack, requests: Sequence[DraftRequest]) -> list[Drafted]:
    """Drafts tokens of several sequences side by side; see ``Runner.draft``."""
    chained: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, request in enumerate(requests):
        if request.choose is None:
            chained[request.sublayers].append(index)
    drafted: dict[int, Drafted] = {}
    for indices in chained.values():
        assert runner.native is not None
        drafted.update(zip(indices, runner.native.chain([requests[i] for i in indices], runner.rope), strict=True))
    stepping = {i: _Stepping(runner, request) for i, request in enumerate(requests) if request.choose is not None}
    _run_steps(runner, stepping.values())
    drafted.update((index, each.drafted()) for index, each in stepping.items())
    return [drafted[index] for index in range(len(requests))]


def _run_steps(runner: Stack, drafts: Iterable["_Stepping"]) -> None:
    """Runs drafts to their ends, one forward of each at a time.

    Where a draft may stop early on a device, its next step is begun before the confidence of the last one is read. A
    begun step that is not needed leaves keys and values in slots after the draft, which the verification and later
    drafts overwrite before anything reads them. Rows of wrong guesses do the same.
    """
    while running := [each for each in drafts if each.goes_on]:
        for each in running:
            each.begin()
        _advance(runner, running)
        for each in running:
            each.take()
        if early := [each for each in running if each.head_start and each.goes_on]:
            for each in early:
                each.begin()
            _advance(runner, early, early[0].head_start)
        for each in running:
            each.decide()


def _advance(runner: Stack, drafts: Sequence["_Stepping"], most: int | None = None) -> None:
    """Runs the begun steps to their ends, or their first sublayers; those through the same sublayers as one."""
    groups: dict[tuple[tuple[int, ...], bool], list[_Stepping]] = defaultdict(list)
    for each in drafts:
        groups[each.coming(most)].append(each)
    for (sublayers, ends), group in groups.items():
        steps = [each.step for each in group]
        output = runner.run(
            steps[0].hidden_states if len(steps) == 1 else torch.cat([step.hidden_states for step in steps]),
            sublayers,
            Forward.join([step.layout for step in steps]),
            logits=ends,
            confidence=ends,
        )
        counts = [len(step.hidden_states) for step in steps]
        for step, own in zip(steps, output.split(counts), strict=True):
            step.done += len(sublayers)
            step.hidden_states, step.logits = own.hidden_states, own.logits


@dataclass
class _Step:
    """One forward of the last token and of guesses after it, after its first ``done`` sublayers."""

    layout: Forward
    hidden_states: torch.Tensor
    guesses: list[int]
    done: int = 0
    logits: Logits | None = None


class DraftedTokens:
    """The tokens of a draft in progress, each of which ``request.choose`` chooses."""

    def __init__(self, request: DraftRequest) -> None:
        self.request = request
        self.tokens: list[torch.Tensor] = []
        self._copies: list[AsyncCopy | None] = []
        self._numbers: list[list[float]] = []
        self._decided, self._stopped = 0, False

    @property
    def goes_on(self) -> bool:
        """Whether there is another token to draft."""
        return not self._stopped and len(self.tokens) < self.request.limit

    def choose(self, logits: Logits) -> None:
        """Takes the token of a row of logits."""
        assert self.request.choose is not None
        chosen = self.request.choose(logits, len(self.tokens))
        self.tokens.append(chosen.token)
        self._copies.append(AsyncCopy(*chosen.numbers) if chosen.numbers else None)
        self._stopped = chosen.last

    def decide(self) -> None:
        """Lets the stopping rule decide on the last token, once."""
        if self.request.stop is not None and self._decided < len(self.tokens):
            self._decided = len(self.tokens)
            self._stopped |= self.request.stop(self._read(self._decided - 1)[0])

    def finish(self, guessed: int, forwards: Sequence[int]) -> Drafted:
        """The finished draft; see ``Drafted``."""
        numbers = [self._read(index) for index in range(len(self.tokens))]
        return Drafted(torch.cat(self.tokens), numbers, guessed, tuple(forwards))

    def _read(self, index: int) -> list[float]:
        """The numbers of a token; waits for them when first read."""
        for copied in self._copies[len(self._numbers) : index + 1]:
            self._numbers.append([] if copied is None else copied.wait())
        return self._numbers[index]


class _Stepping(DraftedTokens):
    """A draft in progress, forward by forward."""

    def __init__(self, runner: Stack, request: DraftRequest) -> None:
        super().__init__(request)
        self.head_start = (
            head_start(request.pending.device) if request.stop is not None and request.guess is None else 0
        )
        self._runner = runner
        self._begun: _Step | None = None
        self._guessed, self._forwards = 0, list[int]()

    @property
    def step(self) -> _Step:
        """The step that has begun."""
        assert self._begun is not None
        return self._begun

    def begin(self) -> None:
        """Lays the next step out, in the slots after the tokens drafted before it, unless it has begun."""
        if self._begun is not None:
            return
        request, runner = self.request, self._runner
        guesses = [] if request.guess is None else request.guesses([int(token) for token in self.tokens])
        token = self.tokens[-1] if self.tokens else request.pending
        start = request.state.cache.length + len(self.tokens)
        layout = runner.lay_out(request.state, 1 + len(guesses), start=start, drawing=request.drawing)
        if guesses:
            token = torch.cat([token, transfer.send(guesses, token.device)])
        self._begun = _Step(layout, runner.embed(token, layout), guesses)

    def coming(self, most: int | None) -> tuple[tuple[int, ...], bool]:
        """The sublayers to run next, and whether the logits follow."""
        rest = self.request.sublayers[self.step.done :]
        return (rest, True) if most is None else (rest[:most], False)

    def take(self) -> None:
        """Takes the tokens that the finished step chose, up to the first that was not guessed."""
        step, self._begun = self.step, None
        self._forwards.append(1 + len(step.guesses))
        for row in range(1 + len(step.guesses)):
            self._take_row(step, row)
            if row == len(step.guesses):
                return
            self.decide()
            if self._stopped or int(self.tokens[-1]) != step.guesses[row]:
                return

    def _take_row(self, step: _Step, row: int) -> None:
        """Takes the token of a row; the rows before it are confirmed.

        Rows are processed one by one, in order and only up to the first wrong guess, so that processors see the calls,
        and the generator of a request makes the draws, that they would without guesses.
        """
        assert step.logits is not None
        self.choose(step.logits.row(row) if step.guesses else step.logits)
        self._guessed += row > 0

    def drafted(self) -> Drafted:
        """The finished draft."""
        return self.finish(self._guessed, self._forwards)
