"""A suffix automaton that is extended with the text and gives its longest repeated suffix."""

from collections.abc import Iterable, Sequence

from selfspec.methods.copying import Match

_ROOT = 0
_UPDATED = 64
"""Most suffixes whose last occurrence is updated at each token; periodic text has more of them."""


class SuffixAutomaton:
    """All substrings of a growing text (Blumer et al. 1985), built online in amortised constant time per token.

    A state represents the substrings that end at the same positions. Its link leads to their longest suffix that also
    ends elsewhere. So the state of the whole text links to its longest suffix that has occurred before, which is the
    match of SAM decoding (Hu et al. 2024, section 3).

    Attributes:
        tokens: the text.
        match_length: length of the longest suffix of the text that has occurred before, 0 if none has.
        match_end: the position after its last earlier occurrence. For a suffix of more than 64 other repeated suffixes
            it is the position after any earlier occurrence.
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
        state, length = self._link[self._whole], self.match_length
        for token in drafted:
            while state > _ROOT and token not in self._next[state]:
                state = self._link[state]
                length = self._length[state]
            if token in self._next[state]:
                state, length = self._next[state][token], length + 1
        return Match(length, self._end[state])

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
