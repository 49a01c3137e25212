"""The server with a real engine: texts, drafts, what is learned, cancelling."""

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from helpers.checkpoints import CHAT_TEMPLATE, make_tokenizer
from helpers.models import build
from helpers.serving import contents, events, make_client
from selfspec.decoding.text import TextStream
from selfspec.engine import Engine
from selfspec.errors import StateError
from selfspec.serve.served_engine import ServedEngine
from selfspec.types import SamplingParams

PROMPT = "abcabcabcabcabc"


def make_engine(method: str = "suffix", **settings: Any) -> Engine:
    return Engine(build("llama"), make_tokenizer(chat_template=CHAT_TEMPLATE), method, settings=settings)


def serve(engine: Engine, **options: Any) -> ServedEngine:
    return ServedEngine(lambda: engine, **options)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make_engine()


@pytest.fixture(scope="module")
def client(engine: Engine) -> Iterator[TestClient]:
    with make_client(serve(engine)) as client:
        yield client


def complete(client: TestClient, **fields: Any) -> Any:
    answer = client.post("/v1/completions", json={"prompt": PROMPT, "temperature": 0, "max_tokens": 40, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_text_is_the_engines(client: TestClient, engine: Engine) -> None:
    expected = engine.generate(PROMPT, max_new_tokens=40)
    for method in ("suffix", "autoregressive", "uniform", "prompt-lookup"):
        answer = complete(client, speculative={"method": method, "report": True})
        assert answer["choices"][0]["text"] == expected.text
        assert answer["selfspec"]["method"] == method
    plain = complete(client, speculative={"enabled": False, "report": True})
    assert plain["choices"][0]["text"] == expected.text
    assert plain["selfspec"]["drafted_tokens"] == 0


def test_drafts_are_reported_and_counted(client: TestClient) -> None:
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 60, "stream": True, "speculative": {"report": True}}
    chunks = events(client.post("/v1/completions", json=body).text)[:-1]
    tokens = [token for chunk in chunks for token in chunk["selfspec"].get("tokens", [])]
    report = chunks[-1]["selfspec"]
    assert "".join(token["text"] for token in tokens) == "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert tokens[0]["origin"] == "prefill"
    drafted = [token["drafted_by"] for token in tokens if token["origin"] == "draft"]
    assert drafted == ["suffix"] * report["accepted_tokens"]
    assert report["accepted_tokens"] > 0
    assert report["speedup_estimate"] > 0
    metrics = client.get("/metrics").text
    counted = {line.split("{")[0]: float(line.split()[-1]) for line in metrics.splitlines() if not line.startswith("#")}
    assert counted["vllm:spec_decode_num_accepted_tokens_total"] >= report["accepted_tokens"]
    assert counted["selfspec:speedup_estimate"] > 0


def test_a_seed_gives_one_text_on_any_load(client: TestClient, engine: Engine) -> None:
    expected = [engine.generate(PROMPT, temperature=1.0, seed=seed, max_new_tokens=40).text for seed in (5, 6, 7)]
    answer = complete(client, temperature=1, seed=5, n=3)
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert len(set(expected)) == 3
    others = complete(client, prompt=["xyz", PROMPT, "1234"], temperature=1, seed=6)
    assert others["choices"][1]["text"] == expected[1]


def test_a_chat_in_a_stream(client: TestClient, engine: Engine) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    expected = engine.generate(messages, max_new_tokens=30).text
    body = {"messages": messages, "max_tokens": 30, "temperature": 0, "stream": True}
    chunks = events(client.post("/v1/chat/completions", json=body).text)
    assert "".join(contents(chunks[:-1])) == expected


def test_an_answer_is_not_decoded_again_at_its_end(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> str:
        raise AssertionError("all of it was decoded on the event loop")

    monkeypatch.setattr(TextStream, "whole", fail)
    assert complete(client)["choices"][0]["text"]


def test_stop_strings(client: TestClient, engine: Engine) -> None:
    text = engine.generate(PROMPT, max_new_tokens=40).text
    stop = text[10:12]
    choice = complete(client, stop=[stop])["choices"][0]
    assert choice["text"] == text[: text.index(stop)]
    assert choice["finish_reason"] == "stop"


def test_prompts_of_token_ids(client: TestClient, engine: Engine) -> None:
    token_ids = engine.encode(PROMPT)
    assert complete(client, prompt=token_ids)["choices"] == complete(client)["choices"]
    two = complete(client, prompt=[token_ids, engine.encode("xyz")])
    assert [choice["text"] for choice in two["choices"]] == [
        engine.generate(prompt, max_new_tokens=40).text for prompt in (PROMPT, "xyz")
    ]


def test_prompts_that_begin_alike_are_read_once(client: TestClient) -> None:
    system = {"role": "system", "content": "You answer in few words, whatever is asked. " * 3}
    counts = []
    for question in ("Why?", "What?"):
        body = {"messages": [system, {"role": "user", "content": question}], "max_tokens": 4, "temperature": 0}
        usage = client.post("/v1/chat/completions", json=body).json()["usage"]
        counts.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert counts[0] == 0
    assert counts[1] >= len(system["content"])  # each character is a token
    lines = client.get("/metrics").text.splitlines()
    (hits,) = [line for line in lines if line.startswith("vllm:prefix_cache_hits_total")]
    assert float(hits.split()[-1]) >= counts[1]  # other tests' prompts are among them


def test_the_next_turn_of_a_chat_reads_what_is_new(client: TestClient) -> None:
    messages = [{"role": "user", "content": "A long story, of which every word counts. " * 12}]
    body = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    first = client.post("/v1/chat/completions", json={"messages": messages, **body}).json()
    messages += [first["choices"][0]["message"], {"role": "user", "content": "Why?"}]
    messages[1] = {"role": "assistant", "content": messages[1]["content"]}
    second = client.post("/v1/chat/completions", json={"messages": messages, **body}).json()["usage"]
    # The template writes the prompt of the first turn again; where the answer's text is other tokens, these are read.
    assert second["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"]
    assert first["usage"]["prompt_tokens"] > 400


def test_others_write_while_a_long_prompt_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(build("llama"), make_tokenizer(), "autoregressive", max_read_seconds=1e-6)
    short, long = engine.encode("abc"), engine.encode("a long prompt " * 30)
    expected = [engine.generate(each, max_new_tokens=tokens).token_ids for each, tokens in ((short, 600), (long, 5))]
    forwards: list[tuple[int, int]] = []  # rows of one that reads, and tokens that the other has then
    writing: list[Any] = []
    run = engine.target.run

    def noted(states: Any, *arguments: Any, **options: Any) -> Any:
        if options.get("last_rows") is not None and writing:
            forwards.append((len(states), len(writing[0].request.output.token_ids)))
        return run(states, *arguments, **options)

    monkeypatch.setattr(engine.target, "run", noted)

    async def read() -> None:
        served = serve(engine)
        await served.start()
        [other] = await served.submit([(short, SamplingParams(max_new_tokens=600))], method=None, request_id="a")
        begun = [piece.token_id for piece in await other.next_pieces()]
        writing.append(other)
        [asked] = await served.submit([(long, SamplingParams(max_new_tokens=5))], method=None, request_id="b")
        texts = [[*begun, *[piece.token_id async for piece in other]], [piece.token_id async for piece in asked]]
        assert texts == [list(each) for each in expected]
        await served.close()

    asyncio.run(read())
    rows, tokens = zip(*forwards, strict=True)
    assert sum(rows) >= len(long) - 1  # its first letter is the other's, too
    assert max(rows) <= 64  # the first chunk's, from which the speed is learned
    assert len(rows) > 10
    assert len(set(tokens[:-1])) == len(rows) - 1  # a token of the other between any two of them


def test_log_probabilities_of_prompt_and_answer(client: TestClient, engine: Engine) -> None:
    expected = engine.generate(PROMPT, max_new_tokens=5, logprobs=2, prompt_logprobs=2)
    assert expected.logprobs is not None
    assert expected.prompt_logprobs is not None
    found = complete(client, max_tokens=5, logprobs=2, echo=True)["choices"][0]
    assert found["text"] == PROMPT + expected.text
    wanted = [None if each is None else each.logprob for each in (*expected.prompt_logprobs, *expected.logprobs)]
    assert found["logprobs"]["token_logprobs"] == pytest.approx(wanted, abs=1e-5)
    assert found["logprobs"]["text_offset"][: len(PROMPT)] == list(range(len(PROMPT)))  # each token is a character
    scored = complete(client, max_tokens=0, logprobs=0, echo=True)["choices"][0]
    assert (scored["text"], scored["finish_reason"]) == (PROMPT, "length")
    assert scored["logprobs"]["token_logprobs"] == pytest.approx(wanted[: len(PROMPT)], abs=1e-5)


def test_an_answer_follows_its_schema(client: TestClient) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 200,
        "temperature": 0,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
    }
    choice = client.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert json.loads(choice["message"]["content"])["a"] in (1, 2)
    body["response_format"] = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "no such type"}}}
    for stream in (False, True):
        refused = client.post("/v1/chat/completions", json={**body, "stream": stream})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_format.json_schema.schema")


def test_a_cancelled_answer_leaves_the_engine_within_a_step(engine: Engine) -> None:
    async def run() -> None:
        served = serve(engine)
        await served.start()
        params = SamplingParams(max_new_tokens=900)
        [stream] = await served.submit([(engine.encode(PROMPT), params)], method=None, request_id="long")
        assert len(await stream.next_pieces()) >= 1
        assert served.stats().running == 1
        stream.cancel()
        until = time.monotonic() + 5
        while served.stats().running and time.monotonic() < until:
            await asyncio.sleep(0.001)
        assert served.stats().running == 0
        await served.close()

    asyncio.run(run())


def test_what_is_learned_outlives_the_server(tmp_path: Path) -> None:
    path = tmp_path / "state"
    engine = make_engine("token-recycling")
    with make_client(serve(engine, state=path)) as client:
        complete(client)
    assert path.exists()
    fresh = make_engine("token-recycling")
    with make_client(serve(fresh, state=path)):
        loaded = fresh.method.state()
    assert loaded.values == engine.method.state().values
    assert all(loaded.tensors[name].equal(tensor) for name, tensor in engine.method.state().tensors.items())


def test_what_is_learned_is_saved_while_requests_come(tmp_path: Path) -> None:
    path = tmp_path / "state"
    served = serve(make_engine("token-recycling"), state=path, state_seconds=0.01)
    with make_client(served) as client:
        time.sleep(0.05)
        assert not path.exists()  # nothing new was learned
        complete(client)
        until = time.monotonic() + 10
        while not path.exists() and time.monotonic() < until:
            time.sleep(0.01)
        assert path.exists()


def test_a_method_that_learns_nothing_has_no_state_to_keep(tmp_path: Path) -> None:
    with pytest.raises(StateError):
        asyncio.run(serve(make_engine("uniform"), state=tmp_path / "state").start())


def test_without_memory_for_one_more_a_request_waits() -> None:
    alone = make_engine("autoregressive")
    prompt, params = alone.encode(PROMPT), SamplingParams(max_new_tokens=100)
    expected = alone.generate(PROMPT, params).token_ids
    enough_for_one = alone.target.slot_bytes * 3 * (len(prompt) + 100) // 2
    engine = Engine(alone.target.model, alone.tokenizer, "autoregressive", memory_limit=enough_for_one, prefix_cache=0)

    async def run() -> None:
        served = serve(engine)
        await served.start()
        first, second = await served.submit([(prompt, params)] * 2, method=None, request_id="a")
        begun = [piece.token_id for piece in await first.next_pieces()]
        assert (served.stats().running, served.stats().waiting) == (1, 1)
        for stream, tokens in ((first, begun), (second, [])):
            assert tokens + [piece.token_id async for piece in stream] == list(expected)
        await served.close()

    asyncio.run(run())


def test_each_token_is_of_its_round(client: TestClient, engine: Engine) -> None:
    result = engine.generate(PROMPT, max_new_tokens=40)
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 40, "stream": True, "speculative": {"report": True}}
    chunks = events(client.post("/v1/completions", json=body).text)[:-1]
    tokens = [token for chunk in chunks for token in chunk["selfspec"].get("tokens", [])]
    assert [token["origin"] for token in tokens] == list(result.origins)
    drafted = [None if origin != "draft" else "suffix" for origin in result.origins]
    assert [token["drafted_by"] for token in tokens] == drafted
    assert drafted.count("suffix") == result.accepted > 0


def test_rates_come_with_the_chunks_and_end_at_those_of_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfspec.engine_thread._BETWEEN", 0.0)  # a chunk for each round
    engine = make_engine()
    speculative = {"report": True}
    body = {"prompt": "abcabcabcabcabc", "temperature": 0, "max_tokens": 60, "stream": True, "speculative": speculative}
    with make_client(serve(engine)) as client:
        chunks = events(client.post("/v1/completions", json=body).text)[:-1]
        plain = client.post("/v1/completions", json={**body, "speculative": {"report": True, "enabled": False}})
    *reports, last = [chunk["selfspec"] for chunk in chunks]
    rates = [report["acceptance_rate"] for report in reports if "acceptance_rate" in report]
    speedups = [report["speedup_estimate"] for report in reports if "speedup_estimate" in report]
    assert len(rates) > 3
    assert len(set(speedups)) > 3
    assert last["accepted_tokens"] > 0
    assert rates[-1] == last["acceptance_rate"]
    assert speedups[-1] == last["speedup_estimate"]
    assert not any("acceptance_rate" in chunk["selfspec"] for chunk in events(plain.text)[:-2])
