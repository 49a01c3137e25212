"""A model that runs at one precision: the two calls of a round, ``draft`` and ``verify``, and the forms on the CPU."""

import contextlib
import warnings
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from selfspec.errors import FallbackWarning
from selfspec.model import transfer
from selfspec.model.decoder import Decoder
from selfspec.model.forward import Forward
from selfspec.model.observed import ObservedDecoder
from selfspec.model.sublayers import Sublayer
from selfspec.model.transfer import AsyncCopy
from selfspec.runtimes import delta_net, mamba, mamba2, short_convolution
from selfspec.runtimes.branches import compile_block
from selfspec.runtimes.chain import (
    NO_KERNELS,
    PROBE,
    Drafted,
    DraftRequest,
    Path,
    RunningHead,
    VerifiedRows,
    VerifyRequest,
)
from selfspec.runtimes.device_kernels import DeviceKernels
from selfspec.runtimes.fused import fast_norm, fuse
from selfspec.runtimes.kernel_build import KernelBuildError
from selfspec.runtimes.kernels import WITHOUT_KERNELS
from selfspec.runtimes.logits import Logits
from selfspec.runtimes.products import Function, compile_head
from selfspec.runtimes.recurrent import compile_recurrent
from selfspec.runtimes.stack import Stack

RECURRENT = {**short_convolution.FORMS, **delta_net.FORMS, **mamba.FORMS, **mamba2.FORMS}
"""The recurrent branches whose rows share the products, by the class of the module."""


class Runner(Stack):
    """A model at one precision: drafts tokens, verifies them, and runs any of its sublayers. Made by ``Target.at``."""

    def with_products(
        self, sublayers: Sequence[Sublayer], head: Function, device_kernels: DeviceKernels | None = None
    ) -> "Runner":
        """The same model with other products, which run whatever the number of rows; by default the same choice."""
        parts = self._decoder, self.rope, sublayers, self.final_norm, head
        kernels = device_kernels or self.device_kernels
        made = Runner(*parts, compiled=self.native is not None, any_rows=True, device_kernels=kernels)
        made.graphs = None if self.graphs is None else self.graphs.of(made.sublayers)
        return made

    def path(self, sublayers: Iterable[int] | None = None) -> Path:
        """Whether drafts through some sublayers run as one native call, or the verification through all of them."""
        if self.native is None:
            return NO_KERNELS if self.device_kernels is None else self.device_kernels.path
        return self.native.chain_path(self._every if sublayers is None else tuple(sublayers), self.rope)

    def draft(self, requests: Sequence[DraftRequest], head: RunningHead | None = None) -> list[Drafted]:
        """Drafts tokens of several sequences side by side. Forwards through the same sublayers run as one.

        Where kernels choose the tokens (``DraftRequest.choose`` is ``None``) all forwards of a draft are one native
        call, else they run one after the other. In a run of the whole model, which kernels choose for, ``head`` drafts.
        """
        drafted: dict[int, Drafted] = {}
        chained: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            if request.choose is None:
                chained[request.sublayers].append(index)
        for indices in chained.values():
            assert self.native is not None
            own = self.native.chain([requests[index] for index in indices], self.rope, head)
            drafted.update(zip(indices, own, strict=True))
        stepping = {index: _Stepping(self, each) for index, each in enumerate(requests) if each.choose is not None}
        _run_steps(self, stepping.values())
        drafted.update((index, each.drafted()) for index, each in stepping.items())
        return [drafted[index] for index in range(len(requests))]

    def verify(self, requests: Sequence[VerifyRequest], *, native: bool) -> list[VerifiedRows]:
        """Runs the whole model over the last tokens and the drafts of several sequences.

        In one native call (``native``), where ``path`` is native, or as a forward from Python, with the same logits bit
        for bit.
        """
        counts = [len(each.token_ids) for each in requests]
        if native:
            assert self.native is not None
            logits, captured = self.native.verify(requests, self.rope)
            return [VerifiedRows(own, states) for own, states in zip(logits.split(counts), captured, strict=True)]
        parts = [
            self.lay_out(each.state, count, depths=each.depths, visible=each.visible, drawing=each.drawing)
            for each, count in zip(requests, counts, strict=True)
        ]
        rows = [
            _embed(self, each.token_ids, part, each.mask_embedding) for each, part in zip(requests, parts, strict=True)
        ]
        output = self.run(
            rows[0] if len(rows) == 1 else torch.cat(rows),
            self._every,
            Forward.join(parts),
            {index for each in requests for index in each.capture},
            logits=True,
        )
        verified = []
        for each, own in zip(requests, output.split(counts), strict=True):
            assert own.logits is not None
            verified.append(VerifiedRows(own.logits, {index: own.captured[index] for index in each.capture}))
        return verified


def _embed(runner: Runner, tokens: torch.Tensor, forward: Forward, mask_embedding: torch.Tensor | None) -> torch.Tensor:
    """The embeddings of rows; ``mask_embedding`` for those of probes, or zero."""
    states = runner.embed(tokens.clamp(min=0), forward)
    return torch.where((tokens == PROBE)[:, None], 0.0 if mask_embedding is None else mask_embedding, states)


HEAD_START = 4
"""Sublayers of the next draft step that a device is given before the host reads the last step's confidence.

They keep the device busy while the confidence is copied and the host launches the rest, some tens of microseconds. More
would hide nothing more, and a draft that stops has run them in vain.
"""


def head_start(device: torch.device) -> int:
    """Sublayers of the next draft step to run early; none on a CPU, which does not run ahead of its host."""
    return HEAD_START if device.type == "cuda" else 0


def _run_steps(runner: Runner, drafts: Iterable["_Stepping"]) -> None:
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


def _advance(runner: Runner, drafts: Sequence["_Stepping"], most: int | None = None) -> None:
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

    def __init__(self, runner: Runner, request: DraftRequest) -> None:
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
        layout = runner.lay_out(
            request.state, 1 + len(guesses), start=start, drawing=request.drawing, seen=request.seen
        )
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


def make_runner(decoder: Decoder, runtime: str) -> Runner:
    """The form of a model for ``eager``, ``fused``, ``compiled`` or ``auto``, at full precision, as the model is now.

    Where kernels cannot be built it warns: each time if they were asked for, else once a process. It warns once, too,
    where the CPU has none for the model's dtype.
    """
    sublayers, rope = decoder.split(), decoder.new_rope()
    if runtime != "eager" and decoder.like.is_cpu and decoder.like.dtype == torch.float16:
        _warn_once("float16 has no kernels on a CPU, so decoding is much slower; load the model in bfloat16")
    if runtime == "auto" and isinstance(decoder, ObservedDecoder):
        with contextlib.suppress(KernelBuildError):
            sublayers = [compile_recurrent(each, RECURRENT) for each in sublayers]
    if runtime == "eager" or isinstance(decoder, ObservedDecoder):
        return Runner(decoder, rope, sublayers, decoder.final_norm, decoder.head, compiled=False)
    sublayers = [fuse(sublayer, decoder.family, index // 2) for index, sublayer in enumerate(sublayers)]
    norm = fast_norm(decoder.final_norm, decoder.family)
    if runtime in ("auto", "compiled"):
        try:
            head = compile_head(decoder.head)
            return Runner(
                decoder,
                rope,
                [compile_block(each, decoder.family, index // 2) for index, each in enumerate(sublayers)],
                norm,
                head,
                compiled=True,
            )
        except KernelBuildError as error:
            if runtime == "compiled":
                warnings.warn(
                    f"the compiled runtime falls back to fused blocks: {error}", FallbackWarning, stacklevel=4
                )
            else:
                _warn_once(f"there are no compiled kernels, so {WITHOUT_KERNELS}: {error}")
    return Runner(decoder, rope, sublayers, norm, decoder.head, compiled=False)


@cache
def _warn_once(text: str) -> None:
    warnings.warn(text, FallbackWarning, stacklevel=6)
