"""The mask embedding of probes, which stands for an unknown token: the kind with which most probed tokens are right."""

import math
from collections.abc import Callable, Sequence
from functools import cache

import torch

from selfspec.planning.acceptance_tables import AcceptanceRate, Feature
from selfspec.runtimes.target import Target

_SAMPLE = 4096
"""Tokens of the vocabulary, evenly spread, whose mean is taken."""

_LATEST = 256
"""Tokens of a prompt's end whose mean is taken."""

_PIECE = 64
"""Tokens that are embedded at a time."""

_KINDS = 3
_BOLDNESS = 0.3
_EXPECTED = 0.25


class MaskEmbeddingRates:
    """How often probed tokens were right, by the kind of mask embedding, over all requests, from several threads.

    An upper confidence bound chooses (UCB1: Auer et al. 2002). Which kind is best depends on the model: the mean of the
    vocabulary is near what tokens have in common in one, and near tokens that were never trained in another.
    """

    def __init__(self, kinds: int) -> None:
        by_kind = Feature(edges=tuple(range(1, kinds)), prior=(_EXPECTED,) * kinds)
        self._rates = AcceptanceRate(by_kind, weight=1.0)

    def best(self) -> int:
        """The kind to probe with next."""
        trials, right, _ = self._rates.to_lists()
        total = math.log(1 + sum(trials))
        bounds = [yes / all_ + _BOLDNESS * math.sqrt(total / all_) for yes, all_ in zip(right, trials, strict=True)]
        return bounds.index(max(bounds))

    def note(self, kind: int, right: bool) -> None:
        """Counts a probed token that was verified."""
        self._rates.note(right, kind)


class MaskEmbeddings:
    """The mask embeddings of one request: zero, the mean of its prompt's and the mean of the vocabulary's.

    Embedding-space probing (arXiv 2603.17942) takes the mean of the prompt. Each is made when it is first used,
    or before (``make``).

    Args:
        makers: make them, ``[hidden]`` in the model's dtype; ``None`` is zero.
        rates: of all requests.

    Attributes:
        kind: of the coming rounds.
    """

    def __init__(
        self, makers: Sequence[Callable[[], torch.Tensor | None]] = (), rates: MaskEmbeddingRates | None = None
    ) -> None:
        self._makers = tuple(makers) or (lambda: None,)
        self._made: dict[int, torch.Tensor | None] = {} if makers else {0: None}
        self._rates = rates or MaskEmbeddingRates(len(self._makers))
        self.kind = 0

    @property
    def chosen(self) -> torch.Tensor | None:
        """That of the coming rounds, ``[hidden]``; ``None`` for zero."""
        self.make()
        return self._made[self.kind]

    @property
    def is_made(self) -> bool:
        """Whether that of the coming rounds was made."""
        return self.kind in self._made

    def make(self) -> None:
        """Makes that of the coming rounds."""
        if not self.is_made:
            self._made[self.kind] = self._makers[self.kind]()

    def choose(self) -> None:
        """Chooses for the coming rounds."""
        self.kind = self._rates.best()

    def note(self, kind: int, right: bool) -> None:
        """Counts a probed token that was verified."""
        self._rates.note(kind, right)


class MaskEmbeddingsOfModel:
    """Makes the mask embeddings of requests."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._rates = MaskEmbeddingRates(_KINDS)
        step = max(1, target.vocab_size // _SAMPLE)
        self._of_vocabulary = cache(lambda: self._mean(torch.arange(0, target.vocab_size, step)))

    def of_request(self, prompt_ids: Sequence[int]) -> MaskEmbeddings:
        """Those of a request with this prompt."""
        if self._target.whole_layers is not None:
            return MaskEmbeddings()  # embeddings may depend on positions there

        def of_prompt() -> torch.Tensor:
            return self._mean(torch.tensor(prompt_ids[-_LATEST:], dtype=torch.long))

        return MaskEmbeddings((lambda: None, of_prompt, self._of_vocabulary), self._rates)

    @torch.inference_mode()
    def _mean(self, token_ids: torch.Tensor) -> torch.Tensor:
        total, dtype = torch.zeros((), device=self._target.device), self._target.dtype
        for piece in torch.split(token_ids.to(self._target.device), _PIECE):
            total = total + self._target.embed(piece).float().sum(0)
        return (total / len(token_ids)).to(dtype)
