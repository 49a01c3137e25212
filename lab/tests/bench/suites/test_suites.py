"""Suites of ``selfspec bench run``: their questions, limits and streams."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.checkpoints import make_tokenizer
from selfspec.errors import InvalidParameterError
from selfspec.loading import bundled_models, load_model
from selfspec_lab.bench.suites import Question, read_suite
from selfspec_lab.bench.suites.mini import MINI
from selfspec_lab.bench.suites.selection import Selection
from selfspec_lab.prompts import PROMPTS
from suite_files import by_category, decode, keys, load, spec_bench_entry, write


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
        Question("a", "qa", ("Who?",), answer="She."),
    )


def test_gsm8k_has_the_form_of_the_bundled_checkpoints(tmp_path: Path) -> None:
    path = write(tmp_path / "g.jsonl", {"question": " How many? ", "answer": "2"}, {"question": "Why?", "answer": "3"})
    suite = load(f"gsm8k:{path}")
    assert not suite.chat
    assert suite.questions == (
        Question("gsm8k-1", "gsm8k", ("Question: How many?\nAnswer:",), messages=("How many?",), answer="2"),
        Question("gsm8k-2", "gsm8k", ("Question: Why?\nAnswer:",), messages=("Why?",), answer="3"),
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
    with pytest.raises(InvalidParameterError, match=f"context of {context} tokens leaves no place"):
        load(f"text:{tmp_path / 'book.txt'}", context=context)


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
    with pytest.raises(InvalidParameterError, match=f"limit must be at least 1 question per category, not {limit}"):
        read_suite("mini", limit=limit)


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
