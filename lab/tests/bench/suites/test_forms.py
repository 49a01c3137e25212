"""The papers' forms of prompts: some categories, examples before a question, articles to summarise."""

from pathlib import Path

import pytest

from selfspec.errors import InvalidParameterError
from suite_files import by_category, decode, keys, load, spec_bench_entry, write


def gsm8k(folder: Path, count: int = 5) -> Path:
    return write(folder / "q.jsonl", *({"question": f"What is {n}?", "answer": f"It is {n}."} for n in range(count)))


def test_examples_come_before_a_question_and_are_not_asked(tmp_path: Path) -> None:
    suite = load(f"shots:2:gsm8k:{gsm8k(tmp_path)}")
    examples = "Question: What is 0?\nAnswer: It is 0.\n\nQuestion: What is 1?\nAnswer: It is 1.\n\n"
    assert [each.turns for each in suite.questions] == [
        (f"{examples}Question: What is {n}?\nAnswer:",) for n in (2, 3, 4)
    ]
    assert not suite.chat
    assert not any(each.messages for each in suite.questions)
    assert suite.name == "shots:2:gsm8k:q.jsonl"
    assert len(load(f"shots:2:gsm8k:{gsm8k(tmp_path)}", limit=1).questions) == 1


def test_categories_are_chosen(tmp_path: Path) -> None:
    entries = [spec_bench_entry(number, category) for number, category in enumerate("abcab")]
    path = write(tmp_path / "s.jsonl", *entries)
    assert by_category(load(f"only:a+c:spec-bench:{path}")) == {"a": 2, "c": 1}
    with pytest.raises(InvalidParameterError, match="no category 'd'; choose from a, b, c"):
        load(f"only:d:spec-bench:{path}")


def test_articles_are_summarised_with_examples(tmp_path: Path) -> None:
    entries = [
        {"question_id": n, "category": "sum", "turns": [f"Text {n}."], "reference": [f"Short {n}."]} for n in range(3)
    ]
    path = write(tmp_path / "s.jsonl", *entries)
    suite = load(f"shots:1:summary:spec-bench:{path}")
    assert suite.questions[0].turns == ("Article: Text 0.\nSummary: Short 0.\n\nArticle: Text 1.\nSummary:",)
    assert keys(suite) == ["1", "2"]


def test_long_texts_are_cut_so_that_the_prompt_has_the_context_asked(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("once upon a time " * 40, encoding="utf-8")
    suite = load(f"summary:text:{path}", context=64, limit=3)
    assert len(suite.questions) == 3
    for each in suite.questions:
        text = decode(each)
        assert len(each.token_ids or ()) == 64
        assert text.startswith("Article: ")
        assert text.endswith("\nSummary:")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("shots:x:gsm8k:{path}", "needs a number of examples"),
        ("shots:0:gsm8k:{path}", "needs a number of examples"),
        ("shots:5:gsm8k:{path}", "5 examples and a question need 6 questions with answers, but the suite has 5"),
        ("shots:1:mini", "but the suite has 0"),
        ("only:a:text:{path}", "needs questions, not passages"),
        ("summary:nothing:{path}", "there is no suite 'nothing'"),
        ("shots:2", "lacks a name|there is no suite"),
    ],
)
def test_mistakes_are_named(spec: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        load(spec.format(path=gsm8k(tmp_path)))
