"""What Anthropic's Python client gets from a server. Runs in an environment that has it and not selfspec.

``python with_anthropic.py URL MODEL`` prints the checks as JSON.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import anthropic
from checks import Checks

URL, MODEL = sys.argv[1:]
HELLO: list[Any] = [{"role": "user", "content": "Why is the sky blue?"}]
ADD: Any = {
    "name": "add",
    "description": "Adds two numbers.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}
ASK: dict[str, Any] = {"model": MODEL, "max_tokens": 48, "extra_body": {"temperature": 0}}

check = Checks()
client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)


@check("a message, with a system text and its numbers of tokens")
def message() -> str:
    answer = client.messages.create(messages=HELLO, system="Be brief.", **ASK)
    [block] = answer.content
    assert block.type == "text"
    assert answer.stop_reason in ("end_turn", "max_tokens")
    counted = client.messages.count_tokens(model=MODEL, messages=HELLO, system="Be brief.").input_tokens
    assert counted == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
    return repr(block.text)[:80]


@check("a stream: the client's own accumulation is the whole message")
def stream() -> str:
    whole = client.messages.create(messages=HELLO, **ASK)
    with client.messages.stream(messages=HELLO, **ASK) as events:
        kinds = {event.type for event in events}
        final = events.get_final_message()
    assert final.content[0].text == whole.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    return ", ".join(sorted(kinds))


@check("asynchronous: four messages at once, each the text it gets alone")
def together() -> str:
    asked = [[{"role": "user", "content": f"Write about the number {number}."}] for number in range(4)]
    alone = [client.messages.create(messages=each, **ASK).content[0].text for each in asked]

    async def ask() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=URL, api_key="none", max_retries=0) as each:
            answers = await asyncio.gather(*(each.messages.create(messages=one, **ASK) for one in asked))
            return [answer.content[0].text for answer in answers]

    assert asyncio.run(ask()) == alone
    return f"{len(alone)} texts"


@check("a tool is called, streamed too, and its result is read back")
def tools() -> str:
    fields = {"tools": [ADD], "tool_choice": {"type": "tool", "name": "add"}, **ASK, "max_tokens": 100}
    question = [{"role": "user", "content": "What is 2 + 3?"}]
    answer = client.messages.create(messages=question, **fields)
    assert answer.stop_reason == "tool_use"
    call = next(block for block in answer.content if block.type == "tool_use")
    with client.messages.stream(messages=question, **fields) as events:
        streamed = events.get_final_message().content[-1]
    assert streamed.input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": str(call.input["a"] + call.input["b"])}
    turns = [*question, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    last = client.messages.create(messages=turns, **{**fields, "tool_choice": {"type": "none"}})
    assert last.content[0].text
    return f"{call.input}: {result['content']}"


@check("errors are the client's exceptions, and name the field")
def errors() -> str:
    for fields in ({"temperature": 3}, {"top_q": 1}, {"max_tokens": 0}):
        try:
            client.messages.create(messages=HELLO, **{**ASK, "extra_body": fields})
        except anthropic.BadRequestError as error:
            assert next(iter(fields)) in str(error)
        else:
            raise AssertionError(f"{fields} was taken")
    return "3 requests"


check.print()
