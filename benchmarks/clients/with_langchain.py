"""What ``langchain-openai`` gets from a server. Runs in an environment that has it and not selfspec.

``python with_langchain.py URL MODEL`` prints the checks as JSON.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any, Literal

from checks import Checks
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]
SETTINGS: dict[str, Any] = {
    "base_url": f"{URL}/v1",
    "api_key": "none",
    "model": MODEL,
    "temperature": 0,
    "max_retries": 0,
}
PROMPTS = ["Why is the sky blue?", "Name three animals that can fly.", "List the days of the week.", "What is ice?"]

check = Checks()
chat = ChatOpenAI(**SETTINGS, max_tokens=48)


@check("invoke, with usage")
def invoke() -> str:
    answer = chat.invoke(PROMPTS[0])
    assert answer.text
    assert answer.usage_metadata["output_tokens"] > 0
    assert answer.response_metadata["finish_reason"] in ("stop", "length")
    return repr(answer.text)[:80]


@check("stream: the text of invoke")
def stream() -> str:
    chunks = list(chat.stream(PROMPTS[1]))
    assert "".join(chunk.text for chunk in chunks) == chat.invoke(PROMPTS[1]).text
    return f"{len(chunks)} chunks"


@check("batch, synchronous and asynchronous: the texts of invoke")
def batch() -> str:
    alone = [chat.invoke(prompt).text for prompt in PROMPTS]
    assert [answer.text for answer in chat.batch(PROMPTS)] == alone
    assert [answer.text for answer in asyncio.run(chat.abatch(PROMPTS))] == alone
    return f"{len(alone)} prompts"


@check("a chain of a prompt template, the model and a parser")
def chain() -> str:
    template = ChatPromptTemplate.from_messages([("system", "Answer in one word."), ("user", "{question}")])
    text = (template | chat.bind(stop=["\n"]) | StrOutputParser()).invoke({"question": PROMPTS[3]})
    assert text
    assert "\n" not in text
    return repr(text)[:80]


@check("log-probabilities in the answer's metadata")
def logprobs() -> str:
    answer = chat.bind(logprobs=True, top_logprobs=2).invoke(PROMPTS[0])
    content = answer.response_metadata["logprobs"]["content"]
    assert len(content) >= answer.usage_metadata["output_tokens"] - 1
    assert all(len(each["top_logprobs"]) == 2 for each in content)
    return f"{len(content)} tokens"


@check("structured output, by the schema of a pydantic class")
def structured() -> str:
    class Verdict(BaseModel):
        sentiment: Literal["positive", "negative"]
        is_question: bool

    model = ChatOpenAI(**SETTINGS, max_tokens=200)
    found = model.with_structured_output(Verdict, method="json_schema").invoke("I love this book.")
    assert isinstance(found, Verdict)
    return str(found)


@check("a tool is called, and its result is read back")
def tools() -> str:
    @tool
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    model = ChatOpenAI(**SETTINGS, max_tokens=100)
    question = HumanMessage("What is 2 + 3?")
    call = model.bind_tools([add], tool_choice="add").invoke([question])
    [asked] = call.tool_calls
    result = add.invoke(asked)
    assert isinstance(result, ToolMessage)
    assert int(result.content) == asked["args"]["a"] + asked["args"]["b"]
    answer = model.bind_tools([add], tool_choice="none").invoke([question, call, result])
    assert answer.text
    streamed = list(model.bind_tools([add], tool_choice="add").stream([question]))
    whole = streamed[0]
    for chunk in streamed[1:]:
        whole += chunk
    assert [each["args"] for each in whole.tool_calls] == [asked["args"]]
    return f"{asked['args']}: {result.content}"


@check("completions: the class for text")
def completion() -> str:
    text = OpenAI(**SETTINGS, max_tokens=24).invoke("The capital of France is")
    assert text
    return repr(text)


check.print()
