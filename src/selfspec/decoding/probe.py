"""What a method may run between rounds: candidates over the recent tokens, independent branches of one sublayer."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch.nn import functional

from selfspec.model.forward import Forward, SequenceState, branches
from selfspec.model.kept import KeptSet
from selfspec.model.transfer import send
from selfspec.runtimes.precision import AnyPrecision
from selfspec.runtimes.target import Target
from selfspec.sampling.rules import Greedy, Rule


class Text(Protocol):
    """What a probe reads of a request, which is a ``Sequence``."""

    target: Target
    rule: Rule
    state: SequenceState
    ids: torch.Tensor
    """Long ``[most tokens]``: prompt and output so far, and room for the rest."""


class Probe:
    """Runs parts of the target over the recent tokens of one request.

    It reads the keys and values of the committed tokens and writes its own to the slots after them, which the next
    draft overwrites: nothing is copied, and the committed slots stay as they are. A forward must not have more rows
    than the method's ``Needs.probe_rows``.

    It refers to tokens and cache, not to the ``Sequence``, which holds the drafter that holds the probe: the cache of a
    request that ended is free at once.
    """

    def __init__(self, text: Text) -> None:
        self.target: Target = text.target
        self._rule, self.state, self._ids = text.rule, text.state, text.ids

    @property
    def token_ids(self) -> torch.Tensor:
        """Prompt and output so far, the pending token included, long ``[committed + 1]``."""
        return self._ids[: self.committed + 1]

    @property
    def committed(self) -> int:
        """Tokens whose keys and values are in the cache: all but the pending one."""
        return self.state.cache.length

    @property
    def remaining_tokens(self) -> int:
        """Most tokens that the request may still write."""
        return len(self._ids) - self.committed - 1

    @property
    def samples(self) -> bool:
        """Whether the request draws its tokens; greedy decoding does not."""
        return not isinstance(self._rule, Greedy)

    def score(
        self, kept: KeptSet, rows: int, end: int | None = None, precision: AnyPrecision | None = None
    ) -> torch.Tensor:
        """Lets a kept set predict a window of successive tokens in one forward.

        Each row sees the target's keys and values of the tokens before the window, and the kept set's own inside it.

        Args:
            kept: the candidate.
            rows: size of the window, 1 to ``end - 1``.
            end: length of the text up to the window's end, at most ``committed + 1``; if not given, all of it, so that
                the pending token is the last one to predict.
            precision: of the weights that predict; ``None`` for the target's own.

        Returns:
            logits ``[rows, vocab]``; row ``i`` predicts ``token_ids[end - rows + i]``.
        """
        last = self.committed if end is None else end - 1
        assert 1 <= rows <= last <= self.committed, f"{rows} rows up to {last} in {self.committed} committed tokens"
        prefix = last - rows
        forward = self.target.lay_out(self.state, rows, start=self.committed, prefix=prefix)
        hidden_states = self.target.embed(self.token_ids[prefix:last], forward)
        model = self.target.at(precision)
        return model.logits(model.run(hidden_states, kept.sublayers, forward).hidden_states)

    def branches(self, rows: int, most_rows: int | None = None, precision: AnyPrecision | None = None) -> "Branches":
        """Independent continuations at the last ``rows`` committed tokens (CLaSp's and KnapSpec's parallel states).

        Args:
            rows: tokens of each branch, 1 to ``committed``.
            most_rows: of one forward, all branches together; more go in several forwards.
            precision: of the weights that run; ``None`` for the target's own.
        """
        assert 1 <= rows <= self.committed, f"a window of {rows} rows in {self.committed} committed tokens"
        places = range(self.committed - rows, self.committed)
        return Branches(self, places, most_rows, precision)

    def points(
        self, places: Sequence[int], most_rows: int | None = None, precision: AnyPrecision | None = None
    ) -> "Points":
        """As ``branches``, at single committed tokens that need not follow each other, by their ascending positions."""
        return Points(self, places, most_rows, precision)


class Branches:
    """Forwards over states that stand at the same tokens but come from different kept sets.

    Each branch sees the cached prefix before its tokens and itself, causally; no branch sees another. All of them go
    through a sublayer in one forward, or in as few as ``most_rows`` allows.

    ``places`` are the positions of the tokens of each branch in the probe's text, which follow each other.

    Attributes:
        sequence: whose cache they read.
    """

    def __init__(
        self, probe: Probe, places: Sequence[int], most_rows: int | None = None, precision: AnyPrecision | None = None
    ) -> None:
        assert places, "no rows"
        assert places[-1] < probe.committed, f"rows at {places} of {probe.committed} tokens"
        self.sequence, self._target, self._model = probe.state, probe.target, probe.target.at(precision)
        self._token_ids, self._places, self._prefix = probe.token_ids, places, places[0]
        self._at_once = None if most_rows is None else max(1, most_rows // len(places))
        self._forwards: dict[tuple[int, int], Forward] = {}

    def run(self, sublayer: int, states: torch.Tensor) -> torch.Tensor:
        """Runs one sublayer on the residual stream of each branch: ``[count, rows, hidden]`` before and after it."""
        each = (states,) if self._at_once is None else torch.split(states, self._at_once)
        return torch.cat([self._run(sublayer, some) for some in each])

    def _run(self, sublayer: int, states: torch.Tensor) -> torch.Tensor:
        forward = self.lay_out(len(states), self.sequence.cache.length)
        return self._model.run(states.flatten(0, 1), (sublayer,), forward).hidden_states.view_as(states)

    def lay_out(self, count: int, start: int) -> Forward:
        """The rows of ``count`` branches from a cache slot on, made once and used for every sublayer."""
        if (count, start) not in self._forwards:
            self._forwards[count, start] = self._target.lay_out(
                self.sequence,
                count * len(self._places),
                start=start,
                prefix=self._prefix,
                depths=[place - self._prefix for place in self._places] * count,
                visible=self._visible(count, start),
            )
            if self._target.decoder.reads_tokens:
                tokens = self._token_ids[send(self._places, self._token_ids.device)].repeat(count)
                self._target.embed(tokens, self._forwards[count, start])
        return self._forwards[count, start]

    def _visible(self, count: int, start: int) -> torch.Tensor:
        """Which slots from the prefix on each row sees."""
        own = branches(count, len(self._places), self._target.device)
        return functional.pad(own, (start - self._prefix, 0))


class Points(Branches):
    """Branches of single tokens: each row sees the target's keys and values of all tokens before it, and itself.

    This is what the first token of a draft sees. A row of ``Branches`` sees its branch's own keys instead, like the
    later tokens of a draft as long as the window.

    ``places`` are ascending, and need not follow each other.
    """

    def _visible(self, count: int, start: int) -> torch.Tensor:
        device = self._target.device
        places = send(self._places, device).repeat(count)
        cached = torch.arange(self._prefix, start, device=device) < places[:, None]
        return torch.cat([cached, torch.eye(len(places), dtype=torch.bool, device=device)], dim=1)
