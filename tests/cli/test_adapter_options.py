"""``--adapter``: a text of the adapted model, a chat that changes adapters, and what is refused at once."""

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.adapters import adapted, lora, native, peft_text, save, save_native
from helpers.checkpoints import CHAT_TEMPLATE, make_tokenizer
from helpers.commands import run
from selfspec import Engine, SamplingParams
from selfspec.cli.chat_repl import ChatCommands
from selfspec.cli.chat_session import ChatSession

PROMPT = "def double(number):"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_native(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: save(adapted(native("llama"), lora(4), seed), root / name) for seed, name in enumerate(("one", "two"))
    }


def generate(model: str, *arguments: str) -> Any:
    return run("generate", "--model", model, "--max-new-tokens", "24", "--ignore-eos", *arguments, PROMPT)


def test_generate_writes_the_text_of_the_adapter(model: str, folders: dict[str, Path]) -> None:
    result = generate(model, "--method", "uniform", "--adapter", f"mine={folders['two']}", "--json")
    assert result.exit_code == 0, result.stderr
    written = json.loads(result.stdout)
    expected = peft_text(adapted(native("llama"), lora(4), 1), make_tokenizer().encode(PROMPT), 24, eos_token_id=None)
    assert tuple(written["token_ids"]) == expected
    assert written["accepted"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--adapter", "/no/such"], "adapter 'such': there is no folder '/no/such'"),
        (["--adapter", "a=/x", "--adapter", "b=/y"], "a text has one adapter; give --adapter once"),
        (["--adapter", "=x"], "--adapter takes DIR or NAME=DIR, not '=x'"),
    ],
)
def test_bad_adapters_are_refused_before_a_model_is_loaded(arguments: list[str], message: str) -> None:
    result = generate("/no/such/model", *arguments)
    assert result.exit_code != 0
    assert message in result.stderr


def test_a_chat_changes_adapters_and_methods(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    engine = Engine(native("llama"), make_tokenizer(chat_template=CHAT_TEMPLATE), adapters=folders, method="uniform")
    commands = ChatCommands(ChatSession(engine, SamplingParams(max_new_tokens=16, adapter="one")))
    answers = []
    for line in ("/adapter two", "/adapter none", "/method suffix", "/adapter one"):
        commands.handle(line)
        commands.handle("/reset")
        commands.handle("Hi")
        answers.append(commands.session.conversation.exchanges[-1].assistant)
    assert engine.tokenizer is not None
    ids = engine.encode([{"role": "user", "content": "Hi"}])
    models = [adapted(native("llama"), lora(4), 1), native("llama"), native("llama"), adapted(native("llama"), lora(4))]
    outputs = [peft_text(each, ids, 16, eos_token_id=0) for each in models]
    texts = [engine.tokenizer.decode(each, skip_special_tokens=True) for each in outputs]
    assert answers == texts
    assert not commands.failed
    commands.handle("/adapter three")
    commands.handle("/adapter")
    printed = capsys.readouterr().err
    assert "there is no adapter 'three'; this engine has one, two" in printed
    assert "adapter: one\nadapters: one, two" in printed
