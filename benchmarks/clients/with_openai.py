"""What OpenAI's Python client gets from a server. Runs in an environment that has the client and not selfspec.

``python with_openai.py URL MODEL`` prints the checks as JSON.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from typing import Any, Literal
from urllib.request import urlopen

import openai
from checks import Checks
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]
PROMPTS = [
    "Why is the sky blue?",
    "Name three animals that can fly.",
    "Write a short poem about rain.",
    "Explain to a child what a computer does.",
    "List the days of the week.",
    "What is the difference between a lake and a sea?",
    "Count from one to twenty in words.",
    "Repeat this sentence five times: the cat sat on the mat.",
]
BEGINNINGS = ["Once upon a time", "The best thing about summer is", "In the middle of the night"]
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 64}
PLAIN = {"speculative": {"enabled": False, "report": True}}
REPORT = {"speculative": {"report": True}}
STRICT = {"base_url": f"{URL}/v1", "api_key": "none", "max_retries": 0}

check = Checks()
client = openai.OpenAI(**STRICT, _strict_response_validation=True)
lenient = openai.OpenAI(**STRICT)  # strict types of completions forbid nulls that OpenAI's own interface sends


def chat(prompt: str) -> list[Any]:
    return [{"role": "user", "content": prompt}]


def running() -> float:
    with urlopen(f"{URL}/metrics") as answer:
        found = re.findall(r"^vllm:num_requests_running\{.*\} (\S+)$", answer.read().decode(), re.MULTILINE)
    return sum(map(float, found))


@check("the model is listed and found by its name")
def models() -> str:
    listed = [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id in listed
    return ", ".join(listed)


@check("greedy chats: the text with drafts is the text without")
def drafts() -> str:
    drafted = accepted = 0
    for prompt in PROMPTS:
        answer = client.chat.completions.create(messages=chat(prompt), extra_body=REPORT, **GREEDY)
        plain = client.chat.completions.create(messages=chat(prompt), extra_body=PLAIN, **GREEDY)
        assert answer.choices[0].message.content == plain.choices[0].message.content, prompt
        assert answer.usage.completion_tokens == plain.usage.completion_tokens
        assert plain.selfspec["drafted_tokens"] == 0
        drafted, accepted = drafted + answer.selfspec["drafted_tokens"], accepted + answer.selfspec["accepted_tokens"]
    assert accepted > 0
    return f"{len(PROMPTS)} chats, {accepted} of {drafted} drafted tokens accepted"


@check("sampled chats with a seed: the text with drafts is the text without")
def seeds() -> str:
    for seed, prompt in enumerate(PROMPTS):
        ask = {
            "model": MODEL,
            "messages": chat(prompt),
            "max_tokens": 48,
            "temperature": 0.8,
            "top_p": 0.9,
            "seed": seed,
        }
        texts = {
            client.chat.completions.create(**ask, extra_body=each).choices[0].message.content
            for each in (REPORT, PLAIN)
        }
        assert len(texts) == 1, prompt
    return f"{len(PROMPTS)} chats at temperature 0.8"


@check("streamed chats: the text of the whole answer, with usage")
def streams() -> str:
    count = 0
    for prompt in PROMPTS[:3]:
        stream = client.chat.completions.create(
            messages=chat(prompt), stream=True, stream_options={"include_usage": True}, **GREEDY
        )
        *chunks, last = list(stream)
        whole = client.chat.completions.create(messages=chat(prompt), **GREEDY)
        assert "".join(each.choices[0].delta.content or "" for each in chunks) == whole.choices[0].message.content
        assert last.usage.completion_tokens == whole.usage.completion_tokens
        count += len(chunks)
    return f"{count} chunks"


@check("the client's own accumulation of a stream, with log-probabilities")
def accumulated() -> str:
    ask: dict[str, Any] = {**GREEDY, "messages": chat(PROMPTS[0]), "max_tokens": 400, "stop": "."}
    with client.chat.completions.stream(logprobs=True, top_logprobs=3, **ask) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion().choices[0]
    assert final.message.content == client.chat.completions.create(**ask).choices[0].message.content
    assert all(token.top_logprobs[0].token == token.token for token in final.logprobs.content)
    return ", ".join(sorted(kinds))


@check("asynchronous: eight chats at once, each the text it gets alone")
def together() -> str:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(**STRICT, _strict_response_validation=True) as each:
            asked = (each.chat.completions.create(messages=chat(prompt), **GREEDY) for prompt in PROMPTS)
            return [answer.choices[0].message.content or "" for answer in await asyncio.gather(*asked)]

    alone = [
        client.chat.completions.create(messages=chat(each), **GREEDY).choices[0].message.content for each in PROMPTS
    ]
    assert asyncio.run(ask()) == alone
    return f"{len(alone)} texts"


@check("completions: several prompts, n, seed, echo, stop, streams")
def completions() -> str:
    ask: dict[str, Any] = {"model": MODEL, "prompt": BEGINNINGS, "n": 2, "seed": 5, "max_tokens": 20, "temperature": 1}
    texts = [[choice.text for choice in client.completions.create(**ask).choices] for _ in range(2)]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == len(texts[0]) == 6
    streamed = [""] * 6
    for chunk in lenient.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts[0]
    echoed = client.completions.create(**{**ask, "echo": True})
    assert [choice.text for choice in echoed.choices] == [
        BEGINNINGS[index // 2] + text for index, text in enumerate(texts[0])
    ]
    stopped = client.completions.create(model=MODEL, prompt="1, 2, 3, 4, 5,", max_tokens=40, temperature=0, stop=" 9")
    assert " 9" not in stopped.choices[0].text
    assert stopped.choices[0].finish_reason == "stop"
    return f"stopped at {stopped.choices[0].text!r}"


@check("log-probabilities of a prompt and of its continuation")
def logprobs() -> str:
    ask: dict[str, Any] = {
        "model": MODEL,
        "prompt": PROMPTS[3],
        "max_tokens": 8,
        "echo": True,
        "logprobs": 5,
        "temperature": 0,
    }
    told = [lenient.completions.create(**ask, extra_body=each).choices[0].logprobs for each in (REPORT, PLAIN)]
    assert told[0].tokens == told[1].tokens
    assert told[0].token_logprobs[0] is None
    largest = max(abs(a - b) for a, b in zip(told[0].token_logprobs[1:], told[1].token_logprobs[1:], strict=True))
    assert largest < 1e-4
    return f"{len(told[0].tokens)} tokens; with and without drafts they differ by at most {largest:.1e}"


@check("an answer in the form of a pydantic class")
def form() -> str:
    class Animal(BaseModel):
        name: str
        legs: int
        kind: Literal["mammal", "bird", "fish", "insect"]

    parsed = client.chat.completions.parse(
        model=MODEL, messages=chat("Describe a spider."), response_format=Animal, temperature=0, max_tokens=120
    )
    assert isinstance(parsed.choices[0].message.parsed, Animal)
    return str(parsed.choices[0].message.parsed)


@check("any JSON object")
def json_object() -> str:
    answer = client.chat.completions.create(
        messages=chat("Give me JSON about Paris."), response_format={"type": "json_object"}, stop=["}"], **GREEDY
    )
    assert (answer.choices[0].message.content or "").lstrip().startswith("{")
    return repr(answer.choices[0].message.content)[:120]


@check("tools are refused by name: the template of this model knows none")
def tools() -> str:
    tool: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    try:
        client.chat.completions.create(messages=chat("1 + 1?"), tools=[tool], **GREEDY)
    except openai.BadRequestError as error:
        assert error.param == "tools"
        return str(error.body["message"])  # type: ignore[index]
    raise AssertionError("they were taken")


@check("responses: the text of the chat, also as a stream; they are sent back")
def responses() -> str:
    ask: dict[str, Any] = {"model": MODEL, "input": PROMPTS[0], "temperature": 0, "max_output_tokens": 48}
    text = client.chat.completions.create(messages=chat(PROMPTS[0]), **{**GREEDY, "max_tokens": 48}).choices[0]
    whole = client.responses.create(**ask)
    assert whole.output_text == text.message.content
    with client.responses.stream(**ask) as stream:
        events = list(stream)
    kinds, final = {event.type for event in events}, events[-1].response  # incomplete, after as many tokens
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert final.output_text == whole.output_text
    assert final.usage.output_tokens == whole.usage.output_tokens
    again = [{"role": "user", "content": PROMPTS[0]}, *final.output, {"role": "user", "content": "Why?"}]
    assert client.responses.create(**{**ask, "input": again}).output_text
    return ", ".join(sorted(kinds))


@check("errors are the client's exceptions, and name the field")
def errors() -> str:
    wrong: list[tuple[type[openai.APIStatusError], dict[str, Any], str | None]] = [
        (openai.BadRequestError, {"temperature": 3}, "temperature"),
        (openai.BadRequestError, {"max_tokens": 10**6}, "max_tokens"),
        (openai.BadRequestError, {"messages": [{"role": "user"}]}, "messages[0]"),
        (openai.BadRequestError, {"extra_body": {"top_q": 1}}, "top_q"),
        (openai.BadRequestError, {"logit_bias": {"9999999": 1}}, "logit_bias"),
        (openai.BadRequestError, {"messages": chat("word " * 20_000)}, "messages"),
        (openai.NotFoundError, {"model": "gpt-5"}, "model"),
    ]
    for kind, changes, param in wrong:
        try:
            client.chat.completions.create(**{"messages": chat("hello"), **GREEDY, **changes})
        except openai.APIStatusError as error:
            assert type(error) is kind, f"{changes}: {type(error)}"
            assert error.param == param, f"{changes}: {error.param}"
        else:
            raise AssertionError(f"{changes} was taken")
    return f"{len(wrong)} requests"


@check("a stream that is closed is cancelled")
def closed() -> str:
    ask: dict[str, Any] = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 2000, "temperature": 0}
    stream = lenient.completions.create(**ask, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    began = time.perf_counter()
    assert running() == 1
    stream.close()
    while running():
        assert time.perf_counter() - began < 20
        time.sleep(0.01)
    return f"no longer running {time.perf_counter() - began:.2f} s later"


check.print()
