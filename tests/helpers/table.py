"""A model that is a table: it gives the next token's distribution from the last token alone.

There is one table for the target and another for the draft. An output is a Markov chain whose transitions are known
exactly, so its distribution can be tested. Everything but the model is the real thing.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from scipy import stats

from helpers.scripted import Script, Scripted
from selfspec.decoding.drafter import Needs
from selfspec.decoding.output import Output
from selfspec.decoding.prompt import Chunks
from selfspec.decoding.request import Advanced, Failed, Request
from selfspec.decoding.scheduler import Scheduler
from selfspec.model.cache import KeyValueCache
from selfspec.model.forward import SequenceState
from selfspec.model.kept import KeptSet
from selfspec.model.ranks import Ranks
from selfspec.runtimes.logits import Logits
from selfspec.runtimes.runner import Runner
from selfspec.runtimes.target import StackOutput
from selfspec.sampling.processors import ScoreProcessor
from selfspec.sampling.rules import Rule, Speculative, seeded_generator

VOCAB = 5
SUBLAYERS = 4
DRAWS = 20_000
"""Transitions that a test of trees draws."""
KEPT = KeptSet((1, 2), SUBLAYERS)

_random = torch.Generator().manual_seed(0)
TARGET = torch.softmax(1.2 * torch.randn(VOCAB, VOCAB, generator=_random), -1)
TARGET[:, 4] *= torch.tensor([0, 1, 1, 0, 1])  # some tokens cannot follow some others, whatever the draft thinks
TARGET /= TARGET.sum(-1, keepdim=True)
DRAFT = torch.softmax(TARGET.clamp_min(1e-3).log() + 0.8 * torch.randn(VOCAB, VOCAB, generator=_random), -1)


class TableTarget:
    """Stands in for ``Target``: a full run looks up the target's table, a partial one the draft's."""

    device, dtype, hidden_size = torch.device("cpu"), torch.float32, VOCAB
    sublayer_count, independent_rows = SUBLAYERS, 0
    version, slot_bytes, keys_depend_on_position_alone = 1, 8, True
    native, sublayers, tree_refusal, device_kernels = None, (None,) * SUBLAYERS, None, None
    _every = tuple(range(SUBLAYERS))
    ranks = Ranks()

    def new_sequence(self, prompt_length: int, capacity: int, last_length: int, adapter: Any = None) -> SequenceState:
        return SequenceState(KeyValueCache(1, 1, capacity, 1, dtype=torch.float32, device=self.device))

    def takes_memory_late(self, slots: int) -> bool:
        return False

    def lay_out(self, *_: Any, **__: Any) -> None:
        return None

    def at(self, precision: None) -> "TableTarget":
        return self

    path, draft, verify = Runner.path, Runner.draft, Runner.verify

    def embed(self, token_ids: torch.Tensor, forward: None) -> torch.Tensor:
        return torch.nn.functional.one_hot(token_ids, VOCAB).float()

    def run(
        self,
        hidden_states: torch.Tensor,
        sublayers: Iterable[int],
        step: None,
        capture: Collection[int] = (),
        last_rows: Mapping[int, torch.Tensor] | None = None,
        *,
        logits: bool = False,
        confidence: bool = False,
    ) -> StackOutput:
        states = hidden_states if len(list(sublayers)) == SUBLAYERS else -hidden_states
        return StackOutput(states, {}, Logits(self.logits(states)) if logits else None)

    def score(self, hidden_states: torch.Tensor, widest: int, forward: None = None) -> Logits:
        return Logits(self.logits(hidden_states))

    def logits(self, hidden_states: torch.Tensor, widest: int | None = None) -> torch.Tensor:
        full = hidden_states.sum(-1, keepdim=True) > 0
        return torch.where(full, hidden_states @ TARGET, -hidden_states @ DRAFT).clamp_min(1e-30).log()


def speculative(run: int) -> Rule:
    return Speculative(seeded_generator(run, "cpu"))


def p_value(script: Script, make_rule: Callable[[int], Rule], draws: int, length: int = 5000) -> tuple[float, int]:
    """Writes outputs until there are enough transitions; the χ² test of them against the table, and accepted drafts."""
    assert draws >= length, "not one output would be written"
    counts = np.zeros((VOCAB, VOCAB))
    accepted = 0
    for run in range(draws // length):
        tokens, rounds = write(script, make_rule(run), length)
        np.add.at(counts, (tokens[:-1], tokens[1:]), 1)
        accepted += sum(record.accepted for record in rounds)
    expected = TARGET.double().numpy() * counts.sum(1, keepdims=True)
    possible = expected > 0
    if counts[~possible].any():  # a token was written that the target never writes
        return 0.0, accepted
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    return float(stats.chi2.sf(statistic, possible.sum() - VOCAB)), accepted


def write(script: Script, rule: Rule, length: int) -> tuple[list[int], list[Any]]:
    target: Any = TableTarget()
    method = Scripted(target, script, Needs(sibling_rows=8))
    processor = ScoreProcessor()
    output = Output(max_new_tokens=length)
    scheduler = Scheduler(target, chunks=Chunks(16, 1), max_batch=1)
    scheduler.add(Request([0], length, rule=rule, processor=processor, output=output, method=method))
    rounds = []
    while scheduler.busy:
        for event in scheduler.step():
            assert not isinstance(event, Failed), event
            rounds += [event.round] if isinstance(event, Advanced) else []
    return output.token_ids, rounds
