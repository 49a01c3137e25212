"""Ten texts that mislead ``auto``, on a real clock, beside plain decoding.

The known tokens that it is offered after every token seem certain, and are right or wrong as an adversary says, who
knows the text; the text stays the model's own. Meanwhile another process may use the cores: all the time, or so that
costs change at once.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from auto_worst import encode
from gguf_sides.process import BUSY
from selfspec import Engine
from selfspec.decoding.suffixes import Match
from selfspec.methods import make_method
from selfspec.methods.auto import known
from selfspec.planning.acceptance_tables import Lookup
from selfspec_lab.measuring import Target
from selfspec_lab.prompts import CHAT_PROMPTS
from selfspec_lab.widening import load_model

Right = Callable[[int], bool]
"""Whether the token offered for a position of the answer is right."""

_BURSTS = """
import os
import time
parent = os.getppid()
while os.getppid() == parent:
    end = time.perf_counter() + 0.4
    while time.perf_counter() < end:
        pass
    time.sleep(0.4)
"""
_OTHERS = {"busy": BUSY, "bursts": _BURSTS}
_STARTED = 0.3


@dataclass(frozen=True)
class Adversary:
    """What is offered, how sure it seems (tokens of the match), and the other process."""

    right: Callable[[], Right]
    match: int = 24
    other: str | None = None


def _shares(period: int, share: float) -> Right:
    """Right at random in a share of the positions of every other period, and never in the others."""
    numbers = random.Random(0)
    draws = [numbers.random() < share for _ in range(1 << 14)]
    return lambda position: draws[position] and not position // period % 2


ADVERSARIES = {
    "never right": Adversary(lambda: lambda position: False),
    "never right, and seems unsure": Adversary(lambda: lambda position: False, match=1),
    "right in the first 48 tokens, then never": Adversary(lambda: lambda position: position < 48),
    "every other token is right": Adversary(lambda: lambda position: position % 2 == 0),
    "8 are right, then 8 wrong": Adversary(lambda: lambda position: position // 8 % 2 == 0),
    "32 are right, then 32 wrong": Adversary(lambda: lambda position: position // 32 % 2 == 0),
    "half of 16 are right, then none of 16": Adversary(lambda: _shares(16, 0.5)),
    "never right, a busy core": Adversary(lambda: lambda position: False, other="busy"),
    "8 are right, then 8 wrong, a core busy in bursts": Adversary(
        lambda: lambda position: position // 8 % 2 == 0, other="bursts"
    ),
    "most of 32 are right, then none, a core busy in bursts": Adversary(lambda: _shares(32, 0.9), other="bursts"),
}


class Script:
    """The text of a request, as plain decoding wrote it, and the adversary."""

    def __init__(self, token_ids: Sequence[int], prompt: int, right: Right, match: int) -> None:
        self.token_ids, self.prompt, self.match = list(token_ids), prompt, match
        self._right = right

    def offer(self, start: int, count: int) -> list[int]:
        """The tokens offered for some positions of the text."""
        own = self.token_ids[start : start + count]
        return [each if self._right(start + place - self.prompt) else each ^ 1 for place, each in enumerate(own)]


def _scripted(script: Script) -> type[Lookup]:
    """Lookup that are the adversary's."""

    class Scripted(Lookup):
        def __init__(self, token_ids: Sequence[int], *arguments: Any) -> None:
            super().__init__(token_ids, *arguments)
            self._length = len(token_ids)
            self.match_after = lambda drafted=(): Match(script.match, self._length + len(drafted))
            self.tokens = lambda match, count, drafted=(): script.offer(match.end, count)

        def read(self, token_ids: Sequence[int]) -> None:
            self._length += len(token_ids)

        def extend(self, token_ids: Sequence[int]) -> None:
            for token_id in token_ids:
                self._acceptance.note(self.tokens(self.match_after(), 1) == [token_id], script.match)
                self._length += 1

    return Scripted


@contextmanager
def competing(other: str | None) -> Iterator[None]:
    """Another process on the cores meanwhile."""
    if other is None:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", _OTHERS[other]])
    try:
        time.sleep(_STARTED)
        yield
    finally:
        process.kill()
        process.wait()


def measure(model: str, new_tokens: int, repeats: int, progress: Callable[[str], None] = print) -> dict[str, Any]:
    """Answers prompts plainly and with ``auto``, in turns, against each adversary.

    Args:
        model: its name; it is unpacked to bfloat16.
        new_tokens: of each answer.
        repeats: of each adversary, over the prompts in turn.
        progress: is called with a line of text for each adversary.

    Returns:
        By adversary the ``ratios`` of the speeds of ``auto`` and of plain decoding, their ``median``, and how many of
        the adversary's tokens were ``drafted`` and ``accepted``. All texts are plain decoding's, or
        ``AssertionError`` is raised.
    """
    loaded, tokenizer = load_model(model, dtype="bfloat16", device="cpu", unpack=True)
    target = Target(loaded)
    plain, auto = (Engine(loaded, tokenizer, make_method(name, target)) for name in ("autoregressive", "auto"))
    auto.warmup()
    prompts = [encode(plain, name) for name in CHAT_PROMPTS]
    answers = [plain.generate(ids, max_new_tokens=new_tokens, ignore_eos=True).token_ids for ids in prompts]
    found: dict[str, Any] = {}
    for name, adversary in ADVERSARIES.items():
        ratios, drafted, accepted = [], 0, 0
        for repeat in range(repeats):
            ids, wanted = prompts[repeat % len(prompts)], answers[repeat % len(prompts)]
            script = Script([*ids, *wanted], len(ids), adversary.right(), adversary.match)
            original, seconds = known.Lookup, {}
            with competing(adversary.other):
                for engine in (plain, auto) if repeat % 2 else (auto, plain):
                    known.Lookup = _scripted(script)  # type: ignore[misc]
                    try:
                        result = engine.generate(ids, max_new_tokens=new_tokens, ignore_eos=True)
                    finally:
                        known.Lookup = original  # type: ignore[misc]
                    assert result.token_ids == wanted, f"{name}: another text"
                    seconds[engine] = result.seconds - result.prefill_seconds
                    offered = [each for each in result.rounds if each.drafted_by == known.LOOKUP]
                    drafted += sum(each.drafted for each in offered)
                    accepted += sum(each.accepted for each in offered)
            ratios.append(seconds[plain] / seconds[auto])
        found[name] = {
            "ratios": ratios,
            "median": statistics.median(ratios),
            "drafted": drafted,
            "accepted": accepted,
            "other": adversary.other,
        }
        progress(f"{name}: {found[name]['median']:.3f} of plain decoding")
    return found
