"""Adapters of a server: models of their own for clients, over the weights of one."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from helpers.adapters import adapted, lora, native, peft_text, save
from helpers.checkpoints import CHAT_TEMPLATE, make_tokenizer
from helpers.serving import NAME, ScriptedEngine, make_client
from selfspec.async_engine import AsyncEngine
from selfspec.engine import Engine
from selfspec.errors import InvalidParameterError
from selfspec.request_stream import RequestStream
from selfspec.serve.served_engine import ServedEngine
from selfspec.serve.serving import ServeOptions, check_options
from selfspec.types import SamplingParams

PROMPT, LENGTH = "abcabcabcabc", 24


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    """By name a model as PEFT has it."""
    return {name: adapted(native("llama"), lora(4), seed) for seed, name in enumerate(("french", "law"))}


@pytest.fixture(scope="module")
def folders(models: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {name: save(model, root / name) for name, model in models.items()}


@pytest.fixture(scope="module")
def client(folders: dict[str, Path]) -> Iterator[TestClient]:
    made = Engine(
        native("llama"), make_tokenizer(chat_template=CHAT_TEMPLATE), "uniform", adapters=folders, prefix_cache=2**20
    )
    with make_client(ServedEngine(lambda: made), adapters=tuple(folders)) as client:
        yield client


def ask(client: TestClient, path: str, **fields: Any) -> Any:
    answer = client.post(path, json={"temperature": 0, "max_tokens": LENGTH, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def expected(models: dict[str, Any], name: str, text: str = PROMPT) -> str:
    tokenizer = make_tokenizer()
    model = models.get(name, native("llama"))
    ids = peft_text(model, tokenizer.encode(text), LENGTH, eos_token_id=None)
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def test_a_request_names_an_adapter_as_its_model(client: TestClient, models: dict[str, Any]) -> None:
    texts = set()
    for name in (NAME, "french", "law", "french"):
        answer = ask(
            client, "/v1/completions", model=name, prompt=PROMPT, ignore_eos=True, speculative={"report": True}
        )
        assert answer["model"] == name
        assert answer["choices"][0]["text"] == expected(models, name)
        assert answer["selfspec"]["accepted_tokens"] > 0
        texts.add(answer["choices"][0]["text"])
    assert len(texts) == 3
    assert ask(client, "/v1/completions", prompt=PROMPT)["model"] == NAME


def test_every_interface_takes_the_name(client: TestClient) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    for path, body in {
        "/v1/chat/completions": {"messages": chat},
        "/v1/messages": {"messages": chat},
        "/v1/responses": {"input": chat, "max_tokens": None, "max_output_tokens": LENGTH},
    }.items():
        bodies = {name: {**body, "model": name, "temperature": 0} for name in ("law", NAME)}
        if path == "/v1/responses":
            bodies = {name: {k: v for k, v in each.items() if k != "max_tokens"} for name, each in bodies.items()}
        else:
            bodies = {name: {**each, "max_tokens": LENGTH} for name, each in bodies.items()}
        answers = {name: client.post(path, json=each) for name, each in bodies.items()}
        assert {name: answer.json()["model"] for name, answer in answers.items()} == {"law": "law", NAME: NAME}


def test_requests_with_different_adapters_run_at_once(folders: dict[str, Path], models: dict[str, Any]) -> None:
    made = Engine(native("llama"), make_tokenizer(), "uniform", adapters=folders)
    names = [NAME, "french", "law", "french", "law"]

    async def run() -> list[RequestStream]:
        async with AsyncEngine(made) as engine:
            asked = [None if name == NAME else name for name in names]
            streams = [engine.submit(PROMPT, max_new_tokens=LENGTH, ignore_eos=True, adapter=name) for name in asked]
            for stream in streams:
                async for _ in stream:
                    pass
            return streams

    streams = asyncio.run(run())
    assert [stream.result.text for stream in streams] == [expected(models, name) for name in names]
    starts = [stream.started_at or 0.0 for stream in streams]
    ends = [start + stream.result.seconds for start, stream in zip(starts, streams, strict=True)]
    assert max(starts) < min(ends)


def test_adapters_are_listed_with_their_model(client: TestClient) -> None:
    cards = {card["id"]: card for card in client.get("/v1/models").json()["data"]}
    assert list(cards) == [NAME, "french", "law"]
    assert "parent" not in cards[NAME]
    assert cards["law"]["parent"] == NAME
    assert client.get("/v1/models/law").json() == cards["law"]


def test_an_unknown_name_is_no_model(client: TestClient) -> None:
    for answer in (
        client.post("/v1/completions", json={"prompt": "a", "model": "medicine"}),
        client.get("/v1/models/m"),
    ):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert "this server has tiny-test and french and law" in error["message"]


def test_choices_and_prompts_share_the_adapter_and_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted = ScriptedEngine()
    checked, check = [0], SamplingParams.__post_init__

    def counted(params: SamplingParams) -> None:
        checked[0] += 1
        check(params)

    monkeypatch.setattr(SamplingParams, "__post_init__", counted)
    with make_client(scripted, adapters=("law",)) as client:
        ask(client, "/v1/completions", model="law", prompt=["a", "b"], n=2, temperature=1, seed=3)
    assert [params.adapter for _, params, _ in scripted.asked] == ["law"] * 4
    assert [params.seed for _, params, _ in scripted.asked] == [3, 4, 3, 4]
    assert checked == [1]


def test_the_options_of_the_server_name_adapters(folders: dict[str, Path]) -> None:
    given = check_options({"model": "tiny", "adapter": [f"fr={folders['french']}", str(folders["law"])]}, ServeOptions)
    assert given.adapters == {"fr": str(folders["french"]), "law": str(folders["law"])}
    with pytest.raises(InvalidParameterError, match="the model and an adapter are both named 'tiny'"):
        _ = check_options({"model": "tiny", "adapter": ["tiny=/a"]}, ServeOptions).adapters
