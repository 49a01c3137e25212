"""What interfaces have in common whose streams consist of events with names."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from selfspec.serve.api_errors import ApiError
from selfspec.serve.bodies import Bodies

_encode = json.JSONEncoder(ensure_ascii=False).encode


@dataclass(frozen=True)
class Event:
    """A body, or an event of a stream with its name."""

    name: str
    fields: dict[str, Any]

    def to_json(self) -> str:
        """The JSON of it. A model can write escapes of lone surrogates into arguments, which are no UTF-8."""
        text = _encode(self.fields)
        try:
            text.encode()
        except UnicodeEncodeError:
            return text.encode("utf-8", "replace").decode()
        return text


class JsonBodies(Bodies):
    """Bodies that are plain JSON, and events with names."""

    def failed(self, error: ApiError) -> Iterator[Event]:
        """The event of an error, after which nothing comes."""
        yield Event("error", {"type": "error", **error.body})

    def event(self, body: Event) -> str:
        """A server-sent event."""
        name = f"event: {body.name}\n" if body.name else ""
        return f"{name}data: {body.to_json()}\n\n"
