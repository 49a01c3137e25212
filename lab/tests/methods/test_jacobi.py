"""Jacobi decoding against a slow reference."""

from typing import Any

import pytest

from helpers.drafts import begin, ngram_model, play
from helpers.models import VOCABULARY, build
from selfspec.methods import make_method
from selfspec.runtimes.target import Target


def make(name: str, **changes: Any) -> Any:
    return make_method(name, Target(build("llama")), changes)


@pytest.mark.parametrize("room", [1000, 3])
def test_jacobi_guesses_are_the_targets_choices_behind_the_last_guesses(room: int) -> None:
    random_model, text, block = ngram_model(1, 8), [1, 2, 3], 6

    def model(text: tuple[int, ...]) -> int:
        return random_model(text[:-1])  # a guess behind a wrong one can be right

    drafter = begin(make("jacobi", block_size=block, initial="prompt"), text)
    guesses: list[int] = []
    accepted = 0
    for round_number in range(20):
        before = list(text)
        draft, stood = play(drafter, model, text, VOCABULARY, room)
        assert len(draft.token_ids) == block
        assert list(draft.token_ids[: len(guesses)]) == guesses, round_number
        assert set(draft.token_ids[len(guesses) :]) <= {1, 2}, "a first guess that is no prompt token"
        # y_i <- argmax p(y | y_1 ... y_(i-1)) over the whole block; what is committed leaves it at the front.
        seen = draft.token_ids[:room]
        iterate = [model((*before, *seen[:length])) for length in range(len(seen) + 1)]
        assert text[len(before) :] == iterate[: stood + 1]
        guesses = iterate[stood + 1 :]
        accepted += stood
    assert accepted > 0


def test_jacobi_guesses_at_first_are_the_pad_token(monkeypatch: pytest.MonkeyPatch) -> None:
    config = build("llama").config
    monkeypatch.setattr(config, "eos_token_id", [VOCABULARY, 9])
    assert begin(make("jacobi", block_size=3), [1, 2]).plan().token_ids == (9, 9, 9)
    monkeypatch.setattr(config, "pad_token_id", 0)
    assert begin(make("jacobi", block_size=3), [1, 2]).plan().token_ids == (0, 0, 0)
    monkeypatch.setattr(config, "pad_token_id", -1)
    monkeypatch.setattr(config, "eos_token_id", None)
    assert begin(make("jacobi", block_size=3), [1, 2]).plan().token_ids == (1, 1, 1)
