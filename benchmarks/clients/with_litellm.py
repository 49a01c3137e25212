"""What ``litellm`` gets from a server. Runs in an environment that has it and not selfspec.

``python with_litellm.py URL MODEL`` prints the checks as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # asks nobody else

import litellm
from checks import Checks

URL, MODEL = sys.argv[1:]
HELLO = [{"role": "user", "content": "Why is the sky blue?"}]
OPENAI: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none", "num_retries": 0}
ANTHROPIC: dict[str, Any] = {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": "none", "num_retries": 0}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 48}
PARAMETERS = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}

check = Checks()


@check("a chat by OpenAI's interface, and its stream")
def chat() -> str:
    text = litellm.completion(messages=HELLO, **OPENAI, **GREEDY).choices[0].message.content
    chunks = litellm.completion(messages=HELLO, stream=True, **OPENAI, **GREEDY)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    return repr(text)[:80]


@check("the same by Anthropic's interface")
def messages() -> str:
    text = litellm.completion(messages=HELLO, **ANTHROPIC, **GREEDY).choices[0].message.content
    assert text == litellm.completion(messages=HELLO, **OPENAI, **GREEDY).choices[0].message.content
    chunks = litellm.completion(messages=HELLO, stream=True, **ANTHROPIC, **GREEDY)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    return repr(text)[:80]


@check("responses")
def responses() -> str:
    answer = litellm.responses(input="Why is the sky blue?", temperature=0, max_output_tokens=48, **OPENAI)
    text = answer.output[0].content[0].text
    assert text == litellm.completion(messages=HELLO, **OPENAI, **GREEDY).choices[0].message.content
    return repr(text)[:80]


@check("a tool is called by both interfaces, and its result is read back")
def tools() -> str:
    made = []
    for interface in (OPENAI, ANTHROPIC):
        choice = {"type": "function", "function": {"name": "weather"}}
        answer = litellm.completion(messages=HELLO, tools=[TOOL], tool_choice=choice, **interface, **GREEDY)
        message = answer.choices[0].message
        [call] = message.tool_calls
        made.append((call.function.name, json.loads(call.function.arguments)["city"]))
        result = {"role": "tool", "tool_call_id": call.id, "content": "It rains."}
        turns = [*HELLO, message.model_dump(exclude_none=True), result]
        assert litellm.completion(messages=turns, tools=[TOOL], **interface, **GREEDY).choices[0].message is not None
    assert made[0] == made[1]
    return str(made[0])


check.print()
