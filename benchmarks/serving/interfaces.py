"""Clients of the soak at the other interfaces, and clients that want tools to be called or JSON of a schema."""

from __future__ import annotations

import json
from typing import Any

from serving.clients import PATH, Client, Outcome, Task, read_stream, refused, same
from serving.http import Reply, request

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
NAME = "pick"
PARAMETERS = {
    "type": "object",
    "properties": {"number": {"enum": [1, 2]}, "sure": {"type": "boolean"}},
    "required": ["number", "sure"],
    "additionalProperties": False,
}
_ROOM = 400
"""Tokens that are enough for any call or object of the schema, spaces included."""


async def message(task: Task) -> Outcome:
    """Asks ``/v1/messages`` for a whole answer."""
    async with request(task.server, "POST", MESSAGES, _message(task)) as reply:
        body = await _json(reply)
    if isinstance(body, Outcome):
        return body
    return same("".join(block["text"] for block in body["content"]), task, 200)


async def message_stream(task: Task) -> Outcome:
    """Reads a stream of ``/v1/messages``."""
    texts, ended = [], False
    async with request(task.server, "POST", MESSAGES, _message(task, stream=True)) as reply:
        if reply.status != 200:
            return await refused(reply)
        async for data in reply.events():
            event = json.loads(data)
            texts.append(event["delta"]["text"] if event["type"] == "content_block_delta" else "")
            ended = ended or event["type"] == "message_stop"
    return same("".join(texts), task, 200) if ended else Outcome(False, "the stream has no end", 200)


async def response(task: Task) -> Outcome:
    """Asks ``/v1/responses`` for a whole answer."""
    async with request(task.server, "POST", RESPONSES, _response(task)) as reply:
        body = await _json(reply)
    return body if isinstance(body, Outcome) else same(_text(body), task, 200)


async def response_stream(task: Task) -> Outcome:
    """Reads a stream of ``/v1/responses``, whose last event has the whole answer again."""
    texts, last = [], None
    async with request(task.server, "POST", RESPONSES, _response(task, stream=True)) as reply:
        if reply.status != 200:
            return await refused(reply)
        async for data in reply.events():
            event = json.loads(data)
            texts.append(event["delta"] if event["type"] == "response.output_text.delta" else "")
            last = event.get("response") if event["type"] in ("response.completed", "response.incomplete") else last
    if last is None or _text(last) != "".join(texts):
        return Outcome(False, "the stream has no end, or the end has another text", 200)
    return same("".join(texts), task, 200)


async def schema(task: Task) -> Outcome:
    """Asks for JSON of a schema."""
    form = {"type": "json_schema", "json_schema": {"name": NAME, "schema": PARAMETERS}}
    body = task.chat.body(task.server.model, max_tokens=_ROOM, response_format=form)
    async with request(task.server, "POST", PATH, body) as reply:
        if reply.status != 200:
            return await refused(reply)
        text, _ = await read_stream(reply)
    return _fits(text, task, "schema")


async def tool(task: Task) -> Outcome:
    """Has a tool called in a chat."""
    function = {"type": "function", "function": {"name": NAME, "parameters": PARAMETERS}}
    fields: dict[str, Any] = {"tools": [function], "tool_choice": "required", "stream": False, "stream_options": None}
    async with request(
        task.server, "POST", PATH, task.chat.body(task.server.model, max_tokens=_ROOM, **fields)
    ) as reply:
        body = await _json(reply)
    if isinstance(body, Outcome):
        return body
    calls = body["choices"][0]["message"].get("tool_calls") or []
    return _called([(call["function"]["name"], call["function"]["arguments"]) for call in calls], task)


async def message_tool(task: Task) -> Outcome:
    """Has a tool called in a stream of ``/v1/messages``."""
    tools = {"tools": [{"name": NAME, "input_schema": PARAMETERS}], "tool_choice": {"type": "any"}}
    names, texts = [], []
    async with request(task.server, "POST", MESSAGES, _message(task, stream=True, max_tokens=_ROOM, **tools)) as reply:
        if reply.status != 200:
            return await refused(reply)
        async for data in reply.events():
            event = json.loads(data)
            if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
                names.append(event["content_block"]["name"])
            elif event["type"] == "content_block_delta":
                texts.append(event["delta"].get("partial_json", ""))
    return _called([(name, "".join(texts)) for name in names], task)


async def response_tool(task: Task) -> Outcome:
    """Has a tool called in ``/v1/responses``."""
    tools = {"tools": [{"type": "function", "name": NAME, "parameters": PARAMETERS}], "tool_choice": "required"}
    async with request(task.server, "POST", RESPONSES, _response(task, max_output_tokens=_ROOM, **tools)) as reply:
        body = await _json(reply)
    if isinstance(body, Outcome):
        return body
    return _called([(item["name"], item["arguments"]) for item in body["output"]], task)


INTERFACES: dict[Client, int] = {
    **{message: 6, message_stream: 6, response: 6, response_stream: 6},
    **{schema: 4, tool: 3, message_tool: 3, response_tool: 3},
}
"""These clients, with their shares. They ask for greedy answers: two of the interfaces have no seeds."""


def _message(task: Task, **fields: Any) -> bytes:
    turns = [{"role": "user", "content": task.chat.prompt}]
    asked = {"model": task.server.model, "messages": turns, "max_tokens": task.chat.new_tokens, "temperature": 0}
    return json.dumps({**asked, **fields}).encode()


def _response(task: Task, **fields: Any) -> bytes:
    asked = {"model": task.server.model, "input": task.chat.prompt, "temperature": 0}
    return json.dumps({**asked, "max_output_tokens": task.chat.new_tokens, **fields}).encode()


async def _json(reply: Reply) -> dict[str, Any] | Outcome:
    if reply.status != 200:
        return await refused(reply)
    found: dict[str, Any] = json.loads(await reply.body())
    return found


def _text(body: dict[str, Any]) -> str:
    return "".join(part["text"] for item in body["output"] for part in item["content"])


def _called(calls: list[tuple[str, str]], task: Task) -> Outcome:
    if [name for name, _ in calls] != [NAME]:
        return Outcome(False, f"calls {calls}", 200)
    return _fits(calls[0][1], task, "call")


def _fits(text: str, task: Task, kind: str) -> Outcome:
    """Whether a text is of the schema, and what was answered to the same request before."""
    found = json.loads(text)
    if set(found) != {"number", "sure"} or found["number"] not in (1, 2) or found["sure"] not in (True, False):
        return Outcome(False, f"not of the schema: {text}", 200)
    first = task.seen.setdefault((kind, task.chat.prompt), found)
    return Outcome(found == first, f"{found}, and before it was {first}", 200)
