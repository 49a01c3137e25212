"""What stands for the embedding of an unknown token: that after which guesses are best, as their scores tell."""

import math
import threading
from collections.abc import Sequence

import torch

from selfspec.runtimes.target import Target

_SAMPLE = 4096
"""Tokens of the vocabulary, evenly spread, whose mean is taken."""

_LATEST = 256
"""Tokens of a prompt's end whose mean is taken."""

_PIECE = 64
"""Tokens that are embedded at a time."""

_BOLDNESS = 0.3
_EXPECTED = 0.25
_MEMORY = 400.0


class BlankRecord:
    """How often guesses were right, by the embedding that they were made with; of all requests, from several threads.

    An upper confidence bound chooses (Auer et al. 2002). Which embedding is best depends on the model: the mean of the
    vocabulary is near what tokens have in common in one, and near tokens that were never trained in another.
    """

    def __init__(self, count: int) -> None:
        self._trials = [1.0] * count
        self._right = [_EXPECTED] * count
        self._lock = threading.Lock()

    def best(self) -> int:
        """The embedding to make the next guesses with."""
        with self._lock:
            total = math.log(1 + sum(self._trials))
            values = [
                right / trials + _BOLDNESS * math.sqrt(total / trials)
                for right, trials in zip(self._right, self._trials, strict=True)
            ]
        return values.index(max(values))

    def note(self, kind: int, right: bool) -> None:
        """Counts a guess that was verified."""
        with self._lock:
            kept = min(1.0, (_MEMORY - 1) / self._trials[kind])
            self._trials[kind] = self._trials[kind] * kept + 1
            self._right[kind] = self._right[kind] * kept + right


class Blanks:
    """The embeddings of one request: zero, the mean of its prompt's, and the mean of the vocabulary's.

    Embedding-space probing (arXiv 2603.17942) takes the mean of the prompt.
    """

    COUNT = 3

    def __init__(self, vectors: Sequence[torch.Tensor | None] = (None,), record: BlankRecord | None = None) -> None:
        self._vectors = vectors
        self._record = record or BlankRecord(len(vectors))
        self.kind = 0
        self.vector = vectors[0]

    def choose(self) -> None:
        """Chooses the embedding of the coming rounds."""
        self.kind = self._record.best()
        self.vector = self._vectors[self.kind]

    def note(self, kind: int, right: bool) -> None:
        """Counts a guess that was verified."""
        self._record.note(kind, right)


class BlanksOfModel:
    """Makes the embeddings of requests."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._record = BlankRecord(Blanks.COUNT)
        self._vocabulary: torch.Tensor | None = None

    def of_request(self, prompt_ids: Sequence[int]) -> Blanks:
        """The embeddings of a request with this prompt."""
        if self._target.whole_layers is not None:
            return Blanks()  # embeddings may depend on positions there
        if self._vocabulary is None:
            count = self._target.vocab_size
            self._vocabulary = self._mean(torch.arange(0, count, max(1, count // _SAMPLE)))
        prompt = self._mean(torch.tensor(prompt_ids[-_LATEST:], dtype=torch.long))
        return Blanks((None, prompt, self._vocabulary), self._record)

    def _mean(self, token_ids: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            total, dtype = torch.zeros((), device=self._target.device), self._target.dtype
            for piece in torch.split(token_ids.to(self._target.device), _PIECE):
                total = total + self._target.embed(piece).float().sum(0)
            return (total / len(token_ids)).to(dtype)
