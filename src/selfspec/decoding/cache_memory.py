"""The memory of keys and values: of requests that run, and of earlier texts in a prefix cache."""

from selfspec.decoding.chunks import Chunks
from selfspec.decoding.prefix_cache import PrefixCache
from selfspec.decoding.request import Request
from selfspec.decoding.sequence import Sequence
from selfspec.errors import RequestTooLargeError
from selfspec.limits import is_out_of_memory
from selfspec.runtimes.target import Target


class CacheMemory:
    """Which requests fit, and which keys and values of their prompts are known.

    Attributes:
        limit: most bytes that requests and prefix cache hold together; ``None`` for any.
        prefixes: keys and values of earlier texts; ``None`` keeps none.
    """

    def __init__(
        self, target: Target, chunks: Chunks, limit: int | None = None, prefixes: PrefixCache | None = None
    ) -> None:
        self.limit = limit
        self.prefixes = prefixes if target.keys_depend_on_position_alone else None
        self._target = target
        self._chunks = chunks

    def check(self, request: Request) -> None:
        """Refuses a request that could never be admitted.

        Raises:
            RequestTooLargeError: it needs more memory than there is for all requests together.
        """
        needed = request.bytes(self._target)
        if self.limit is None or needed <= self.limit:
            return
        most = request.max_new_tokens - -(-(needed - self.limit) // (self._target.slot_bytes + 8))
        remedy = f"ask for at most {most} new tokens" if most > 0 else "shorten the prompt"
        raise RequestTooLargeError(
            f"a prompt of {len(request.prompt_ids)} tokens and {request.max_new_tokens} new ones need "
            f"{needed / 2**20:.1f} MiB for keys and values, and there are {self.limit / 2**20:.1f} MiB for all "
            f"requests; {remedy}, or raise the memory limit"
        )

    def admits(self, request: Request, held: int) -> bool:
        """Whether a request fits beside others that hold ``held`` bytes; the prefix cache makes room for it.

        One that does not fit even alone is admitted, for ``check`` to refuse.
        """
        needed = request.bytes(self._target)
        if self.limit is None or needed > self.limit:
            return True
        left = self.limit - held - needed
        if left >= 0 and self.prefixes is not None and self.prefixes.bytes > left:
            self.prefixes.touch(request.prompt_ids)  # what it begins with goes last
            self.prefixes.shrink(left)
        return left >= 0

    def fill(self, sequence: Sequence) -> None:
        """Copies known keys and values of a prompt that is not read to its end."""
        if self.prefixes is None:
            return
        known = sequence.request.prompt_ids[: sequence.reusable]
        state = sequence.state
        sequence.cached_tokens += self.prefixes.fill(
            state.cache, known, long_rope=state.long_rope, grain=self._chunks.grain
        )

    def count(self, sequence: Sequence) -> None:
        """Counts how much of a prompt that is read was known."""
        if self.prefixes is not None:
            self.prefixes.count(len(sequence.request.prompt_ids), sequence.cached_tokens)

    def keep(self, sequence: Sequence, held: int) -> None:
        """Copies keys and values of a sequence, as far as any request may use them, into the prefix cache.

        The requests that go on hold ``held`` bytes.
        """
        if self.prefixes is None:
            return
        state, request = sequence.state, sequence.request
        # Where rows depend on each other, those of the output are not what a prompt's would be.
        rows = state.cache.length if self._chunks.grain == 1 else min(state.cache.length, len(request.prompt_ids))
        text = [*request.prompt_ids, *request.output.token_ids][: self._chunks.whole(rows)]
        room = None if self.limit is None else self.limit - held
        try:
            self.prefixes.store(state.cache, text, version=sequence.version, long_rope=state.long_rope, room=room)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self.prefixes.clear()  # the memory is needed for requests
