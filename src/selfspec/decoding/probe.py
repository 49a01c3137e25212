"""What a method may run between rounds: candidates over the recent tokens, independent branches of one sublayer."""

import torch
from torch.nn import functional

from selfspec.decoding.request import Request
from selfspec.model.kept import KeptSet
from selfspec.model.masks import branches
from selfspec.runtimes.target import Step, Target
from selfspec.sampling.rules import Greedy


class Probe:
    """Runs parts of the target over the recent tokens of one request.

    It reads the keys and values of the committed tokens and writes its own behind them, where the next draft will
    write: nothing is copied, and the committed slots are left alone. A forward must not have more rows than the
    method's ``Needs.probe_rows``.

    Args:
        target: the model.
        request: the request.
    """

    def __init__(self, target: Target, request: Request) -> None:
        self.target = target
        self._request = request

    @property
    def token_ids(self) -> torch.Tensor:
        """Prompt and output so far, the pending token included, long ``[committed + 1]``."""
        return self._request.token_ids

    @property
    def committed(self) -> int:
        """Tokens whose keys and values are in the cache: all but the pending one."""
        return self._request.state.cache.length

    @property
    def samples(self) -> bool:
        """Whether the request draws its tokens; greedy decoding does not."""
        return not isinstance(self._request.rule, Greedy)

    def score(self, kept: KeptSet, rows: int, end: int | None = None) -> torch.Tensor:
        """Lets a kept set predict a window of successive tokens in one forward.

        Each row sees the target's keys and values of the tokens before the window, and the kept set's own inside it.

        Args:
            kept: the candidate.
            rows: size of the window, 1 to ``end - 1``.
            end: length of the text up to the window's end, at most ``committed + 1``; if not given, all of it, so that
                the pending token is the last one to predict.

        Returns:
            logits ``[rows, vocab]``; row ``i`` predicts ``token_ids[end - rows + i]``.
        """
        last = self.committed if end is None else end - 1
        assert 1 <= rows <= last <= self.committed, f"{rows} rows up to {last} in {self.committed} committed tokens"
        prefix = last - rows
        sequence = self._request.state
        step = self.target.begin(sequence, rows, start=sequence.cache.length, prefix=prefix)
        hidden_states = self.target.embed(self.token_ids[prefix:last])
        return self.target.logits(self.target.run(hidden_states, kept.sublayers, step).hidden_states)

    def branches(self, rows: int, most_rows: int | None = None) -> "Branches":
        """Independent continuations at the last ``rows`` committed tokens (CLaSp's and KnapSpec's parallel states).

        Args:
            rows: tokens of each branch, 1 to ``committed``.
            most_rows: of one forward, all branches together; those that are too many go after one another.
        """
        return Branches(self.target, self._request, self._window_start(rows), rows, most_rows)

    def _window_start(self, rows: int) -> int:
        assert 1 <= rows <= self.committed, f"a window of {rows} rows in {self.committed} committed tokens"
        return self.committed - rows


class Branches:
    """Forwards over states that stand at the same tokens but came by different kept sets.

    Each branch sees the cached prefix before its tokens and itself, causally; no branch sees another. However many
    there are, they go through a sublayer in one forward, or in as few as its rows allow.

    Args:
        target: the model.
        request: the request.
        prefix: slots before the branches' tokens.
        rows: tokens of each branch.
        most_rows: of one forward; without a limit if not given.
    """

    def __init__(self, target: Target, request: Request, prefix: int, rows: int, most_rows: int | None = None) -> None:
        self.target = target
        self._sequence = request.state
        self._prefix = prefix
        self._rows = rows
        self._at_once = None if most_rows is None else max(1, most_rows // rows)
        self._steps: dict[tuple[int, int], Step] = {}
        self._joined: dict[tuple[int, int, int], Step] = {}

    def run(self, sublayer: int, states: torch.Tensor) -> torch.Tensor:
        """Runs one sublayer.

        Args:
            sublayer: its index.
            states: ``[count, rows, hidden]``, the residual stream of each branch before it.

        Returns:
            ``[count, rows, hidden]``, the residual stream behind it.
        """
        start = self._sequence.cache.length
        return torch.cat([self._run_part(sublayer, part, start) for part in self._parts(states)])

    def run_beside(
        self, sublayer: int, states: torch.Tensor, hidden_states: torch.Tensor, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs one sublayer over another forward's rows too, which stand before the branches.

        Args:
            sublayer: its index.
            states: as for ``run``.
            hidden_states: ``[n, hidden]``, the other's residual stream before it.
            step: the other's layout.

        Returns:
            The other's residual stream behind it, and ``[count, rows, hidden]``, that of the branches.
        """
        first, *others = self._parts(states)
        own = len(hidden_states)
        together = torch.cat([hidden_states, first.flatten(0, 1)])
        behind = self.target.run(together, (sublayer,), self._joined_step(len(first), step)).hidden_states
        parts = [self._run_part(sublayer, part, step.layout.end) for part in others]
        return behind[:own], torch.cat([behind[own:].view_as(first), *parts])

    def _parts(self, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (states,) if self._at_once is None else torch.split(states, self._at_once)

    def _run_part(self, sublayer: int, states: torch.Tensor, start: int) -> torch.Tensor:
        step = self._step(len(states), start)
        return self.target.run(states.flatten(0, 1), (sublayer,), step).hidden_states.view_as(states)

    def _step(self, count: int, start: int) -> Step:
        """The layout of ``count`` branches from a slot on, made once and used for every sublayer."""
        if (count, start) not in self._steps:
            own = branches(count, self._rows, self.target.device)
            self._steps[count, start] = self.target.begin(
                self._sequence,
                len(own),
                start=start,
                prefix=self._prefix,
                depths=list(range(self._rows)) * count,
                visible=functional.pad(own, (start - self._prefix, 0)),
            )
        return self._steps[count, start]

    def _joined_step(self, count: int, step: Step) -> Step:
        key = (count, step.layout.start, step.layout.rows)
        if key not in self._joined:
            self._joined[key] = step.joined(self._step(count, step.layout.end))
        return self._joined[key]
