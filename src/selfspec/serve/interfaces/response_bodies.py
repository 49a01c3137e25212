"""From answers to the bodies and events of ``/v1/responses``."""

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from selfspec.serve.answer import Answer, Block, Growth
from selfspec.serve.answer_bodies import Usage, cached_tokens
from selfspec.serve.api_errors import ApiError
from selfspec.serve.bodies import Bodies, SentEvent
from selfspec.serve.reader import Prepared
from selfspec.types import TextPiece

_PREFIXES = {"call": "fc", "reasoning": "rs", "text": "msg"}


@dataclass(slots=True)
class _WithResponse(SentEvent):
    """A response, or an event that ends with one. What it repeats of its request is JSON already."""

    repeated: str = "{}"

    def to_json(self) -> str:
        """See ``SentEvent``."""
        ends = "}}" if self.name else "}"
        return f"{SentEvent.to_json(self).removesuffix(ends)}, {self.repeated.removeprefix('{')}{ends[1:]}"


class ResponseBodies(Bodies):
    """The bodies of a response. Its items are the blocks of the answer: reasoning, messages and calls."""

    def __init__(self, read: Prepared, model: str, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(read, model, tokenizer)
        self._repeated, self._namespaces = read.repeated, read.namespaces
        self._head = {"id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": int(time.time())}
        self._number = 0
        self._ids: list[str] = []  # of the items so far
        self._open: Block | None = None
        self._answer: Answer | None = None  # the one that is streamed

    def whole(self, answers: Sequence[Answer], usage: Usage) -> SentEvent:
        """The body that is not a stream."""
        [answer] = answers
        return _WithResponse(self._ended(answer, usage), repeated=self._repeated)

    def start(self, usage: Usage) -> Iterator[SentEvent]:
        """The events that a stream begins with."""
        response = self._response("in_progress")
        yield self._with_response("response.created", response)
        yield self._with_response("response.in_progress", response)

    def first(self, answer: Answer) -> Iterator[SentEvent]:
        """An answer begins with its first item."""
        self._answer = answer
        return iter(())

    def ping(self) -> str:
        """What says in a stream that it is alive: this interface has no other event for that."""
        return self.event(self._with_response("response.in_progress", self._response("in_progress")))

    def chunk(self, answer: Answer, pieces: Sequence[TextPiece], grown: Sequence[Growth]) -> Iterator[SentEvent]:
        """The events of what some pieces add."""
        for growth in grown:
            block = growth.block
            if growth.began:
                yield from self._close(answer)
                self._open = block
                item = self._item(growth.index, block, "in_progress")
                yield self._event("response.output_item.added", output_index=growth.index, item=item)
                if block.kind != "call":
                    yield self._part_event("response.content_part.added", growth.index, part=_part(block.kind, ""))
            if growth.text and block.kind == "call":
                yield self._item_event("response.function_call_arguments.delta", growth.index, delta=growth.text)
            elif growth.text:
                more: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
                yield self._part_event(f"response.{_kind(block)}.delta", growth.index, delta=growth.text, **more)

    def last(self, answer: Answer) -> Iterator[SentEvent]:
        """The events that end the last item."""
        return self._close(answer)

    def end(self, answers: Sequence[Answer], usage: Usage) -> Iterator[SentEvent]:
        """The event with the whole response."""
        [answer] = answers
        response = self._ended(answer, usage)
        yield self._with_response(f"response.{response['status']}", response)

    def failed(self, error: ApiError) -> Iterator[SentEvent]:
        """The event of an error, and the one with the response so far, after which nothing comes."""
        said = error.body["error"]
        yield self._event("error", code=said["code"], message=said["message"], param=said["param"])
        blocks = [] if self._answer is None else self._answer.blocks
        items = [
            self._item(index, block, "incomplete" if block is self._open else "completed")
            for index, block in enumerate(blocks)
        ]
        # The API lists the codes that may be here; these two of them fit what can fail on the way.
        code = "invalid_prompt" if error.status == 400 else "server_error"
        failure = {"code": code, "message": said["message"]}
        yield self._with_response("response.failed", self._response("failed", items, error=failure))

    def _close(self, answer: Answer) -> Iterator[SentEvent]:
        block, self._open = self._open, None
        if block is None:
            return
        index = len(self._ids) - 1
        if block.kind == "call":
            done = {"arguments": block.text, "name": self._called(block)["name"]}
            yield self._item_event("response.function_call_arguments.done", index, **done)
        else:
            more: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
            yield self._part_event(f"response.{_kind(block)}.done", index, text=block.text, **more)
            yield self._part_event("response.content_part.done", index, part=_part(block.kind, block.text))
        item = self._item(index, block, _status(answer, index))
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _called(self, block: Block) -> dict[str, str]:
        """The name of a tool that is called, and its namespace if it has one."""
        if block.name not in self._namespaces:
            return {"name": block.name}
        namespace, name = self._namespaces[block.name]
        return {"name": name, "namespace": namespace}

    def _event(self, name: str, /, **fields: Any) -> SentEvent:
        number, self._number = self._number, self._number + 1
        return SentEvent({"type": name, "sequence_number": number, **fields}, name)

    def _with_response(self, name: str, response: dict[str, Any]) -> SentEvent:
        return _WithResponse(self._event(name, response=response).fields, name, self._repeated)

    def _item_event(self, name: str, index: int, /, **fields: Any) -> SentEvent:
        return self._event(name, item_id=self._ids[index], output_index=index, **fields)

    def _part_event(self, name: str, index: int, /, **fields: Any) -> SentEvent:
        return self._item_event(name, index, content_index=0, **fields)

    def _item(self, index: int, block: Block, status: str) -> dict[str, Any]:
        """An item; while it is in progress, with nothing in it."""
        while len(self._ids) <= index:
            self._ids.append(f"{_PREFIXES[block.kind]}_{uuid.uuid4().hex}")
        text, head = block.text if status != "in_progress" else "", {"id": self._ids[index], "status": status}
        content = [] if status == "in_progress" else [_part(block.kind, text)]
        if block.kind == "call":
            return {**head, "type": "function_call", "call_id": block.id, **self._called(block), "arguments": text}
        if block.kind == "reasoning":
            return {**head, "type": "reasoning", "summary": [], "content": content}
        return {**head, "type": "message", "role": "assistant", "content": content}

    def _ended(self, answer: Answer, usage: Usage) -> dict[str, Any]:
        """The whole response."""
        items = [self._item(index, block, _status(answer, index)) for index, block in enumerate(answer.blocks)]
        if answer.finish_reason == "length":
            details = {"reason": "max_output_tokens"}
            return self._response("incomplete", items, incomplete_details=details, usage=_usage(usage))
        return self._response("completed", items, completed_at=int(time.time()), usage=_usage(usage))

    def _response(self, status: str, items: Sequence[Any] = (), **fields: Any) -> dict[str, Any]:
        """A response with a status, the items so far, and what its status has."""
        return {
            **self._head,
            "model": self._model,
            "status": status,
            "background": False,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "output": list(items),
            "previous_response_id": None,
            "store": False,
            "usage": None,
            "truncation": "disabled",
            **fields,
        }


def _kind(block: Block) -> str:
    return "output_text" if block.kind == "text" else "reasoning_text"


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _status(answer: Answer, index: int) -> str:
    """The status of an item that has ended: the last one can have been cut off."""
    is_last = index == len(answer.blocks) - 1 and answer.result is not None
    return "incomplete" if is_last and answer.finish_reason == "length" else "completed"


def _usage(usage: Usage) -> dict[str, Any]:
    reasoning = usage["completion_tokens_details"]["reasoning_tokens"] if "completion_tokens_details" in usage else 0
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached_tokens(usage), "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": usage["total_tokens"],
    }
