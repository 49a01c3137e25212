"""Specs and files that are refused."""

from pathlib import Path
from typing import Any

import pytest

from selfspec.errors import InvalidParameterError
from selfspec_lab.bench.suites import SUITES, read_suite
from suite_files import spec_bench_entry, write


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


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("minni", "no suite 'minni'; did you mean 'mini'"),
        ("questions.jsonl", "no suite 'questions.jsonl'.*choose from mini, spec-bench:FILE, "),
        ("", "no suite ''"),
        ("code", "'code' is a category of mini, not a suite; write stream:code"),
        ("mini:x", "'mini' is bundled and takes no file"),
        ("gsm8k", "'gsm8k' lacks a name after the colon; expected is gsm8k:FILE"),
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
