"""Rows of text that a model goes on with itself, for a head that drafts what the model writes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from data import Mixer
from selfspec import Engine


class OwnTexts:
    """Rows as a `Mixer` draws them, most of which the model goes on with after their first tokens, greedily.

    The words of others remain in the other rows, and in all prompts.

    Args:
        mixer: draws the rows.
        engine: writes.
        prompt: tokens that a row keeps.
        share: of the rows that the engine goes on with.
    """

    def __init__(self, mixer: Mixer, engine: Engine, prompt: int = 48, share: float = 0.75) -> None:
        self._mixer, self._engine, self._prompt, self._share = mixer, engine, prompt, share
        self.seed = mixer.seed

    def batch(self, step: int, rows: int, length: int, mixture: Mapping[str, float]) -> tuple[Tensor, Tensor]:
        """Draw the rows of one step; see `Mixer.batch`."""
        inputs, targets = self._mixer.batch(step, rows, length, mixture)
        texts = torch.cat([inputs, targets[:, -1:]], dim=1)
        prompts = [text[: self._prompt].tolist() for text in texts[: round(rows * self._share)]]
        missing = texts.shape[1] - self._prompt
        replies = self._engine.generate(prompts, max_new_tokens=missing, ignore_eos=True)
        for text, reply in zip(texts, replies, strict=False):
            text[self._prompt :] = torch.tensor(reply.token_ids)
        return texts[:, :-1], texts[:, 1:]
