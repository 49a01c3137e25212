"""What interfaces have in common whose streams consist of events with names."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from selfspec.serve.answer import Answer
from selfspec.serve.api_errors import ApiError
from selfspec.serve.responses import Usage


@dataclass(frozen=True)
class Event:
    """A body, or an event of a stream with its name."""

    name: str
    fields: dict[str, Any]

    def to_json(self) -> str:
        """The JSON of it. A model can write escapes of lone surrogates into arguments, which are no UTF-8."""
        return json.dumps(self.fields, ensure_ascii=False).encode("utf-8", "replace").decode("utf-8")


class JsonBodies:
    """Bodies that are plain JSON, and events with names; nothing is sent for what a subclass does not define."""

    done = ""
    """What a stream ends with."""

    def start(self, usage: Usage) -> Iterator[Event]:
        """The events that a stream begins with."""
        return iter(())

    def first(self, answer: Answer) -> Iterator[Event]:
        """The events that an answer begins with."""
        return iter(())

    def last(self, answer: Answer) -> Iterator[Event]:
        """The events that an answer ends with."""
        return iter(())

    def end(self, answers: Sequence[Answer], usage: Usage) -> Iterator[Event]:
        """The events after all answers."""
        return iter(())

    def failed(self, error: ApiError) -> Event:
        """The event of an error, after which nothing comes."""
        return Event("error", {"type": "error", **error.body})

    @staticmethod
    def event(body: Event) -> str:
        """A server-sent event."""
        name = f"event: {body.name}\n" if body.name else ""
        return f"{name}data: {body.to_json()}\n\n"
