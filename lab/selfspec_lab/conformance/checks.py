"""The checks: each asks again what was answered alone, in a way that must not change the text."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from selfspec_lab.conformance.answer import Answer, NotSupportedError
from selfspec_lab.conformance.client import Client, together
from selfspec_lab.conformance.interfaces import Request
from selfspec_lab.conformance.server_info import accepted_drafts
from selfspec_lab.conformance.subject import Comparisons, Subject

SEEDS = (11, 12)
TEMPERATURE = 1.0

LONGER = 4
"""Times the length of an answer that a stream is to have which will be cancelled."""

PREFACE = (
    "These notes belong to the parish archive of a small island. They were copied by hand in the winter of 1911, after "
    "a leak in the roof had damaged the older volumes, and they follow the order of the shelves: births, boats, "
    "harvests, storms, letters. Where a page could not be read, the copyist left a line empty. Names of farms are "
    "spelled as the owners spelled them, which changed from one generation to the next, and sums of money are given in "
    "the coin of the year, with the price of a barrel of herring beside them, so that a reader of a later time can "
    "tell what they were worth. "
)
"""What prompts of the prefix cache have in common; longer than the blocks in which engines cache."""

SECOND_TURN = "Now say the same in fewer words."


@dataclass(frozen=True)
class Check:
    """A check.

    Attributes:
        name: of the check.
        run: asks the server, compares, and returns what was done.
        may_be_refused: whether a server may do without what the check asks for.
    """

    name: str
    run: Callable[[Subject, Comparisons], Awaitable[str]]
    may_be_refused: bool = True


def all_checks(at_once: Sequence[int]) -> list[Check]:
    """The checks, in their order.

    Args:
        at_once: numbers of requests at a time.
    """
    among = [Check(f"among {count}", partial(asked_among, count=count), may_be_refused=False) for count in at_once]
    return [
        Check("repeated", asked_again, may_be_refused=False),
        *among,
        Check("streamed", streamed),
        Check("others cancelled", others_cancelled),
        Check("prefix known", prefix_known),
        Check("second turn", second_turn),
        Check("seed", sampled_with_a_seed),
        Check("speculation", without_speculation),
    ]


async def asked_again(subject: Subject, found: Comparisons) -> str:
    """Asks every request a second time, one after the other."""
    for request, text in subject.pairs:
        await found.add(request, text, (await subject.client.ask(request)).text)
    return "each asked a second time"


async def asked_among(subject: Subject, found: Comparisons, count: int) -> str:
    """Keeps ``count`` requests running at a time: one begins whenever another ends."""
    pairs = list(subject.pairs)
    pairs *= -(-2 * count // len(pairs))  # at least twice as many as run at a time
    places = asyncio.Semaphore(count)

    async def ask(request: Request) -> Answer:
        async with places:
            return await subject.client.ask(request)

    answers = await together(ask(request) for request, _ in pairs)
    for (request, text), answer in zip(pairs, answers, strict=True):
        await found.add(request, text, answer.text)
    return f"{len(pairs)} requests, up to {count} at a time"


async def streamed(subject: Subject, found: Comparisons) -> str:
    """Reads every answer as a stream."""
    for request, text in subject.pairs:
        await found.add(request, text, (await subject.client.ask_streamed(request)).text)
    return "each asked as a stream"


async def others_cancelled(subject: Subject, found: Comparisons) -> str:
    """Asks while the connection of another request's stream is dropped, and again after that."""
    cancelled = 0
    for index, (request, text) in enumerate(subject.pairs):
        other = subject.after(index)
        longer = Request(other.interface, other.prompt, LONGER * other.max_tokens)
        both: list[Coroutine[Any, Any, Any]] = [subject.client.ask(request), subject.client.cancel(longer)]
        beside, was_running = await together(both)
        cancelled += was_running
        await found.add(request, text, beside.text)
        await found.add(request, text, (await subject.client.ask(request)).text)
    if not cancelled:
        raise NotSupportedError("no stream was still under way when two pieces of it had come")
    return f"beside and after {cancelled} streams that were dropped"


async def prefix_known(subject: Subject, found: Comparisons) -> str:
    """Asks what begins with a text that the server has just read, and what it has read as a whole."""
    cache = _CacheUse()
    for index, request in enumerate(subject.requests):
        first, other = (_prefixed(subject, f"{index}", each) for each in (request, subject.after(index)))
        unknown = await subject.client.ask(first)
        prefix = cache.hit(await subject.client.ask(other))
        await found.add(first, unknown.text, cache.hit(await subject.client.ask(first)).text)
        await found.add(other, prefix.text, cache.hit(await subject.client.ask(other)).text)
        if (cold := await subject.uncached(other)) is not None:
            await found.add(other, cache.missed(cold).text, prefix.text)
    return f"first new, then after its beginning, then after all of it; {cache.described()}"


async def second_turn(subject: Subject, found: Comparisons) -> str:
    """Goes on after answers that the server has just written."""
    cache = _CacheUse()
    for index, request in enumerate(subject.requests):
        first = _prefixed(subject, f"{index}, again", request)
        answer = await subject.client.ask(first)
        prompt = first.interface.followed(first.prompt, answer.text, SECOND_TURN)
        turn = Request(first.interface, prompt, first.max_tokens)
        text = cache.hit(await subject.client.ask(turn)).text
        await found.add(turn, text, cache.hit(await subject.client.ask(turn)).text)
        if (cold := await subject.uncached(turn)) is not None:
            await found.add(turn, cache.missed(cold).text, text)
    return f"after the answer, then again; {cache.described()}"


async def sampled_with_a_seed(subject: Subject, found: Comparisons) -> str:
    """Samples every answer twice with one seed, and once with another one, which has to matter."""
    differ = False
    for request in subject.requests:
        seeded, other = (request.having(temperature=TEMPERATURE, seed=seed) for seed in SEEDS)
        text = (await subject.client.ask(seeded)).text
        await found.add(seeded, text, (await subject.client.ask(seeded)).text)
        differ = differ or (await subject.client.ask(other)).text != text
    if not differ:
        raise NotSupportedError("other seeds give the same texts, so none of them was sampled")
    return f"temperature {TEMPERATURE:g}, each seed twice"


async def without_speculation(subject: Subject, found: Comparisons) -> str:
    """Compares with answers without speculation: of the reference, or by a field of the request."""
    reference: Client = subject.reference or subject.client
    if subject.reference is None and not subject.info.chooses_drafts:
        raise NotSupportedError("needs --reference URL, the same engine without speculation")
    plain: dict[str, object] = {} if subject.reference is not None else {"speculative": {"enabled": False}}
    before = await accepted_drafts(subject.client)
    texts = [(await subject.client.ask(request)).text for request in subject.requests]
    after = await accepted_drafts(subject.client)
    for request, text in zip(subject.requests, texts, strict=True):
        await found.add(request, (await reference.ask(request.having(**plain))).text, text)
    where = "the reference" if subject.reference is not None else "the field 'speculative'"
    if before is None or after is None:
        return f"against {where}; the server does not count accepted draft tokens"
    if after == before:
        raise NotSupportedError("the server accepted no draft token, so there was no speculation")
    return f"against {where}; {after - before:.0f} draft tokens accepted"


class _CacheUse:
    """Tokens of prompts that came from a cache, where the server says it."""

    def __init__(self) -> None:
        self._hits: list[int] = []
        self._misses: list[int] = []

    def hit(self, answer: Answer) -> Answer:
        """Counts an answer that a cache may help."""
        self._hits += [] if answer.cached_tokens is None else [answer.cached_tokens]
        return answer

    def missed(self, answer: Answer) -> Answer:
        """Counts an answer that asked for no help."""
        self._misses += [] if answer.cached_tokens is None else [answer.cached_tokens]
        return answer

    def described(self) -> str:
        """How many tokens these were.

        Raises:
            NotSupportedError: there were none, so the cache was not tried.
        """
        if not self._hits:
            return "the server does not say what its cache knew"
        if not sum(self._hits):
            raise NotSupportedError("the server took no token of a prompt from a cache")
        without = f", {sum(self._misses)} where the cache was turned off" if self._misses else ""
        return f"{sum(self._hits)} prompt tokens from the cache{without}"


def _prefixed(subject: Subject, place: str, request: Request) -> Request:
    """A request with a text before its prompt, whose beginning is new to the server."""
    preface = f"Volume {subject.salt}, {place}. {PREFACE}\n\n"
    if isinstance(request.prompt, str):
        return Request(request.interface, preface + request.prompt, request.max_tokens)
    *others, last = request.prompt
    content = preface + last["content"]
    return Request(request.interface, [*others, {**last, "content": content}], request.max_tokens)
