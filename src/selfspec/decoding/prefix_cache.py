"""Keys and values of earlier texts, for prompts that begin alike, and the memory that they and the requests share."""

import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from selfspec.decoding.drafter import DraftingMethod
from selfspec.decoding.growth import grow, room_beside
from selfspec.decoding.kept_texts import PART_BYTES, KeptTexts, Scope, Stretch
from selfspec.decoding.request import Request, bytes_of
from selfspec.decoding.request import Sequence as Running
from selfspec.decoding.suffixes import common
from selfspec.errors import RequestTooLargeError
from selfspec.limits import is_out_of_memory
from selfspec.model.cache import KeyValueCache, are_finite
from selfspec.runtimes.target import Target

ANY = Scope()


@dataclass(frozen=True)
class PrefixCacheStats:
    """What a prefix cache holds (``limit`` is its most bytes), and how many tokens it looked up and found."""

    bytes: int = 0
    limit: int = 0
    entries: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0


@dataclass(eq=False)
class _Node:
    """A stretch of text after the one of its parent, with keys and values; children are found by their first token.

    ``rows`` is ``[layers, 2, key_value_heads, tokens, head_dim]``, as caches have it; a root has neither tokens nor
    rows, and is found among the roots by its ``scope``. ``used`` is when it was last used.
    """

    token_ids: tuple[int, ...]
    rows: torch.Tensor | None
    parent: "_Node | None"
    children: "dict[int, _Node]" = field(default_factory=dict)
    used: int = 0
    scope: Scope | None = None


class PrefixCache:
    """Keys and values of texts, shared where they begin alike. It may be used from several threads.

    Of a text that is looked up, the longest beginning that any stored text has is found, to the token. Nothing is
    approximate: rows are copies of what the model computed after exactly these tokens. Where there is no more room, the
    ends of the texts that were used longest ago go first. Texts with different salts share nothing.

    When modules or weights of ``target`` are replaced, everything is dropped; weights that are changed in place are not
    noticed (``clear``). ``limit`` is in bytes.
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
        return PrefixCacheStats(self.bytes, self._limit, len(self._order), self._query_tokens, self._hit_tokens)

    def clear(self) -> None:
        """Drops everything."""
        with self._lock:
            self._forget()

    def count(self, prompt_tokens: int, found: int) -> None:
        """Counts the tokens of a prompt, and those of them that were found."""
        with self._lock:
            self._query_tokens += prompt_tokens
            self._hit_tokens += found

    def known(self, token_ids: Sequence[int], scope: Scope = ANY) -> int:
        """How many of a text's first tokens it has."""
        with self._lock:
            return sum(count for _, count in self._find(token_ids, scope))

    def stretches(self, token_ids: Sequence[int], scope: Scope = ANY) -> list[Stretch]:
        """What it holds of a text, in the pieces that it holds."""
        with self._lock:
            found, start = [], 0
            for node, count in self._find(token_ids, scope):
                if count == len(node.token_ids) and node.rows is not None:
                    found.append(Stretch(token_ids[: start + count], start, node.rows))
                start += count
            return found

    def touch(self, token_ids: Sequence[int], salt: str = "") -> None:
        """Makes what is known of a text the last to be dropped."""
        with self._lock:
            for long_rope in (False, True):
                self._find(token_ids, Scope(salt, long_rope))

    @torch.inference_mode()
    def fill(
        self,
        cache: KeyValueCache,
        token_ids: Sequence[int],
        scope: Scope = ANY,
        grain: int = 1,
        most: int | None = None,
    ) -> int:
        """Appends to a cache what is known of a text after the cache's committed slots; returns how many slots.

        The cache then has a multiple of ``grain`` slots, or as many as before. At most about ``most`` slots are
        appended.
        """
        with self._lock:
            before, start = cache.length, 0
            path = self._find(token_ids, scope)
            known = sum(count for _, count in path)
            end = (known if most is None else min(known, before + max(most, grain))) // grain * grain
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
        cache: KeyValueCache | Stretch,
        token_ids: Sequence[int],
        scope: Scope = ANY,
        *,
        version: int,
        room: int | None = None,
        most: int | None = None,
    ) -> int:
        """Copies keys and values of a text from its cache, as far as they are not here yet and all are finite.

        Nothing is stored if the target is not of the ``version`` that computed them, or what is before a stretch is not
        here. ``room`` is the most bytes of this prefix cache from now on, where that is less than its limit. At most
        ``most`` tokens are stored, the first that are not here.

        Returns:
            How many tokens were stored.
        """
        assert len(token_ids) <= cache.length
        with self._lock:
            if version != self.target.version:
                return 0
            path = self._find(token_ids, scope)
            known = sum(count for _, count in path)
            if isinstance(cache, Stretch) and known < cache.start:
                return 0
            parent = self._root(scope)
            if path and known < len(token_ids):
                parent = self._split(*path[-1])
            limit = min(self._limit, self._limit if room is None else max(0, room)) // self.target.slot_bytes
            wanted = len(token_ids) - known if most is None else min(most, len(token_ids) - known)
            self._shrink(limit - wanted)
            fitting = min(wanted, limit - self._tokens)
            if fitting <= 0:
                return 0
            return self._add(parent, tuple(token_ids[known : known + fitting]), cache.rows(known, fitting))

    def shrink(self, limit: int) -> None:
        """Drops what was used longest ago, down to a limit in bytes."""
        with self._lock:
            self._time += 1  # nothing is spared
            self._shrink(max(0, limit) // self.target.slot_bytes)

    def _forget(self) -> None:
        self._tokens = 0
        self._version = self.target.version
        self._roots: dict[Scope, _Node] = {}  # those that have children
        # All stretches, least recently used first. Each is before its parent, so that the first one has no children.
        self._order: OrderedDict[_Node, None] = OrderedDict()

    def _root(self, scope: Scope) -> _Node:
        if self._version != self.target.version:
            self._forget()
        return self._roots.get(scope) or _Node((), None, None, scope=scope)

    def _find(self, token_ids: Sequence[int], scope: Scope) -> list[tuple[_Node, int]]:
        """The stretches that a text begins with, each with the number of its tokens that the text has."""
        self._time += 1
        path, node, place = [], self._root(scope), 0
        while place < len(token_ids) and (child := node.children.get(token_ids[place])) is not None:
            node = child
            count = common(child.token_ids, token_ids, place)
            path.append((child, count))
            place += count
            if count < len(child.token_ids):
                break
        self._use(node)
        return path

    def _use(self, node: _Node) -> None:
        """Makes a stretch and those before it the most recently used."""
        while node.parent is not None:
            node.used = self._time
            self._order[node] = None
            self._order.move_to_end(node)
            node = node.parent

    def _add(self, parent: _Node, token_ids: tuple[int, ...], rows: torch.Tensor) -> int:
        """Adds a stretch after another one, if its rows are finite; returns how many tokens were added."""
        # A token whose states are not numbers spoils rows before it, through attention weights of 0 times NaN.
        if not are_finite(rows):
            return 0
        parent.children[token_ids[0]] = child = _Node(token_ids, rows, parent)
        self._tokens += len(token_ids)
        self._use(child)
        if parent.scope is not None:
            self._roots[parent.scope] = parent
        return len(token_ids)

    def _split(self, node: _Node, count: int) -> _Node:
        """Makes a stretch end after ``count`` tokens; returns the one that does."""
        if count == len(node.token_ids):
            return node
        assert node.rows is not None
        assert node.parent is not None
        upper = _Node(node.token_ids[:count], node.rows[:, :, :, :count].clone(), node.parent)
        node.parent.children[upper.token_ids[0]] = upper
        node.token_ids, node.rows, node.parent = node.token_ids[count:], node.rows[:, :, :, count:].clone(), upper
        upper.children[node.token_ids[0]] = node
        self._use(upper)
        node.used = self._time - 1  # not what was just looked up
        return upper

    def _shrink(self, most_tokens: int) -> None:
        """Drops ends of texts, oldest first, that were not used at this very time."""
        while self._tokens > most_tokens:
            oldest = next(iter(self._order), None)
            if oldest is None or oldest.used == self._time:
                return
            assert oldest.parent is not None
            assert not oldest.children
            del self._order[oldest], oldest.parent.children[oldest.token_ids[0]]
            self._tokens -= len(oldest.token_ids)
            if oldest.parent.scope is not None and not oldest.parent.children:
                del self._roots[oldest.parent.scope]


def _scope(sequence: Running) -> Scope:
    return Scope(sequence.request.cache_salt, sequence.state.long_rope)


class CacheMemory:
    """Which requests fit, and which keys and values of their prompts are known.

    ``grain`` is that of the prompts' chunks, ``limit`` the most bytes that requests and prefix cache hold together.
    ``kept`` has keys and values of earlier processes, and keeps those of requests that finish.
    """

    def __init__(
        self,
        target: Target,
        grain: int,
        limit: int | None = None,
        prefixes: PrefixCache | None = None,
        kept: KeptTexts | None = None,
    ) -> None:
        self.limit = limit
        self._kept = kept
        self.prefixes = prefixes if target.keys_depend_on_position_alone else None
        self._target = target
        self._grain = grain

    def check(self, request: Request) -> None:
        """Refuses a request that could never be admitted: it needs more memory than all requests together have."""
        needed = request.bytes(self._target)
        if self.limit is None or needed <= self.limit:
            return
        most = self.room(request.method, len(request.prompt_ids))
        remedy = f"ask for at most {most} new tokens" if most > 0 else "shorten the prompt"
        raise RequestTooLargeError(
            f"a prompt of {len(request.prompt_ids)} tokens and {request.max_new_tokens} new ones need "
            f"{needed / 2**20:.1f} MiB for keys and values, and there are {self.limit / 2**20:.1f} MiB for all "
            f"requests; {remedy}, or raise the memory limit"
        )

    def room(self, method: DraftingMethod, prompt_tokens: int, share: float = 1.0) -> int:
        """Most new tokens after a prompt of a request that takes a share of the memory, and fits the context."""
        room = self._target.room(prompt_tokens)
        if self.limit is None:
            return room
        fixed, each = bytes_of(method, prompt_tokens, self._target)
        return min(room, (int(share * self.limit) - fixed) // each)

    def admits(self, request: Request, running: Sequence[Running], leaving: int) -> bool:
        """Whether a request fits beside those that run, those that have ended and still hold some bytes, and prefixes.

        One that does not fit even alone is admitted, for ``check`` to refuse.
        """
        if self.limit is None or request.bytes(self._target) > self.limit:
            return True
        room = self._room_for(request, running)
        return room >= leaving + (0 if self.prefixes is None else self.prefixes.bytes)

    def make_room(self, request: Request, running: Sequence[Running], most: float) -> int:
        """Drops about ``most`` bytes of the prefix cache, at most, where a request would fit without them.

        Returns:
            How many bytes were dropped.
        """
        if self.limit is None or self.prefixes is None:
            return 0
        left, before = self._room_for(request, running), self.prefixes.bytes
        if left < 0 or before <= left or most <= 0:
            return 0
        self.prefixes.touch(request.prompt_ids, request.cache_salt)  # what it begins with goes last
        self.prefixes.shrink(int(max(left, before - most)))
        return before - self.prefixes.bytes

    def _room_for(self, request: Request, running: Sequence[Running]) -> int:
        """Bytes that are free beside those that run and a request; negative where it does not fit."""
        assert self.limit is not None
        first = request.first_bytes(self._target)
        if first > room_beside(running, self.limit):
            return -1
        return self.limit - sum(each.bytes for each in running) - first

    def grow(self, running: Sequence[Running]) -> list[Running]:
        """Those of the sequences that run for whose next rounds there is memory; the prefix cache makes room."""
        if self.limit is None:
            return list(running)
        going = grow(running, self.limit)
        left = self.limit - sum(each.bytes for each in running)
        if self.prefixes is not None and self.prefixes.bytes > left:
            self.prefixes.shrink(left)
        return going

    def recall(self, sequence: Running, held: int) -> bool:
        """Takes over a part of what is known of a prompt; returns whether there may be more of it.

        First keys and values of a file go into the prefix cache, until no file goes on; then those of the prefix cache
        into the sequence's own. The requests hold ``held`` bytes.
        """
        if not sequence.recalled:
            sequence.recalled = not self._read_file(sequence, held)
            return not sequence.recalled or self.recall(sequence, held)
        return self.fill(sequence, self.part) > 0

    def _read_file(self, sequence: Running, held: int) -> bool:
        """Reads the file that goes on where the prefix cache ends; returns whether this has more then."""
        if self._kept is None or self.prefixes is None:
            return False
        scope, text = _scope(sequence), sequence.request.prompt_ids[: sequence.reusable]
        known = self.prefixes.known(text, scope)
        with self._within_memory():
            if (found := self._kept.find(text, known, scope)) is not None:
                room = self._room(held)
                self.prefixes.store(found, found.token_ids, scope, version=sequence.version, room=room)
        return self.prefixes.known(text, scope) > known

    def fill(self, sequence: Running, most: int | None = None) -> int:
        """Copies known keys and values of a prompt that is not read to its end, of at most about ``most`` tokens.

        Returns of how many.
        """
        if self.prefixes is None:
            return 0
        request, cache = sequence.request, sequence.cache
        text = request.prompt_ids[: sequence.reusable]
        found = self.prefixes.fill(cache, text, _scope(sequence), self._grain, most)
        if found:
            request.cached_tokens += found
            sequence.filled = cache.length
        return found

    def count(self, request: Request) -> None:
        """Counts how much of a prompt that is read was known."""
        if self.prefixes is not None:
            self.prefixes.count(len(request.prompt_ids), request.cached_tokens)

    @property
    def part_bytes(self) -> int:
        """Bytes of keys and values that are copied or given back at a time, while others wait."""
        return PART_BYTES

    @property
    def part(self) -> int:
        """Tokens that have as many."""
        return max(1, self.part_bytes // self._target.slot_bytes)

    def give_back(self, leaving: deque[Running]) -> None:
        """Releases a part of the memory of sequences that have ended, in their order; drops those without any left.

        To release a long cache as a whole takes many milliseconds.
        """
        left = self.part_bytes
        while leaving and left > 0:
            released = leaving[0].cache.release(left)
            if not released:
                leaving.popleft()
            left -= released

    def keep(self, sequence: Running, held: int, most: int) -> int:
        """Copies keys and values of a sequence, as far as any request may use them, into the prefix cache.

        The requests that go on hold ``held`` bytes. At most ``most`` tokens are copied; returns how many were.
        """
        if self.prefixes is None:
            return 0
        text, room, scope = self._reusable(sequence), self._room(held), _scope(sequence)
        with self._within_memory():
            return self.prefixes.store(sequence.cache, text, scope, version=sequence.version, room=room, most=most)
        return 0

    def write(self, sequence: Running) -> None:
        """Writes a sequence that has finished into files, with those of its keys and values that are kept."""
        if self._kept is None:
            return
        request, scope, stretches = sequence.request, _scope(sequence), list[Stretch]()
        if self.prefixes is not None:
            stretches = self.prefixes.stretches(self._reusable(sequence), scope)
        self._kept.keep(request.prompt_ids, request.output.token_ids, stretches, scope)

    def _reusable(self, sequence: Running) -> list[int]:
        """The tokens of a sequence whose keys and values any request may use."""
        request, rows = sequence.request, sequence.cache.length
        # Where rows depend on each other, those of the output are not what a prompt's would be.
        if self._grain > 1:
            rows = min(rows, len(request.prompt_ids)) // self._grain * self._grain
        return [*request.prompt_ids, *request.output.token_ids][:rows]

    def _room(self, held: int) -> int | None:
        return None if self.limit is None else self.limit - held

    @contextmanager
    def _within_memory(self) -> Iterator[None]:
        """Gives up the prefix cache where its memory is needed for requests."""
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if self.prefixes is not None:
                self.prefixes.clear()
