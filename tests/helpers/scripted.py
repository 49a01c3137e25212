"""A method for tests, which drafts whatever a test tells it to."""

from collections.abc import Callable, Collection

import torch

from selfspec.decoding.draft import Draft
from selfspec.decoding.drafter import Drafter, Feedback, Needs, Prefill
from selfspec.methods.base import Method
from selfspec.methods.settings import MethodSettings
from selfspec.runtimes.target import Target

Script = Callable[[tuple[int, ...]], Draft]
"""Plans a round from the output so far."""


class Scripted(Method):
    """Drafts by a script and keeps what it was told of every round.

    Args:
        target: the model.
        script: plans each round.
        needs: what the method asks of a request.
        watched: sublayers whose states the verifications keep.
        mask_embedding: what stands for the embedding of probes.
    """

    name = "scripted"
    summary = "drafts by a script"
    source = "tests"
    Settings = MethodSettings

    def __init__(
        self,
        target: Target,
        script: Script,
        needs: Needs | None = None,
        watched: Collection[int] = (),
        mask_embedding: torch.Tensor | None = None,
    ) -> None:
        super().__init__(target, MethodSettings())
        self.watched, self.mask_embedding = watched, mask_embedding
        self.prefills: list[Prefill] = []
        self.feedbacks: list[Feedback] = []
        self.script = script
        self._needs = needs or Needs()

    @property
    def needs(self) -> Needs:
        return self._needs

    def begin(self, prefill: Prefill) -> Drafter:
        self.prefills.append(prefill)
        return _ScriptedDrafter(self, prefill.first_token)


class _ScriptedDrafter(Drafter):
    def __init__(self, method: Scripted, first_token: int) -> None:
        self._method = method
        self._written = (first_token,)

    def plan(self) -> Draft:
        return self._method.script(self._written)

    @property
    def watched(self) -> Collection[int]:
        return self._method.watched

    @property
    def mask_embedding(self) -> torch.Tensor | None:
        return self._method.mask_embedding

    def learn(self, feedback: Feedback) -> None:
        self._written += feedback.acceptance.token_ids
        self._method.feedbacks.append(feedback)
