"""Keys and values of texts that were read or written, for prompts that begin alike: a radix tree over tokens."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from selfspec.model.cache import KeyValueCache
from selfspec.runtimes.target import Target


@dataclass(frozen=True)
class PrefixCacheStats:
    """What a prefix cache holds, and how much it has saved.

    Attributes:
        bytes: of the keys and values that it holds.
        limit: most of them.
        entries: stretches of text.
        query_tokens: tokens of the prompts that were looked up.
        hit_tokens: those of them that were found, and so not read.
    """

    bytes: int = 0
    limit: int = 0
    entries: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0


@dataclass(eq=False)
class _Node:
    """A stretch of text after the one of its parent.

    Attributes:
        token_ids: its tokens; empty for a root.
        rows: their keys and values, ``[layers, 2, key_value_heads, tokens, head_dim]``; ``None`` for a root.
        parent: the stretch before it.
        children: the stretches after it, by their first token.
        used: when it was looked up or stored last.
    """

    token_ids: tuple[int, ...]
    rows: torch.Tensor | None
    parent: "_Node | None"
    children: "dict[int, _Node]" = field(default_factory=dict)
    used: int = 0


class PrefixCache:
    """Keys and values of texts, shared where they begin alike. It may be used from several threads.

    Of a text that is looked up, the longest beginning that any stored text has is found, to the token. Nothing is
    approximate: rows are copies of what the model computed after exactly these tokens. Where there is no more room, the
    ends of the texts that were used longest ago go first.

    Args:
        target: the model. When its modules or weights are replaced, everything is dropped; weights that are changed in
            place are not noticed (``clear``).
        limit: most bytes.
    """

    def __init__(self, target: Target, limit: int) -> None:
        self.target = target
        self._limit = limit
        self._lock = threading.Lock()
        self._query_tokens = self._hit_tokens = self._time = 0
        self._forget()

    @property
    def bytes(self) -> int:
        """Bytes of the keys and values that it holds."""
        return self._tokens * self.target.slot_bytes

    @property
    def stats(self) -> PrefixCacheStats:
        """What it holds, and how much it has saved."""
        with self._lock:
            entries = sum(1 for _ in self._nodes())
            return PrefixCacheStats(self.bytes, self._limit, entries, self._query_tokens, self._hit_tokens)

    def clear(self) -> None:
        """Drops everything."""
        with self._lock:
            self._forget()

    def count(self, prompt_tokens: int, found: int) -> None:
        """Counts a prompt.

        Args:
            prompt_tokens: its tokens.
            found: those that were not read.
        """
        with self._lock:
            self._query_tokens += prompt_tokens
            self._hit_tokens += found

    def touch(self, token_ids: Sequence[int]) -> None:
        """Makes what is known of a text the last to be dropped.

        Args:
            token_ids: the text.
        """
        with self._lock:
            for long_rope in self._roots:
                self._find(token_ids, long_rope)

    @torch.inference_mode()
    def fill(self, cache: KeyValueCache, token_ids: Sequence[int], *, long_rope: bool = False, grain: int = 1) -> int:
        """Appends to a cache what is known of the text after its committed slots.

        Args:
            cache: its committed slots belong to the first tokens of the text.
            token_ids: the text, as far as it may be taken.
            long_rope: its keys are rotated with the long frequencies.
            grain: the number of tokens taken in all is a multiple of it.

        Returns:
            Number of slots that were filled.
        """
        with self._lock:
            before, start = cache.length, 0
            path = self._find(token_ids, long_rope)
            end = sum(count for _, count in path) // grain * grain
            for node, count in path:
                first, last = max(cache.length - start, 0), min(count, end - start)
                if first < last:
                    assert node.rows is not None
                    cache.append(node.rows[:, :, :, first:last])
                start += count
            return cache.length - before

    @torch.inference_mode()
    def store(
        self,
        cache: KeyValueCache,
        token_ids: Sequence[int],
        *,
        version: int,
        long_rope: bool = False,
        room: int | None = None,
    ) -> None:
        """Copies keys and values of a text, as far as they are not here yet and all are finite.

        Args:
            cache: of the text; each token has a committed slot.
            token_ids: the text.
            version: of the target that computed it; one that has changed since stores nothing.
            long_rope: its keys are rotated with the long frequencies.
            room: most bytes of this cache from now on, where that is less than its limit.
        """
        assert len(token_ids) <= cache.length
        with self._lock:
            if version != self.target.version:
                return
            path = self._find(token_ids, long_rope)
            known = sum(count for _, count in path)
            parent = self._root(long_rope)
            if path and known < len(token_ids):
                parent = self._split(*path[-1])
            limit = min(self._limit, self._limit if room is None else max(0, room)) // self.target.slot_bytes
            self._shrink(limit - (len(token_ids) - known))
            fitting = min(len(token_ids) - known, limit - self._tokens)
            if fitting > 0:
                self._add(parent, tuple(token_ids[known : known + fitting]), cache.rows(known, fitting))

    def shrink(self, limit: int) -> None:
        """Drops what was used longest ago.

        Args:
            limit: bytes that it may hold at most, now.
        """
        with self._lock:
            self._time += 1  # nothing is spared
            self._shrink(max(0, limit) // self.target.slot_bytes)

    def _forget(self) -> None:
        self._tokens = 0
        self._version = self.target.version
        self._roots = {long_rope: _Node((), None, None) for long_rope in (False, True)}

    def _root(self, long_rope: bool) -> _Node:
        if self._version != self.target.version:
            self._forget()
        return self._roots[long_rope]

    def _find(self, token_ids: Sequence[int], long_rope: bool) -> list[tuple[_Node, int]]:
        """The stretches that a text begins with, each with the number of its tokens that the text has."""
        self._time += 1
        path, node, place = [], self._root(long_rope), 0
        while place < len(token_ids) and (child := node.children.get(token_ids[place])) is not None:
            child.used, node = self._time, child
            count = _common(child.token_ids, token_ids, place)
            path.append((child, count))
            place += count
            if count < len(child.token_ids):
                break
        return path

    def _add(self, parent: _Node, token_ids: tuple[int, ...], rows: torch.Tensor) -> None:
        # A token whose states are not numbers spoils rows before it, through attention weights of 0 times NaN.
        if bool(torch.isfinite(rows).all()):
            parent.children[token_ids[0]] = _Node(token_ids, rows, parent, used=self._time)
            self._tokens += len(token_ids)

    def _split(self, node: _Node, count: int) -> _Node:
        """Makes a stretch end after ``count`` tokens; returns the one that does."""
        if count == len(node.token_ids):
            return node
        assert node.rows is not None
        assert node.parent is not None
        upper = _Node(node.token_ids[:count], node.rows[:, :, :, :count].clone(), node.parent, used=node.used)
        node.parent.children[upper.token_ids[0]] = upper
        node.token_ids, node.rows, node.parent = node.token_ids[count:], node.rows[:, :, :, count:].clone(), upper
        upper.children[node.token_ids[0]] = node
        node.used = self._time - 1  # not what was just looked up
        return upper

    def _shrink(self, most_tokens: int) -> None:
        """Drops ends of texts, oldest first, that were not used at this very time."""
        while self._tokens > most_tokens:
            ends = (node for node in self._nodes() if not node.children and node.used < self._time)
            oldest = min(ends, key=lambda node: node.used, default=None)
            if oldest is None:
                return
            assert oldest.parent is not None
            del oldest.parent.children[oldest.token_ids[0]]
            self._tokens -= len(oldest.token_ids)

    def _nodes(self) -> Iterator[_Node]:
        waiting = [child for root in self._roots.values() for child in root.children.values()]
        while waiting:
            node = waiting.pop()
            waiting += node.children.values()
            yield node


def _common(stretch: Sequence[int], token_ids: Sequence[int], place: int) -> int:
    """How many tokens of a stretch the text from ``place`` on begins with."""
    most = min(len(stretch), len(token_ids) - place)
    return next((index for index in range(most) if stretch[index] != token_ids[place + index]), most)
