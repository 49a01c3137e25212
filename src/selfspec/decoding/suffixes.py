"""The longest suffix of a text that has occurred before, in the text itself or in texts of earlier requests."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Match(NamedTuple):
    """The longest suffix of a text, or of a text and drafted tokens after it, that has occurred before."""

    length: int  # in tokens; 0 if none has
    end: int  # the position after the occurrence
    earlier: bool = False  # whether that is in the earlier texts


def continuation(tokens: Sequence[int], start: int, count: int, drafted: Sequence[int] = ()) -> list[int]:
    """The tokens that followed an earlier occurrence of the text's suffix.

    If the text ends before ``count`` tokens are copied, the copy repeats: the text is then likely to be periodic, with
    the distance of the suffix to its earlier occurrence as the period.
    """
    piece = [*tokens[start : start + count], *drafted][:count]
    repeats = -(-count // len(piece))
    return (piece * repeats)[:count]


_ROOT = 0
_UPDATED = 64
"""Most suffixes whose last occurrence is updated at each token; periodic text has more of them."""


def common(stretch: Sequence[int], token_ids: Sequence[int], place: int = 0) -> int:
    """How many tokens of a stretch the text from ``place`` on begins with."""
    most = min(len(stretch), len(token_ids) - place)
    if tuple(token_ids[place : place + most]) == tuple(stretch[:most]):  # without a loop in Python
        return most
    return next((index for index in range(most) if stretch[index] != token_ids[place + index]), most)


class SuffixAutomaton:
    """All substrings of a growing text (Blumer et al. 1985), built online in amortised constant time per token.

    A state represents the substrings that end at the same positions. Its link leads to their longest suffix that also
    ends elsewhere. So the state of the whole text links to its longest suffix that has occurred before, which is the
    match of SAM decoding (Hu et al. 2024, section 3).

    ``match_end`` is the position after the match's last earlier occurrence; for one of more than 64 other repeated
    suffixes it is the position after any earlier occurrence.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens: list[int] = []
        self.match_length = 0
        self.match_end = 0
        self._whole = _ROOT
        # By state: the next state for each token, the link, the length of its longest substring, its last end.
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._end = [0]
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Appends tokens to the text."""
        for token in tokens:
            self._append(token)

    def match_after(self, drafted: Sequence[int]) -> Match:
        """The longest suffix of the text and drafted tokens that occurs in the text."""
        if not drafted:
            return Match(self.match_length, self.match_end)
        state, length = self.follow(drafted, self._link[self._whole], self.match_length)
        return Match(length, self._end[state])

    def follow(self, tokens: Iterable[int], state: int = _ROOT, length: int = 0) -> tuple[int, int]:
        """The state and the length of the longest suffix that occurs, of a string that does and of tokens after it.

        ``state`` and ``length`` are those of that string. They stay valid while the text grows.
        """
        for token in tokens:
            while state > _ROOT and token not in self._next[state]:
                state = self._link[state]
                length = min(length, self._length[state])  # the state may have been split meanwhile
            if token in self._next[state]:
                state, length = self._next[state][token], length + 1
        return state, length

    def end(self, state: int) -> int:
        """The position after an occurrence of a state's strings."""
        return self._end[state]

    def _append(self, token: int) -> None:
        self.tokens.append(token)
        length = len(self.tokens)
        whole = self._add_state({}, _ROOT, length, length)
        state = self._whole
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = whole
            state = self._link[state]
        if state >= 0:
            self._link[whole] = self._suffix_state(state, token)
        self._whole = whole
        self._note_match()

    def _suffix_state(self, state: int, token: int) -> int:
        """The state whose longest substring is that of ``state`` followed by ``token``, split off if necessary."""
        target, length = self._next[state][token], self._length[state] + 1
        if self._length[target] == length:
            return target
        split = self._add_state(dict(self._next[target]), self._link[target], length, self._end[target])
        self._link[target] = split
        while state >= 0 and self._next[state].get(token) == target:
            self._next[state][token] = split
            state = self._link[state]
        return split

    def _add_state(self, following: dict[int, int], link: int, length: int, end: int) -> int:
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        self._end.append(end)
        return len(self._next) - 1

    def _note_match(self) -> None:
        """Stores the match, then updates the last occurrence of the text's suffixes."""
        state = self._link[self._whole]
        self.match_length, self.match_end = self._length[state], self._end[state]
        for _ in range(_UPDATED):
            if state == _ROOT:
                break
            self._end[state] = len(self.tokens)
            state = self._link[state]


SEPARATOR = -1
"""Stands after each of the earlier texts."""

_FOLLOWED = 64
"""Tokens of the end of what is appended, as a prompt is, that are looked for in earlier texts."""


class KnownText:
    """A growing text, whose suffixes are looked up in it and in earlier texts. The longer match counts.

    ``earlier`` has a ``SEPARATOR`` after each text, and may grow meanwhile.
    """

    def __init__(self, tokens: Iterable[int], earlier: SuffixAutomaton | None = None) -> None:
        self._own = SuffixAutomaton()
        self._earlier = earlier
        self._followed = (_ROOT, 0)
        self.extend(list(tokens))

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens to the text."""
        self._own.extend(tokens)
        if self._earlier is not None:
            before = self._followed if len(tokens) <= _FOLLOWED else (_ROOT, 0)
            self._followed = self._earlier.follow(tokens[-_FOLLOWED:], *before)

    def match_after(self, drafted: Sequence[int] = ()) -> Match:
        """The longest suffix of the text and drafted tokens that has occurred before, with a token after it."""
        match = self._own.match_after(drafted)
        if self._earlier is not None:
            state, length = self._earlier.follow(drafted, *self._followed)
            end = self._earlier.end(state)
            if length > match.length and self._earlier.tokens[end : end + 1] not in ([], [SEPARATOR]):
                return Match(length, end, earlier=True)
        return match

    def copy(self, match: Match, count: int, drafted: Sequence[int] = ()) -> list[int]:
        """The tokens after a match of the text and drafted tokens: ``count``, or fewer where an earlier text ends."""
        if match.earlier and self._earlier is not None:
            following = self._earlier.tokens[match.end : match.end + count]
            return following[: following.index(SEPARATOR)] if SEPARATOR in following else following
        return continuation(self._own.tokens, match.end, count, drafted)
