"""Suites from the hub, with a fake of ``datasets``."""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from selfspec.errors import InvalidParameterError, SelfSpecError
from selfspec_lab.bench.suites import Question, read_suite
from selfspec_lab.bench.suites.hub import parse_address
from suite_files import load


class FakeDataset:
    """What a split of ``datasets`` is asked for here."""

    def __init__(self, **columns: list[Any]) -> None:
        self._columns = columns
        self.column_names = list(columns)

    def __getitem__(self, column: str) -> Any:
        return iter(self._columns[column])


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[Any]]:
    """Puts an answer, or an error, in the place of the hub's; gives the list of what was asked."""

    def install(answer: Any) -> list[Any]:
        asked = []

        def load_dataset(name: str, config: str | None, *, split: str) -> Any:
            asked.append((name, config, split))
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
        return asked

    return install


def test_hub_text(hub: Callable[[Any], list[Any]]) -> None:
    asked = hub(FakeDataset(task=["a", "b", "c"], prompt=["def f():", "", "def g():"]))
    suite = load("hub:owner/functions")
    assert asked == [("owner/functions", None, "test")]
    assert (suite.name, suite.chat) == ("hub:owner/functions", False)
    assert suite.questions == (
        Question("functions-1", "functions", ("def f():",)),
        Question("functions-3", "functions", ("def g():",)),
    )


def test_hub_texts_are_asked_for_in_a_chat(hub: Callable[[Any], list[Any]]) -> None:
    hub(FakeDataset(text=["One day"]))
    assert load("hub:stories").questions[0].messages == ("Continue this text:\n\nOne day",)


def test_hub_chat_with_categories(hub: Callable[[Any], list[Any]]) -> None:
    rows = FakeDataset(ask=[["Who?", "Why?"], ["When?"]], category=["qa", None])
    asked = hub(rows)
    suite = load("hub:chats:small:train:ask")
    assert asked == [("chats", "small", "train")]
    assert suite.chat
    assert suite.questions == (Question("chats-1", "qa", ("Who?", "Why?")), Question("chats-2", "chats", ("When?",)))


def test_hub_takes_the_likeliest_column_and_a_limit(hub: Callable[[Any], list[Any]]) -> None:
    hub(FakeDataset(text=["no"] * 9, question=[f"{number}?" for number in range(9)]))
    suite = load("hub:problems", limit=3)
    assert suite.chat
    assert len(suite.questions) == 3
    assert all(question.turns[0].endswith("?") for question in suite.questions)


def test_parts_of_a_hub_address_may_be_left_empty() -> None:
    assert parse_address("a/b::train") == ("a/b", None, "train", None, None)
    assert parse_address("a/b:c::d") == ("a/b", "c", "test", "d", None)


@pytest.mark.parametrize(
    ("spec", "rows", "message"),
    [
        ("hub:a:b:c:d:e:f", {}, "too many parts; expected is hub:NAME"),
        ("hub:../questions", {}, "not the name of a data set.*prompts:FILE"),
        ("hub:a/b/c", {}, "not the name of a data set"),
        ("hub:a", {"label": [1]}, "none of the columns turns, .*; name one of label"),
        ("hub:a:::quest", {"question": ["Why?"]}, "no column 'quest'; name one of question"),
        ("hub:a", {"text": ["", None]}, "column 'text' of split 'test' of the data set 'a' holds no text"),
        ("hub:a", {"text": ["ok", 3]}, "'text' in row 2 of 'a' must be text"),
        ("hub:a", {"turns": [["Who?", ""]]}, "'turns' in row 1 of 'a' must be text"),
    ],
)
def test_bad_hub_suites(spec: str, rows: dict[str, Any], message: str, hub: Callable[[Any], list[Any]]) -> None:
    hub(FakeDataset(**rows))
    with pytest.raises(InvalidParameterError, match=message):
        read_suite(spec)


def test_hub_that_cannot_be_read(hub: Callable[[Any], list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    hub(ConnectionError("Couldn't reach 'a' on the Hub (OfflineModeIsEnabled)"))
    with pytest.raises(SelfSpecError, match=r"cannot reach the hub for split 'test' of the data set 'a'.*prompts:FILE"):
        read_suite("hub:a")
    hub(ValueError("Unknown split \"test\". Should be one of\n['train']."))
    with pytest.raises(InvalidParameterError, match=r"data set 'a' \(b\): Unknown split \"test\".* \['train'\]"):
        read_suite("hub:a:b")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SelfSpecError, match=r"needs datasets; run .pip install './lab\[bench\]'"):
        read_suite("hub:a")
