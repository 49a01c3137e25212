"""OpenAI's own client against a real server: what it sends is understood, and what it gets has the form it expects."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal

import pytest
import uvicorn

from helpers.checkpoints import CHAT_TEMPLATE, save_checkpoint
from helpers.server_process import ServerProcess, serve
from helpers.serving import InlineReaders, ScriptedEngine
from selfspec import Engine
from selfspec.serve.app import create_app
from selfspec.serve.service import Service

openai = pytest.importorskip("openai", reason="the package openai is not installed: pip install '.[dev]'")
httpx = pytest.importorskip("httpx")
pydantic = pytest.importorskip("pydantic")

KEY = "a-key-for-tests"
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0}
REPORT = {"speculative": {"report": True}}
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why is the sky blue?"}]
PROMPTS = ["Once upon a time", "The capital of France is", "def fibonacci(n):", "1, 2, 3, 4,"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_checkpoint(tmp_path_factory.mktemp("served"), chat_template=CHAT_TEMPLATE))


@pytest.fixture(scope="module")
def server(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    arguments = ("--model", folder, "--name", "tiny", "--method", "uniform", "--max-batch", "4", "--max-waiting", "8")
    arguments = (*arguments, "--readers", "1")
    with serve(tmp_path_factory.mktemp("server"), *arguments, env={"SELFSPEC_API_KEY": KEY}) as running:
        yield running


@pytest.fixture(scope="module")
def engine(folder: str) -> Engine:
    """What the server's texts are compared with: the same model, without drafts."""
    return Engine.from_pretrained(folder, method="autoregressive")


def options(server: ServerProcess, **changes: Any) -> dict[str, Any]:
    """Of a client that refuses answers which do not fit its types, and never asks twice."""
    base = {"base_url": f"{server.url}/v1", "api_key": KEY, "max_retries": 0, "_strict_response_validation": True}
    return {**base, **changes}


@pytest.fixture
def client(server: ServerProcess) -> Any:
    return openai.OpenAI(**options(server))


@pytest.fixture
def lenient(server: ServerProcess) -> Any:
    """For completions: the client's types forbid nulls that OpenAI sends (no ``finish_reason`` yet, no score)."""
    return openai.OpenAI(**options(server, _strict_response_validation=False))


def gauge(server: ServerProcess, name: str) -> float:
    """The value of a metric, over all its labels."""
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


def wait_until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    limit = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < limit, f"did not happen within {seconds} s"
        time.sleep(0.02)


class TestChat:
    def test_is_the_text_without_drafts(self, client: Any, engine: Engine) -> None:
        answer = client.chat.completions.create(messages=CHAT, max_tokens=40, extra_body=REPORT, **GREEDY)
        alone = engine.generate(CHAT, max_new_tokens=40)
        [choice] = answer.choices
        assert (choice.message.role, choice.message.content) == ("assistant", alone.text)
        assert choice.finish_reason == "length"
        assert answer.object == "chat.completion"
        assert answer.model == "tiny"
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (alone.prompt_token_count, 40)
        assert answer.usage.total_tokens == alone.prompt_token_count + 40
        assert answer.selfspec["method"] == "uniform"
        assert 0 < answer.selfspec["accepted_tokens"] <= answer.selfspec["drafted_tokens"]

    def test_streams_the_same_text(self, client: Any, engine: Engine) -> None:
        stream = client.chat.completions.create(
            messages=CHAT, max_tokens=40, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
        *chunks, last = list(stream)
        assert (
            "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            == engine.generate(CHAT, max_new_tokens=40).text
        )
        assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "length"]
        assert (last.choices, last.usage.completion_tokens) == ([], 40)
        assert len(chunks) > 2  # the first token, and the others in parts

    def test_the_clients_own_accumulation(self, client: Any, engine: Engine) -> None:
        text = engine.generate(CHAT, max_new_tokens=40).text
        ask = {"messages": CHAT, "logprobs": True, "top_logprobs": 2, "stop": text[30:32], "max_tokens": 40, **GREEDY}
        with client.chat.completions.stream(**ask) as stream:  # it refuses answers that end for their length
            kinds = {event.type for event in stream}
            final = stream.get_final_completion().choices[0]
        assert {"chunk", "content.delta", "content.done", "logprobs.content.delta"} <= kinds
        assert final.message.content == text[: text.index(ask["stop"])]
        assert all(token.top_logprobs[0].token == token.token for token in final.logprobs.content)

    def test_logprobs(self, client: Any, engine: Engine) -> None:
        answer = client.chat.completions.create(messages=CHAT, max_tokens=12, logprobs=True, top_logprobs=3, **GREEDY)
        alone = engine.generate(CHAT, max_new_tokens=12, logprobs=3)
        assert alone.logprobs is not None
        for told, token in zip(answer.choices[0].logprobs.content, alone.logprobs, strict=True):
            assert told.logprob == pytest.approx(token.logprob, abs=1e-4)
            assert [top.logprob for top in told.top_logprobs] == pytest.approx([top for _, top in token.top], abs=1e-4)
            assert told.top_logprobs[0].token == told.token  # greedy

    def test_choices_and_seed(self, client: Any) -> None:
        ask = {"model": "tiny", "messages": CHAT, "n": 3, "seed": 7, "max_tokens": 16, "temperature": 1.2}
        texts = [[choice.message.content for choice in client.chat.completions.create(**ask).choices] for _ in range(2)]
        assert texts[0] == texts[1]
        assert len(set(texts[0])) == 3

    def test_stop(self, client: Any, engine: Engine) -> None:
        text = engine.generate(CHAT, max_new_tokens=40).text
        stop = text[10:12]
        answer = client.chat.completions.create(messages=CHAT, max_tokens=40, stop=[stop], **GREEDY)
        assert answer.choices[0].message.content == text[: text.index(stop)]
        assert answer.choices[0].finish_reason == "stop"

    def test_a_form_is_parsed(self, client: Any) -> None:
        class Answer(pydantic.BaseModel):  # type: ignore[misc, name-defined]
            colour: Literal["red", "green", "blue"]
            is_sure: bool

        ask = {"model": "tiny", "messages": CHAT, "seed": 3, "max_tokens": 800}  # random weights like white space
        parsed = client.chat.completions.parse(response_format=Answer, **ask)
        assert isinstance(parsed.choices[0].message.parsed, Answer)

    def test_tools_without_a_template_for_them_are_refused(self, client: Any) -> None:
        tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(messages=CHAT, tools=[tool], **GREEDY)
        assert caught.value.param == "tools"


class TestCompletions:
    def test_several_prompts_with_echo(self, client: Any, engine: Engine) -> None:
        answer = client.completions.create(prompt=PROMPTS, max_tokens=20, echo=True, **GREEDY)
        alone = [engine.generate(prompt, max_new_tokens=20).text for prompt in PROMPTS]
        assert [choice.text for choice in answer.choices] == [a + b for a, b in zip(PROMPTS, alone, strict=True)]

    def test_token_ids_and_the_default_length(self, client: Any, engine: Engine) -> None:
        token_ids = engine.tokenizer.encode(PROMPTS[0])  # type: ignore[union-attr]
        answer = client.completions.create(prompt=token_ids, **GREEDY)
        assert answer.choices[0].text == engine.generate(token_ids, max_new_tokens=16).text
        assert answer.usage.completion_tokens == 16

    def test_scores_of_a_prompt(self, lenient: Any, engine: Engine) -> None:
        answer = lenient.completions.create(prompt=PROMPTS[1], max_tokens=0, echo=True, logprobs=1, **GREEDY)
        logprobs = answer.choices[0].logprobs
        alone = engine.generate(PROMPTS[1], max_new_tokens=0, prompt_logprobs=1).prompt_logprobs
        assert alone is not None
        assert answer.choices[0].text == PROMPTS[1] == "".join(logprobs.tokens)
        assert logprobs.text_offset == list(range(len(PROMPTS[1])))  # a token of this tokenizer is a character
        assert logprobs.token_logprobs[0] is None
        known = [token.logprob for token in alone[1:] if token is not None]
        assert logprobs.token_logprobs[1:] == pytest.approx(known, abs=1e-4)

    def test_streams_several_prompts(self, lenient: Any, engine: Engine) -> None:
        texts = [""] * len(PROMPTS)
        for chunk in lenient.completions.create(prompt=PROMPTS, max_tokens=20, stream=True, **GREEDY):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        assert texts == [engine.generate(prompt, max_new_tokens=20).text for prompt in PROMPTS]


class TestTogether:
    def test_each_text_is_the_one_alone(self, server: ServerProcess, engine: Engine) -> None:
        """Greedy and seeded, chats and completions, streamed and whole, all at once."""

        async def streamed(client: Any, prompt: str, seed: int) -> str:
            stream = await client.completions.create(
                model="tiny", prompt=prompt, max_tokens=30, seed=seed, temperature=0.9, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

        async def whole(client: Any, prompt: str) -> str:
            messages = [{"role": "user", "content": prompt}]
            answer = await client.chat.completions.create(messages=messages, max_tokens=30, **GREEDY)
            return str(answer.choices[0].message.content)

        async def ask() -> list[str]:
            async with openai.AsyncOpenAI(**options(server, _strict_response_validation=False)) as client:
                asked = [streamed(client, prompt, seed) for seed, prompt in enumerate(PROMPTS)]
                return list(await asyncio.gather(*asked, *(whole(client, prompt) for prompt in PROMPTS)))

        alone = [
            engine.generate(prompt, max_new_tokens=30, seed=seed, temperature=0.9).text
            for seed, prompt in enumerate(PROMPTS)
        ]
        alone += [engine.generate([{"role": "user", "content": each}], max_new_tokens=30).text for each in PROMPTS]
        assert asyncio.run(ask()) == alone

    def test_a_closed_stream_is_cancelled(self, server: ServerProcess, lenient: Any) -> None:
        generated = gauge(server, "vllm:generation_tokens_total")
        stream = lenient.completions.create(
            prompt=PROMPTS[0], max_tokens=900, stream=True, extra_body={"ignore_eos": True}, **GREEDY
        )
        next(iter(stream))
        assert gauge(server, "vllm:num_requests_running") == 1
        stream.close()
        wait_until(lambda: gauge(server, "vllm:num_requests_running") == 0)
        assert gauge(server, "vllm:generation_tokens_total") - generated < 900

    def test_an_abandoned_wait_is_cancelled(self, server: ServerProcess) -> None:
        async def give_up() -> None:
            async with openai.AsyncOpenAI(**options(server)) as client:
                work = asyncio.create_task(
                    client.completions.create(
                        prompt=PROMPTS[0], max_tokens=900, extra_body={"ignore_eos": True}, **GREEDY
                    )
                )
                await asyncio.to_thread(wait_until, lambda: gauge(server, "vllm:num_requests_running") == 1)
                work.cancel()
                await asyncio.wait([work])
                assert work.cancelled()

        asyncio.run(give_up())
        wait_until(lambda: gauge(server, "vllm:num_requests_running") == 0)


class TestErrors:
    """As the exceptions that a caller of the client writes ``except`` for."""

    @pytest.mark.parametrize(
        ("changes", "param"),
        [
            ({"temperature": 3}, "temperature"),
            ({"max_tokens": 100_000}, "max_tokens"),
            ({"messages": [{"role": "user"}]}, "messages[0]"),
            ({"messages": [{"role": "user", "content": "x" * 2000}]}, "messages"),
            ({"extra_body": {"top_q": 1}}, "top_q"),
            ({"extra_body": {"speculative": {"method": "none such"}}}, "speculative.method"),
            ({"logit_bias": {"100000": 1}}, "logit_bias"),
            ({"n": 1000}, "n"),
        ],
    )
    def test_a_bad_field_is_named(self, client: Any, changes: dict[str, Any], param: str) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**{**GREEDY, "messages": CHAT, **changes})
        assert caught.value.param == param
        assert caught.value.type == "invalid_request_error"
        assert caught.value.code is not None
        assert caught.value.request_id

    def test_a_model_that_is_not_served(self, client: Any) -> None:
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(messages=CHAT, model="gpt-5")
        assert caught.value.code == "model_not_found"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("gpt-5")

    def test_a_wrong_key(self, server: ServerProcess) -> None:
        with pytest.raises(openai.AuthenticationError) as caught:
            openai.OpenAI(**options(server, api_key="another")).models.list()
        assert caught.value.code == "invalid_api_key"

    def test_a_full_queue(self, server: ServerProcess) -> None:
        """More than run and wait together: some are refused, and what was taken is answered."""

        async def ask() -> list[Any]:
            async with openai.AsyncOpenAI(**options(server)) as client:
                asked = (client.completions.create(prompt=PROMPTS[0], max_tokens=150, **GREEDY) for _ in range(40))
                return list(await asyncio.gather(*asked, return_exceptions=True))

        answers = asyncio.run(ask())
        refused = [answer for answer in answers if isinstance(answer, openai.RateLimitError)]
        texts = {answer.choices[0].text for answer in answers if not isinstance(answer, Exception)}
        assert len(refused) >= 40 - 4 - 8 - 8  # some may have come to their end while others arrived
        assert len(texts) == 1
        assert all(int(each.response.headers["retry-after"]) >= 1 for each in refused)
        assert {type(answer) for answer in answers if isinstance(answer, Exception)} == {openai.RateLimitError}


class Add(pydantic.BaseModel):  # type: ignore[misc, name-defined]
    """Adds two numbers."""

    a: int
    b: int


@pytest.fixture(scope="module")
def caller() -> Iterator[Any]:
    """A client of a server in this process whose model calls a tool in every answer."""
    template = CHAT_TEMPLATE + "{% if tools %}{{ tools | tojson }} <tool_call>{% endif %}"
    text = 'Let me see. <tool_call>{"name": "Add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    service = Service(ScriptedEngine(text, chat_template=template), ["tiny"], readers=InlineReaders())
    server = uvicorn.Server(uvicorn.Config(create_app(service), port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    server.should_exit = True
    thread.join()


class TestTools:
    TOOLS: ClassVar[list[Any]] = [openai.pydantic_function_tool(Add)]

    def test_a_call_is_parsed(self, caller: Any) -> None:
        answer = caller.chat.completions.parse(messages=CHAT, tools=self.TOOLS, model="tiny").choices[0]
        [call] = answer.message.tool_calls
        assert call.function.parsed_arguments == Add(a=1, b=2)
        assert (answer.finish_reason, answer.message.content) == ("tool_calls", "Let me see. ")

    def test_a_call_in_a_stream(self, caller: Any) -> None:
        with caller.chat.completions.stream(messages=CHAT, tools=self.TOOLS, model="tiny") as stream:
            kinds = {event.type for event in stream}
            [call] = stream.get_final_completion().choices[0].message.tool_calls
        assert "tool_calls.function.arguments.done" in kinds
        assert call.function.parsed_arguments == Add(a=1, b=2)

    def test_the_conversation_goes_on(self, caller: Any) -> None:
        """The answer itself is sent back, as a caller does, with the tool's result."""
        first = caller.chat.completions.create(messages=CHAT, tools=self.TOOLS, model="tiny").choices[0].message
        result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "3"}
        answer = caller.chat.completions.create(messages=[*CHAT, first, result], tools=self.TOOLS, model="tiny")
        assert answer.choices[0].finish_reason == "tool_calls"


def test_models(client: Any) -> None:
    [model] = client.models.list().data
    assert (model.id, model.object) == ("tiny", "model")
    assert client.models.retrieve("tiny") == model
