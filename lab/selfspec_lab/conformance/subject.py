"""A server under test: its answers alone, and the comparison of others with them."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal

from selfspec_lab.conformance.answer import Answer, ServerFaultError
from selfspec_lab.conformance.client import Client
from selfspec_lab.conformance.divergence import Divergence, find_divergence
from selfspec_lab.conformance.interfaces import Request
from selfspec_lab.conformance.server_info import ServerInfo

Status = Literal["passed", "diverged", "not supported", "failed"]


@dataclass(frozen=True)
class Outcome:
    """What came of a check.

    Attributes:
        status: ``not supported`` if the server refuses what the check needs, ``failed`` if it did not answer.
        detail: what was done, or why nothing was.
        compared: how many texts were compared.
        divergences: those that were not the same.
    """

    status: Status
    detail: str
    compared: int = 0
    divergences: tuple[Divergence, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**vars(self), "divergences": [each.to_dict() for each in self.divergences]}


@dataclass
class Subject:
    """A server, asked by one of the interfaces.

    Attributes:
        client: asks the server.
        info: what it is.
        reference: asks the same engine without speculation; ``None`` without such a server.
        requests: what is asked, greedily.
        texts: the answers when they were asked alone, one after the other.
        salt: a word of this run; prompts that begin with it are in no cache.
    """

    client: Client
    info: ServerInfo
    reference: Client | None
    requests: Sequence[Request]
    texts: Sequence[str]
    salt: str
    _scored: dict[str, Answer | None] = field(default_factory=dict)
    _uncached: tuple[str, ...] | None = None
    _salts: Iterator[int] = field(default_factory=count)

    @property
    def pairs(self) -> Iterator[tuple[Request, str]]:
        """Requests with their texts alone."""
        return zip(self.requests, self.texts, strict=True)

    def after(self, index: int) -> Request:
        """The request after one, in a circle."""
        return self.requests[(index + 1) % len(self.requests)]

    async def divergence(self, request: Request, expected: str, found: str) -> Divergence | None:
        """Compares two answers to a request; where they differ, asks for log-probabilities."""
        if expected == found:
            return None
        return find_divergence(request.prompt, expected, found, await self._score(request))

    async def uncached(self, request: Request) -> Answer | None:
        """The answer without what the server knows of the prompt; ``None`` if it refuses the fields for that."""
        if self._uncached is None:
            self._uncached = await self._find_uncached()
        return await self.client.ask(self._without_cache(request, self._uncached)) if self._uncached else None

    def _without_cache(self, request: Request, names: Sequence[str]) -> Request:
        values = {"cache_salt": f"{self.salt}-{next(self._salts)}", "cache_prompt": False}
        return request.having(**{name: values[name] for name in names})

    async def _find_uncached(self) -> tuple[str, ...]:
        """The fields that turn the prefix cache off (of vLLM and selfspec, and of llama.cpp), less those refused."""
        for names in (("cache_salt", "cache_prompt"), ("cache_salt",)):
            try:
                await self.client.ask(self._without_cache(self.requests[0], names))
            except ServerFaultError as fault:
                if not fault.refused:
                    raise
            else:
                return names
        return ()

    async def _score(self, request: Request) -> Answer | None:
        """The answer to a request with log-probabilities; ``None`` if the server does not give any."""
        key = json.dumps(request.body(self.client.model))
        if key not in self._scored:
            try:
                self._scored[key] = await self.client.ask(request.having(**request.interface.logprobs))
            except ServerFaultError:
                self._scored[key] = None
        return self._scored[key]


class Comparisons:
    """Texts that a check compares.

    Args:
        subject: the server under test.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._count = 0
        self._found: list[Divergence] = []

    async def add(self, request: Request, expected: str, found: str) -> None:
        """Compares two answers to a request."""
        self._count += 1
        divergence = await self._subject.divergence(request, expected, found)
        if divergence is not None:
            self._found.append(divergence)

    def outcome(self, otherwise: Status, detail: str) -> Outcome:
        """Diverged if a text was another one; ``otherwise`` if none was."""
        return Outcome("diverged" if self._found else otherwise, detail, self._count, tuple(self._found))
