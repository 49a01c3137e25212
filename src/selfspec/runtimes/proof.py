"""Proves on random tokens that a model's sublayers together give its own logits, before an engine accepts it."""

from collections.abc import Iterator
from typing import Any

import torch
from transformers import DynamicCache

from selfspec.errors import UnsupportedModelError
from selfspec.model.forward import Forward, SequenceState
from selfspec.model.observed import ObservedDecoder, random_tokens
from selfspec.runtimes.recurrent import RecurrentBranch
from selfspec.runtimes.runner import Runner

_PROMPT, _STEPS, _ROWS = 8, 3, 4
_TREE = ((0, 1, 1, 2), ((1, 0, 0, 0), (1, 1, 0, 0), (1, 0, 1, 0), (1, 0, 1, 1)))
"""Depths and visibility of four rows: two siblings after the first, and one after the second of them."""
_CLOSE = 1e-3
"""How far logits of the same tokens in other rows may be apart, relative to the largest."""
_ROUNDED = 64
"""Units of the last place by which logits may differ in dtypes where the model's own kernels depend on shapes."""


@torch.inference_mode()
def prove(decoder: ObservedDecoder, runner: Runner) -> None:
    """Compares prompt, cached steps, several rows and several sequences with the model's own.

    In float32 on a CPU they are equal bit for bit, unless recurrent layers run as ``RecurrentBranch``; then within
    rounding.

    Trees are compared with the rows of their paths, within rounding; where these differ, ``decoder.tree_refusal`` says
    so, and only chains are drafted.

    Raises:
        UnsupportedModelError: the logits differ; the message names the layer and the difference.
    """
    _Proof(decoder, runner).run()


class _Proof:
    def __init__(self, decoder: ObservedDecoder, runner: Runner) -> None:
        self._decoder, self._runner = decoder, runner
        self._has_own = any(isinstance(sublayer, RecurrentBranch) for sublayer in runner.sublayers)
        count = min(_PROMPT + _STEPS + _ROWS, decoder.context_limit)
        self._tokens = random_tokens(int(decoder.config.vocab_size), count, decoder.like.device)
        self._own_cache = DynamicCache(config=decoder.config)
        self._state = self._new_state()

    def run(self) -> None:
        rows: dict[int, torch.Tensor] = {}
        for start, end, what in self._stretches():
            own = self._own(start, end)
            ours = self._ours(self._state, start, end)
            if end - start == 1 or start == 0 or not self._decoder.has_states:
                self._compare(what, start, end, own, ours)
            rows |= dict(enumerate(own, start))
        whole = self._ours(self._new_state(), 0, len(self._tokens))
        self._check_independence(torch.stack([rows[place] for place in range(len(rows))]), whole)
        self._check_sequences(whole)
        if self._decoder.tree_refusal is None:
            self._check_tree()
        if self._decoder.has_states:
            self._check_states()

    def _stretches(self) -> Iterator[tuple[int, int, str]]:
        """The parts of the text that run in one forward each."""
        last = len(self._tokens)
        prompt = min(_PROMPT, last)
        yield 0, prompt, "a prompt"
        steps = min(prompt + _STEPS, last)
        for place in range(prompt, steps):
            yield place, place + 1, "a cached step"
        if steps < last:
            yield steps, last, "several rows after a prompt"

    def _own(self, start: int, end: int) -> torch.Tensor:
        if start > 0 and end - start > 1 and self._decoder.has_states:  # some take one token after a state only
            return torch.cat([self._own(place, place + 1) for place in range(start, end)])
        model: Any = self._decoder.model
        cache = {self._decoder.skeleton.cache_name: self._own_cache}
        logits: torch.Tensor = model(input_ids=self._tokens[None, start:end], use_cache=True, **cache).logits[0]
        return logits

    def _ours(self, state: SequenceState, start: int, end: int, *, settled: bool = False) -> torch.Tensor:
        forward = self._runner.lay_out(state, end - start, start=start, settled=settled or start == 0)
        logits = self._logits(self._tokens[start:end], forward)
        state.cache.length = end
        return logits

    def _logits(self, tokens: torch.Tensor, forward: Forward) -> torch.Tensor:
        runner = self._runner
        states = runner.run(runner.embed(tokens, forward), range(len(runner.sublayers)), forward).hidden_states
        return runner.logits(states)

    def _compare(self, what: str, start: int, end: int, own: torch.Tensor, ours: torch.Tensor) -> None:
        exact = own.dtype == torch.float32 and own.device.type == "cpu" and not self._has_own
        allowed = 0.0 if exact else _ROUNDED * torch.finfo(own.dtype).eps * float(own.abs().max())
        difference = float((own - ours).abs().max())
        if difference <= allowed:
            return
        place = self._first_difference(allowed) if start == 0 else "its layers together"
        raise self._refusal(f"in {what}, {place} give other numbers than the model's own (difference {difference:.1e})")

    def _first_difference(self, allowed: float) -> str:
        streams, _ = self._decoder.observe(self._tokens[:_PROMPT])
        forward = self._runner.lay_out(self._new_state(), len(streams[0][0]))
        every = range(len(self._runner.sublayers))
        embedded = self._runner.embed(self._tokens[:_PROMPT], forward)
        captured = self._runner.run(embedded, every, forward, [*every, len(every)]).captured
        for layer, stream in enumerate(streams):
            if float((captured[2 * layer] - stream[0]).abs().max()) > allowed:
                return "the embeddings" if layer == 0 else f"the sublayers of layer {layer - 1}"
        return "norm and head"

    def _check_independence(self, rows: torch.Tensor, whole: torch.Tensor) -> None:
        """Refuses a model in which a row depends on rows after it, or on those that run with it."""
        difference = float((rows - whole).abs().max() / whole.abs().max())
        if not difference <= max(_CLOSE, _ROUNDED * torch.finfo(rows.dtype).eps):
            raise self._refusal(
                f"the logits of a token depend on the tokens that are read with it (they differ by {difference:.1e} of "
                "the largest between one forward and several)"
            )

    def _check_sequences(self, whole: torch.Tensor) -> None:
        """Compares two sequences in one forward with the first alone."""
        states, count = (self._new_state(), self._new_state()), _PROMPT // 2
        forwards = [self._runner.lay_out(state, count) for state in states]
        logits = self._logits(self._tokens[: 2 * count], Forward.join(forwards))[:count]
        if not self._are_close(logits, whole[:count]):
            raise self._refusal("the logits of a sequence depend on the sequences that run with it")

    def _check_states(self) -> None:
        """Finds whether recurrent layers can run several rows from a state; drops rows and runs others after it."""
        start, end = min(_PROMPT, len(self._tokens) - 2), len(self._tokens)
        state = self._new_state()
        self._ours(state, 0, start)
        rows = self._ours(state, start, end)
        state.cache.length = start
        self._ours(state, start, end - 1)
        state.cache.length = end - 1
        if not self._are_close(self._ours(state, end - 1, end), rows[-1:]):
            raise self._refusal("dropping rows changes the logits of those after them")
        self._decoder.skeleton.carries = True
        state = self._new_state()
        self._ours(state, 0, start)
        self._decoder.skeleton.carries = self._are_close(self._ours(state, start, end, settled=True), rows)

    def _check_tree(self) -> None:
        """Compares each row of a tree with the chain of its path; where one differs, trees are refused."""
        start, (depths, visible) = len(self._tokens) - _ROWS, _TREE
        state = self._new_state()
        self._ours(state, 0, start)
        mask = torch.tensor(visible, dtype=torch.bool, device=self._tokens.device)
        rows = self._tokens[start:]
        ours = self._logits(rows, self._runner.lay_out(state, _ROWS, depths=depths, visible=mask))
        for row, seen in enumerate(visible):
            other = self._new_state()
            self._ours(other, 0, start)
            path = rows[mask[row]]
            forward = self._runner.lay_out(other, len(path), start=start)
            if not self._are_close(ours[row], self._logits(path, forward)[sum(seen) - 1]):
                self._decoder.tree_refusal = "its masks cannot be those of a tree"
                return

    def _are_close(self, ours: torch.Tensor, own: torch.Tensor) -> bool:
        allowed = max(_CLOSE, _ROUNDED * torch.finfo(own.dtype).eps) * float(own.abs().max())
        return float((ours - own).abs().max()) <= allowed

    def _new_state(self) -> SequenceState:
        return SequenceState(self._decoder.new_cache(len(self._tokens) + _ROWS))

    def _refusal(self, reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"this '{self._decoder.family.name}' model is not supported: {reason}")
