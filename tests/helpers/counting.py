"""A method that learns: it counts requests and committed tokens, so that a state has something to keep."""

import threading
from dataclasses import dataclass

import torch

from helpers.models import LAYERS, VOCABULARY
from selfspec.decoding.draft import Draft, LayerDraft
from selfspec.decoding.drafter import Drafter, Feedback, Prefill
from selfspec.errors import StateError
from selfspec.methods.base import Method
from selfspec.methods.settings import MethodSettings, setting
from selfspec.methods.state import LearnedState
from selfspec.model.kept import KeptSet
from selfspec.runtimes.target import Target


@dataclass(frozen=True)
class CountingSettings(MethodSettings):
    keeps: bool = setting(True, "whether it keeps its counts")


class Counting(Method):
    """Counts requests, and how often each token was committed."""

    name = "counting"
    summary = "counts tokens"
    source = "tests"
    Settings = CountingSettings
    learns = True

    def __init__(self, target: Target, settings: CountingSettings) -> None:
        super().__init__(target, settings)
        self.lock = threading.Lock()
        self.requests = 0
        self.counts = torch.zeros(VOCABULARY, dtype=torch.long)

    def begin(self, prefill: Prefill) -> Drafter:
        with self.lock:
            self.requests += 1
        return _Counter(self)

    def state(self) -> LearnedState:
        if not self.settings.keeps:
            raise StateError("counting keeps nothing; set keeps=true")
        with self.lock:
            return LearnedState({"requests": self.requests}, {"counts": self.counts.clone()})

    def restore(self, state: LearnedState) -> None:
        counts = state.tensors.get("counts")
        if counts is None or counts.shape != self.counts.shape:
            raise StateError("there are no counts in it")
        with self.lock:
            self.requests, self.counts = state.values["requests"], counts.clone()


class _Counter(Drafter):
    def __init__(self, method: Counting) -> None:
        self._method = method

    def plan(self) -> Draft:
        return LayerDraft(KeptSet.early_exit(LAYERS // 2, 2 * LAYERS), 3)

    def learn(self, feedback: Feedback) -> None:
        with self._method.lock:
            self._method.counts += torch.bincount(torch.tensor(feedback.acceptance.token_ids), minlength=VOCABULARY)
