"""Splits a decoder layer in two by looking: the part that reads the cache, and the part after it.

A part is the layer's own forward in which the modules of the other part give zeros, or what they were given. It holds
for a layer if the two parts, one after the other, compute what the layer does, bit for bit. Modules that do not change
a part are not run in it. A layer for which no such parts are found is one part.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from selfspec.model.forward import Forward, Rows
from selfspec.model.skeleton import LayerCall, Skeleton, first_of, substitute
from selfspec.model.sublayers import Sublayer

_ZEROS = "zeros"
Replacement = str | int
"""What a module gives in place of its output: zeros, or the argument of this index or name."""


@dataclass(frozen=True)
class Split:
    """The direct children of a layer that do not run in each of its parts, and what they give instead."""

    without_mlp: dict[str, Replacement]
    without_attention: dict[str, Replacement]


class LayerPart(Sublayer):
    """A layer, or the part of it that reads the cache.

    Args:
        layer: the model's own.
        module: the layer as it runs here.
        index: of the layer.
        skeleton: what calls layers.
    """

    def __init__(self, layer: nn.Module, module: nn.Module, index: int, skeleton: Skeleton) -> None:
        super().__init__(layer)
        self.module, self.index = module, index
        self._skeleton = skeleton
        self._made_of = [*map(id, layer.modules())]

    @property
    def window(self) -> int | None:
        """Positions that it sees at most; ``None`` for all."""
        return self._skeleton.kinds[self.index].window

    @property
    def modules(self) -> list[nn.Module]:
        """The modules of the layer that run."""
        return [child for child in self.module.children() if not isinstance(vars(child).get("forward"), Instead)]

    def is_current(self) -> bool:
        """Whether the layer's modules still are those that were split."""
        return self._made_of == [*map(id, self.layer.modules())]

    def __call__(self, hidden_states: torch.Tensor, forward: Forward) -> torch.Tensor:
        """Runs once for the rows of each sequence, ``[rows, hidden]``."""
        return forward.by_part(lambda own, rows: self._run(hidden_states[own], rows))

    def call(self, rows: Rows) -> LayerCall:
        """What the layer is called with for the rows of a sequence."""
        return self._skeleton.calls(rows)[self.index]

    def _run(self, hidden_states: torch.Tensor, rows: Rows) -> torch.Tensor:
        if self._skeleton.kinds[self.index].states == 0:
            return self.call(rows).run(self.module, hidden_states[None])[0]
        stretches = [rows] if rows.count == 1 or self._runs_together(rows) else rows.each()
        pieces = torch.split(hidden_states, [stretch.count for stretch in stretches])
        return torch.cat([self._carry(piece, stretch) for piece, stretch in zip(pieces, stretches, strict=True)])

    def _runs_together(self, rows: Rows) -> bool:
        """Whether only the state after the last of the rows is needed, and they can run from the state before them."""
        return rows.settled and (rows.start == 0 or self._skeleton.carries)

    def _carry(self, hidden_states: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Runs rows from the state after the slot before them, and keeps the state after the last of them."""
        call = self.call(rows)
        call.cache.load(self.index)
        output = call.run(self.module, hidden_states[None])[0]
        call.cache.save(self.index)
        return output


class RowsPart(LayerPart):
    """The part of a layer that does not read the cache: all rows run together."""

    def __call__(self, hidden_states: torch.Tensor, forward: Forward) -> torch.Tensor:
        """Runs on ``[rows, hidden]``."""
        return self.call(forward.parts[0]).run(self.module, hidden_states[None])[0]


class Nothing(Sublayer):
    """The second sublayer of a layer that is one part."""

    @property
    def modules(self) -> list[nn.Module]:
        """None."""
        return []

    def __call__(self, hidden_states: torch.Tensor, forward: Forward) -> torch.Tensor:
        """Leaves the residual stream as it is."""
        return hidden_states


@dataclass(frozen=True)
class Instead:
    """The ``forward`` of a module that does not run; ``like`` is what the module gave.

    Of several tensors that it gave, only the first is given; where the layer reads the others, it fails.
    """

    replacement: Replacement
    like: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module gives for these arguments."""
        replacement = self.replacement
        if isinstance(replacement, int):
            output = args[replacement]
        elif replacement == _ZEROS:
            given = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
            output = self._zeros(given)
        else:
            output = kwargs[replacement]
        if not isinstance(self.like, tuple):
            return output
        return (output, *(None if isinstance(each, torch.Tensor) else each for each in self.like[1:]))

    def _zeros(self, given: torch.Tensor) -> torch.Tensor:
        like: torch.Tensor = first_of(self.like)
        lead = given.shape[:-1] if like.dim() == given.dim() else (given.shape[:-1].numel(),)
        if like.dim() > given.dim():
            lead = (1, *given.shape[:-1])
        return like.new_zeros(*lead, like.shape[-1])


@dataclass(frozen=True)
class _Called:
    """A call of a child while a layer ran."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    reads_cache: bool

    def replacements(self) -> Iterator[Replacement]:
        """What it may give instead, the likeliest first."""
        like = first_of(self.output)
        yield _ZEROS
        arguments: list[tuple[Replacement, Any]] = [*enumerate(self.args), *self.kwargs.items()]
        for name, value in arguments:
            if isinstance(value, torch.Tensor) and value.shape == like.shape:
                yield name


class Splitter:
    """Finds the parts of layers, on what ``skeleton`` saw in one forward of the model.

    Args:
        skeleton: of the model.
        new_rows: rows of a fresh sequence, as many as the forward had.
    """

    def __init__(self, skeleton: Skeleton, new_rows: Callable[[], Rows]) -> None:
        self._skeleton, self._new_rows = skeleton, new_rows
        self._known: list[Split] = []

    def sublayers(self, index: int, hidden_states: torch.Tensor) -> list[Sublayer]:
        """The two sublayers of a layer, tried on the residual stream before it, ``[1, rows, hidden]``."""
        layer = self._skeleton.layers[index]
        trial = _Trial(self._skeleton, index, hidden_states, self._new_rows)
        if "forward" not in vars(layer) and trial.watch():
            for split in (*self._known, *trial.candidates()):
                if trial.holds(split):
                    if split not in self._known:
                        split = trial.without_idle(split)
                        self._known.append(split)
                    first, last = (trial.part(each) for each in (split.without_mlp, split.without_attention))
                    rest = LayerPart if self._skeleton.reads_tokens else RowsPart
                    return [
                        LayerPart(layer, first, index, self._skeleton),
                        rest(layer, last, index, self._skeleton),
                    ]
        return [LayerPart(layer, layer, index, self._skeleton), Nothing(layer)]


class _Trial:
    """One layer, run with some of its children replaced."""

    def __init__(
        self,
        skeleton: Skeleton,
        index: int,
        hidden_states: torch.Tensor,
        new_rows: Callable[[], Rows],
    ) -> None:
        self._skeleton, self._index, self._new_rows = skeleton, index, new_rows
        self._layer = skeleton.layers[index]
        self._before, self._after = hidden_states, self._call().run(self._layer, hidden_states)
        self._called: list[_Called] = []

    def watch(self) -> bool:
        """Runs the layer and notes what its children do; false where these tell nothing."""
        called: list[_Called] = []
        call = self._call()

        def watched(name: str, child: nn.Module) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                uses = call.cache.uses
                output = type(child).forward(child, *args, **kwargs)
                if isinstance(first_of(output), torch.Tensor):
                    called.append(_Called(name, args, kwargs, output, call.cache.uses > uses))
                return output

            return run

        children = {name: child for name, child in self._layer.named_children() if "forward" not in vars(child)}
        module = substitute(self._layer, {name: watched(name, child) for name, child in children.items()})
        call.run(module, self._before)
        self._called = called
        names = [each.name for each in called]
        return len(set(names)) == len(names) and any(each.reads_cache for each in called)

    def candidates(self) -> Iterator[Split]:
        """Ways to split that may hold."""
        readers = [place for place, each in enumerate(self._called) if each.reads_cache]
        for taken in zip(*(self._called[place].replacements() for place in readers), strict=False):
            without_attention = {self._called[place].name: value for place, value in zip(readers, taken, strict=True)}
            later = self._called[readers[-1] + 1 :]
            for each in reversed(later):
                for value in each.replacements():
                    yield Split({each.name: value}, without_attention)
            for start in range(len(later)):
                yield Split({each.name: _ZEROS for each in later[start:]}, without_attention)

    def part(self, replaced: dict[str, Replacement]) -> nn.Module:
        """The layer with some children replaced."""
        outputs = {each.name: each.output for each in self._called}
        parts = {name: Instead(value, outputs[name]) for name, value in replaced.items()}
        module: nn.Module = substitute(self._layer, parts)
        return module

    def holds(self, split: Split) -> bool:
        """Whether the parts after each other are the layer, bit for bit, and the second does not touch the cache."""
        if not {*split.without_mlp, *split.without_attention} <= {each.name for each in self._called}:
            return False
        between = self._run(split.without_mlp, self._before)
        if between is None or torch.equal(between[0], self._before) or torch.equal(between[0], self._after):
            return False
        after = self._run(split.without_attention, between[0])
        return after is not None and not after[1] and torch.equal(after[0], self._after)

    def without_idle(self, split: Split) -> Split:
        """The split in which children that change nothing do not run either."""
        between = self._run(split.without_mlp, self._before)
        assert between is not None
        first = self._grown(split.without_mlp, self._before, between[0])
        return Split(first, self._grown(split.without_attention, between[0], self._after))

    def _grown(
        self, replaced: dict[str, Replacement], before: torch.Tensor, after: torch.Tensor
    ) -> dict[str, Replacement]:
        for each in reversed(self._called):  # what only feeds others is idle once they are replaced
            if each.name in replaced:
                continue
            for value in [*each.replacements()][::-1]:  # what is given costs less than zeros
                grown = {**replaced, each.name: value}
                found = self._run(grown, before)
                if found is not None and torch.equal(found[0], after):
                    replaced = grown
                    break
        return replaced

    def _run(self, replaced: dict[str, Replacement], hidden_states: torch.Tensor) -> tuple[torch.Tensor, int] | None:
        """What the layer gives with children replaced, and how often it used the cache; ``None`` if it fails."""
        call = self._call()
        try:
            output = call.run(self.part(replaced), hidden_states)
        except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError, StopIteration):
            return None
        fits = isinstance(output, torch.Tensor) and output.shape == self._after.shape
        return (output, call.cache.uses) if fits else None

    def _call(self) -> LayerCall:
        return self._skeleton.calls(self._new_rows())[self._index]
