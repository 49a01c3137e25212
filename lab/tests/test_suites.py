"""Suites of ``selfspec bench run``: what they ask, which questions a limit leaves, and what is refused."""

import json
import sys
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoints import make_tokenizer
from selfspec.errors import InvalidParameterError, SelfSpecError
from selfspec.loading import bundled_models, load_model
from selfspec_lab.bench.suites import SUITES, Question, Suite, read_suite
from selfspec_lab.bench.suites.hub import parse_address
from selfspec_lab.bench.suites.mini import MINI
from selfspec_lab.bench.suites.selection import Selection
from selfspec_lab.prompts import PROMPTS

BEGIN = 7
"""Stands for a BOS token."""


def encode(text: str) -> list[int]:
    """A token a byte, behind one that begins every text."""
    return [BEGIN, *(100 + byte for byte in text.encode())]


def decode(question: Question) -> str:
    assert question.token_ids is not None
    assert question.token_ids[0] == BEGIN
    return bytes(token - 100 for token in question.token_ids[1:]).decode()


def load(spec: str, context: int = 16, **options: Any) -> Suite:
    return read_suite(spec, **options).load(encode, context)


def write(path: Path, *entries: Any) -> Path:
    path.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries), encoding="utf-8")
    return path


def keys(suite: Suite) -> list[str]:
    return [question.key for question in suite.questions]


def by_category(suite: Suite) -> dict[str, int]:
    return dict(Counter(question.category for question in suite.questions))


def spec_bench_entry(number: int, category: str = "writing") -> dict[str, Any]:
    return {"question_id": number, "category": category, "turns": [f"Write {number}.", "Shorter."]}


# What the suites ask


def test_mini() -> None:
    suite = load("mini")
    assert (suite.name, suite.ordered, suite.chat) == ("mini", False, False)
    assert by_category(suite) == {"code": 8, "math": 8, "prose": 8}
    text = MINI["prose"][1]
    assert suite.questions[2 * 8 + 1] == Question(
        "prose-2", "prose", (text,), messages=(f"Continue this story:\n\n{text}",)
    )
    assert all(text.startswith("Question: ") and text.endswith("?\nAnswer:") for text in MINI["math"])


def test_in_a_chat_mini_asks_for_what_a_text_only_begins() -> None:
    questions = {question.key: question for question in load("mini").questions}
    assert questions["code-1"].messages[0].startswith('Continue this Python code:\n\n"""Read and write')
    assert questions["math-1"].messages[0].startswith("A library has 240 books")
    assert questions["math-1"].messages[0].endswith("are left in the library?")
    assert all(len(question.messages) == len(question.turns) for question in questions.values())


def test_mini_is_held_out_from_the_prompts_that_settings_are_tuned_on() -> None:
    tuned_on = {text[:40] for texts in PROMPTS.values() for text in texts}
    assert not tuned_on & {text[:40] for texts in MINI.values() for text in texts}


@pytest.mark.trained
def test_mini_has_short_and_long_prompts() -> None:
    _, tokenizer = load_model(next(iter(bundled_models())))
    lengths = {category: sorted(len(tokenizer.encode(text)) for text in texts) for category, texts in MINI.items()}
    for category in ("code", "prose"):
        assert lengths[category][0] < 60
        assert 150 <= lengths[category][-2] <= lengths[category][-1] <= 250
    assert lengths["math"][-1] < 80


def test_spec_bench(tmp_path: Path) -> None:
    one = {"question_id": "a", "category": "qa", "turns": ["Who?"], "reference": ["She."]}
    path = write(tmp_path / "bench.jsonl", spec_bench_entry(81), one)
    suite = load(f"spec-bench:{path}")
    assert (suite.name, suite.ordered, suite.chat) == ("spec-bench:bench.jsonl", False, True)
    assert suite.questions == (
        Question("81", "writing", ("Write 81.", "Shorter.")),
        Question("a", "qa", ("Who?",)),
    )


def test_gsm8k_has_the_form_of_the_bundled_checkpoints(tmp_path: Path) -> None:
    path = write(tmp_path / "g.jsonl", {"question": " How many? ", "answer": "2"}, {"question": "Why?", "answer": "3"})
    suite = load(f"gsm8k:{path}")
    assert not suite.chat
    assert suite.questions == (
        Question("gsm8k-1", "gsm8k", ("Question: How many?\nAnswer:",), messages=("How many?",)),
        Question("gsm8k-2", "gsm8k", ("Question: Why?\nAnswer:",), messages=("Why?",)),
    )


def test_humaneval_prompts_are_as_they_stand(tmp_path: Path) -> None:
    prompt = 'def f(x):\n    """ Double it. """\n'
    suite = load(f"humaneval:{write(tmp_path / 'h.jsonl', {'task_id': 'HumanEval/0', 'prompt': prompt})}")
    assert not suite.chat
    message = f"Complete this Python function:\n\n{prompt}"
    assert suite.questions == (Question("HumanEval/0", "humaneval", (prompt,), messages=(message,)),)


def test_own_prompts(tmp_path: Path) -> None:
    lines = tmp_path / "mine.txt"
    lines.write_text("One day\n\nIt was\n", encoding="utf-8")
    assert load(f"prompts:{lines}").questions == (
        Question("mine-1", "mine", ("One day",)),
        Question("mine-2", "mine", ("It was",)),
    )
    objects = write(tmp_path / "mine.jsonl", {"prompt": "One\nday"})
    assert load(f"prompts:{objects}").questions == (Question("mine-1", "mine", ("One\nday",)),)


def test_empty_lines_byte_order_mark_and_line_separators_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "g.jsonl"
    path.write_bytes('\ufeff{"question": "a\u2028b"}\r\n\r\n\n{"question": "c"}'.encode())
    suite = load(f"gsm8k:{path}")
    assert suite.questions[0].turns == ("Question: a\u2028b\nAnswer:",)
    assert keys(suite) == ["gsm8k-1", "gsm8k-4"]


def test_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.txt").write_text("One day\n", encoding="utf-8")
    assert load("prompts:~/mine.txt").name == "prompts:mine.txt"


# Passages of a text


def test_passages_are_pieces_of_the_text_in_order(tmp_path: Path) -> None:
    text = "".join(f"{number:03}." for number in range(100))
    (tmp_path / "book.txt").write_text(text, encoding="utf-8")
    suite = load(f"text:{tmp_path / 'book.txt'}", context=21)
    assert by_category(suite) == {"book": 8}
    assert keys(suite)[:2] == ["book-1", "book-2"]
    assert all(not question.turns and len(question.token_ids or ()) == 21 for question in suite.questions)
    starts = [text.index(decode(question)) for question in suite.questions]
    assert all(48 <= after - before <= 52 for before, after in pairwise(starts))


def test_as_many_passages_as_asked_for_or_as_fit(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("x" * 100, encoding="utf-8")
    spec = f"text:{tmp_path / 'book.txt'}"
    assert len(load(spec, context=11, limit=9).questions) == 9
    assert len(load(spec, context=11, limit=20).questions) == 10
    assert len(load(spec, context=101).questions) == 1
    with pytest.raises(InvalidParameterError, match=r"book\.txt' has 101 tokens.* passage of 102; choose a shorter"):
        load(spec, context=102)


def test_passages_of_a_tokenizer_without_bos(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    (tmp_path / "book.txt").write_text("It was late in the afternoon.", encoding="utf-8")
    suite = read_suite(f"text:{tmp_path / 'book.txt'}").load(lambda text: list(tokenizer.encode(text)), 29)
    assert tokenizer.decode(suite.questions[0].token_ids) == "It was late in the afternoon."


@pytest.mark.parametrize("context", [-1, 0, 1])
def test_a_context_without_room(tmp_path: Path, context: int) -> None:
    (tmp_path / "book.txt").write_text("x" * 100, encoding="utf-8")
    with pytest.raises(InvalidParameterError, match=f"context of {context} tokens leaves no room"):
        load(f"text:{tmp_path / 'book.txt'}", context=context)


# Limits


def test_limit_counts_by_category(tmp_path: Path) -> None:
    entries = [spec_bench_entry(number, "qa" if number % 3 else "rag") for number in range(30)]
    spec = f"spec-bench:{write(tmp_path / 's.jsonl', *entries, spec_bench_entry(99, 'math'))}"
    limited = load(spec, limit=4)
    assert by_category(limited) == {"rag": 4, "qa": 4, "math": 1}
    whole = keys(load(spec))
    assert [key for key in whole if key in keys(limited)] == keys(limited)
    assert load(spec, limit=100) == load(spec)


def test_seed_decides_which_questions(tmp_path: Path) -> None:
    spec = f"gsm8k:{write(tmp_path / 'g.jsonl', *({'question': f'{number}?'} for number in range(100)))}"
    assert load(spec, limit=5, seed=3) == load(spec, limit=5, seed=3)
    assert len({tuple(keys(load(spec, limit=5, seed=seed))) for seed in range(8)}) > 4


@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 60), st.integers(0, 2**40))
def test_places_are_even_and_apart(count: int, length: int, spare: int, seed: int) -> None:
    total = count * length + spare
    places = Selection(seed=seed).places(total, length, count)
    distances = [after - before for before, after in pairwise(places)]
    assert len(places) == count
    assert places[0] >= 0
    assert places[-1] + length <= total
    assert all(length <= distance and abs(distance - total / count) <= 1 for distance in distances)


@pytest.mark.parametrize("limit", [0, -3])
def test_limit_below_one(limit: int) -> None:
    with pytest.raises(InvalidParameterError, match=f"limit must be at least 1 question a category, not {limit}"):
        read_suite("mini", limit=limit)


# Streams


def test_stream_of_categories_in_the_order_given() -> None:
    suite = load("stream:prose+code", limit=2)
    assert (suite.name, suite.ordered, suite.chat) == ("stream:prose+code", True, False)
    assert [question.category for question in suite.questions] == ["prose", "prose", "code", "code"]


def test_stream_of_files_and_texts(tmp_path: Path) -> None:
    problems = write(tmp_path / "g.jsonl", *({"question": f"{number}?"} for number in range(9)))
    (tmp_path / "book.txt").write_text("x" * 100, encoding="utf-8")
    suite = load(f"stream:gsm8k:{problems}+text:{tmp_path / 'book.txt'}+math", limit=3)
    assert suite.name == "stream:gsm8k:g.jsonl+text:book.txt+math"
    assert [question.category for question in suite.questions] == ["gsm8k"] * 3 + ["book"] * 3 + ["math"] * 3


def test_keys_of_what_comes_again_are_made_unique() -> None:
    suite = load("stream:math+code+math+mini", limit=2)
    assert len(set(keys(suite))) == len(keys(suite)) == 12
    assert keys(suite)[4:6] == [f"{key}#2" for key in keys(suite)[:2]]
    assert keys(suite)[-4:-2] == [f"{key}#3" for key in keys(suite)[:2]]
    assert suite.questions[4].turns == suite.questions[0].turns
    assert by_category(suite) == {"math": 6, "code": 4, "prose": 2}


def test_stream_of_chat_and_a_mixed_one(tmp_path: Path) -> None:
    chat = f"spec-bench:{write(tmp_path / 's.jsonl', spec_bench_entry(1))}"
    assert load(f"stream:{chat}+{chat}").chat
    mixed = load(f"stream:code+{chat}", limit=1)
    assert not mixed.chat
    assert [question.category for question in mixed.questions] == ["code", "writing"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("stream", "'stream' has an empty part; expected is stream:SUITE"),
        ("stream:code+", "empty part"),
        ("stream:code+pros", "no suite 'pros'; did you mean 'prose'.*choose from code, math, prose, mini, spec-bench"),
        ("stream:stream:code", "no suite 'stream'"),
        ("stream:math:2", "'math' is bundled and takes no file"),
    ],
)
def test_bad_streams(spec: str, message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        read_suite(spec)


# Bad input


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("minni", "no suite 'minni'; did you mean 'mini'"),
        ("questions.jsonl", "no suite 'questions.jsonl'.*choose from mini, spec-bench:FILE, "),
        ("", "no suite ''"),
        ("code", "'code' is a category of mini, not a suite; write stream:code"),
        ("mini:x", "'mini' is bundled and takes no file"),
        ("gsm8k", "'gsm8k' does not say which; expected is gsm8k:FILE"),
        ("text:", "expected is text:FILE"),
        ("hub:", "expected is hub:NAME"),
        ("humaneval:nowhere.jsonl", "no suite file 'nowhere.jsonl'"),
        ("text:~nobody-of-this-name/book.txt", "no suite file '~nobody"),
    ],
)
def test_bad_specs(spec: str, message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        read_suite(spec)


FILE_SUITES = [name for name, (form, _) in SUITES.items() if form.endswith(":FILE")]


@pytest.mark.parametrize("name", FILE_SUITES)
def test_bad_files(name: str, tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"

    def refused(content: bytes, message: str) -> None:
        path.write_bytes(content)
        with pytest.raises(InvalidParameterError, match=message):
            read_suite(f"{name}:{path}")

    with pytest.raises(InvalidParameterError, match="is a folder; name a file"):
        read_suite(f"{name}:{tmp_path}")
    with pytest.raises(InvalidParameterError, match="no suite file"):
        read_suite(f"{name}:{path}")
    refused(b"", r"questions\.jsonl' (is empty|has no (questions|prompts))")
    refused(b" \n\n", r"questions\.jsonl' (is empty|has no (questions|prompts))")
    refused(b"one\ntwo \xe9\n", r"line 2 of '.*questions\.jsonl' is not UTF-8: byte 0xe9")
    if name != "text":
        refused(b"One day\n", r"line 1 of '.*questions\.jsonl' is not JSON")
        refused(b'["a"]\n', r"line 1 of '.*questions\.jsonl'")
        refused(b"[" * 100_000 if name != "prompts" else b"[", r"line 1 of '.*' is not JSON")


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(InvalidParameterError, match=r"cannot read suite file '.*g\.jsonl': Permission denied"):
        read_suite(f"gsm8k:{tmp_path / 'g.jsonl'}")


GOOD = {
    "spec-bench": spec_bench_entry(1),
    "gsm8k": {"question": "Why?", "answer": "So."},
    "humaneval": {"task_id": "HumanEval/0", "prompt": "def f():"},
    "prompts": {"prompt": "One day"},
}


@pytest.mark.parametrize(
    ("name", "field", "value", "message"),
    [
        ("spec-bench", "turns", ..., 'has no "turns"'),
        ("spec-bench", "turns", "Why?", 'must be a list of texts, not "Why'),
        ("spec-bench", "turns", [], "must be a list of texts"),
        ("spec-bench", "turns", ["Why?", " "], r"turn 2 in line 2 of .* must be text that is not empty"),
        ("spec-bench", "turns", ["Why?", 3], r"turn 2 in line 2 of .* not 3"),
        ("spec-bench", "category", ..., 'has no "category"'),
        ("spec-bench", "category", None, '"category" in line 2'),
        ("spec-bench", "question_id", ..., 'has no "question_id"'),
        ("spec-bench", "question_id", True, '"question_id" in line 2'),
        ("spec-bench", "question_id", 1, "has the key '1' of line 1"),
        ("spec-bench", "question_id", "1", "has the key '1' of line 1"),
        ("gsm8k", "question", ..., 'has no "question"; expected is {"question": '),
        ("gsm8k", "question", "", '"question" in line 2 of .* not empty'),
        ("gsm8k", "question", ["Why?"], '"question" in line 2'),
        ("gsm8k", "question", "\ud800", "character 0 is a lone surrogate"),
        ("humaneval", "prompt", ..., 'has no "prompt"; expected is {"task_id": '),
        ("humaneval", "prompt", {"a": 1}, '"prompt" in line 2'),
        ("humaneval", "task_id", "HumanEval/0", "has the key 'HumanEval/0' of line 1"),
        ("humaneval", "task_id", 1.5, '"task_id" in line 2'),
        ("prompts", "prompt", ..., "has no prompt"),
        ("prompts", "prompt", "  ", "prompt 2 of .* must be text that is not empty"),
    ],
)
def test_bad_fields(name: str, field: str, value: Any, message: str, tmp_path: Path) -> None:
    other = {"question_id": 2, "task_id": "HumanEval/1"}
    bad = {**GOOD[name], **{key: each for key, each in other.items() if key in GOOD[name]}, field: value}
    if value is ...:
        del bad[field]
    path = write(tmp_path / "questions.jsonl", GOOD[name], bad)
    with pytest.raises(InvalidParameterError, match=message) as caught:
        read_suite(f"{name}:{path}")
    assert " 2 of " in str(caught.value)
    assert str(path) in str(caught.value)


# The hub


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
    assert parse_address("a/b::train") == ("a/b", None, "train", None)
    assert parse_address("a/b:c::d") == ("a/b", "c", "test", "d")


@pytest.mark.parametrize(
    ("spec", "rows", "message"),
    [
        ("hub:a:b:c:d:e", {}, "too many parts; expected is hub:NAME"),
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
    with pytest.raises(SelfSpecError, match=r"needs datasets; run: pip install 'selfspec\[bench\]'"):
        read_suite("hub:a")
