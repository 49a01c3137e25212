"""Suites from files: JSONL with one question per line in the form of a benchmark, or one prompt per line."""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from selfspec.errors import InvalidParameterError, InvalidPromptError
from selfspec_lab.bench.suites.types import Question, ReadyPart
from selfspec_lab.tuning import read_prompts

Entry = dict[str, Any]

SPEC_BENCH_FORM = '{"question_id": 81, "category": "writing", "turns": ["...", ...]}'
GSM8K_FORM = '{"question": "...", "answer": "..."}'
HUMANEVAL_FORM = '{"task_id": "HumanEval/0", "prompt": "..."}'


def spec_bench_part(path: Path) -> ReadyPart:
    """Reads questions of Spec-Bench (Xia et al., 2024), or a file in its form, which is that of MT-Bench."""
    return ReadyPart(_read(path, SPEC_BENCH_FORM, _spec_bench_question), chat=True)


def gsm8k_part(path: Path) -> ReadyPart:
    """Reads problems of GSM8K (Cobbe et al., 2021), in the format that the bundled checkpoints were trained on."""
    return ReadyPart(_read(path, GSM8K_FORM, _gsm8k_question))


def humaneval_part(path: Path) -> ReadyPart:
    """Reads functions of HumanEval (Chen et al., 2021): signatures and docstrings to complete."""
    return ReadyPart(_read(path, HUMANEVAL_FORM, _humaneval_question))


def prompts_part(path: Path) -> ReadyPart:
    """Reads prompts, one per line, or ``.jsonl`` with a ``prompt`` in each object. The category is the file's stem."""
    read_text(path)  # its error names the line that is not UTF-8
    try:
        prompts = read_prompts(path)
    except InvalidPromptError as error:
        raise InvalidParameterError(str(error)) from error
    stem = path.stem
    return ReadyPart(
        tuple(
            Question(f"{stem}-{number}", stem, (check_turn(prompt, f"prompt {number} of '{path}'"),))
            for number, prompt in enumerate(prompts, 1)
        )
    )


def read_text(path: Path) -> str:
    """Reads a text file.

    Raises:
        InvalidParameterError: it cannot be read, or is not UTF-8.
    """
    try:
        # utf-8-sig removes a byte order mark, which some editors write.
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError as error:
        raise InvalidParameterError(f"there is no suite file '{path}'") from error
    except IsADirectoryError as error:
        raise InvalidParameterError(f"'{path}' is a folder; name a file in it") from error
    except OSError as error:
        raise InvalidParameterError(f"cannot read suite file '{path}': {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise InvalidParameterError(
            f"line {line} of '{path}' is not UTF-8: byte 0x{error.object[error.start]:02x}; save the file as UTF-8"
        ) from error


def check_turn(text: object, where: str) -> str:
    """Checks and returns the text of a turn.

    Raises:
        InvalidParameterError: it is not text, is empty, or is not valid Unicode.
    """
    if not isinstance(text, str) or not text.strip():
        raise InvalidParameterError(
            f"{where} must be text that is not empty, not {json.dumps(text, default=repr)[:80]}"
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidParameterError(
            f"{where} is not valid text: character {error.start} is a lone surrogate, {text[error.start]!r}; "
            "write the whole pair, or remove it"
        ) from error
    return text


def _read(path: Path, form: str, make: Callable[[Entry, int, str], Question]) -> tuple[Question, ...]:
    """Reads the questions of a JSONL file.

    Args:
        path: the file.
        form: form of a line, for messages.
        make: makes a question from an object, its line number, and its description for messages.

    Raises:
        InvalidParameterError: a line has another form, two lines have the same key, or there are none.
    """
    questions: dict[str, Question] = {}
    lines: dict[str, int] = {}
    for number, entry in _objects(path, form):
        where = f"line {number} of '{path}'"
        try:
            question = make(entry, number, where)
        except InvalidParameterError as error:
            raise InvalidParameterError(f"{error}; expected is {form}") from error
        if question.key in questions:
            raise InvalidParameterError(
                f"{where} has the key '{question.key}' of line {lines[question.key]}; give each question its own key"
            )
        questions[question.key], lines[question.key] = question, number
    if not questions:
        raise InvalidParameterError(f"'{path}' has no questions; expected is one object per line: {form}")
    return tuple(questions.values())


def _objects(path: Path, form: str) -> Iterator[tuple[int, Entry]]:
    # Not splitlines: JSON strings may contain its other line separators.
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidParameterError(
                f"line {number} of '{path}' is not JSON ({error}); expected is one object per line: {form}"
            ) from error
        if not isinstance(entry, dict):
            raise InvalidParameterError(f"line {number} of '{path}' is not an object; expected is {form}")
        yield number, entry


def _spec_bench_question(entry: Entry, number: int, where: str) -> Question:
    turns = _field(entry, "turns", where)
    if not isinstance(turns, list) or not turns:
        raise InvalidParameterError(f'"turns" in {where} must be a list of texts, not {json.dumps(turns)[:80]}')
    return Question(
        key=_identifier(entry, "question_id", where),
        category=_text(entry, "category", where),
        turns=tuple(_turns(turns, where)),
        answer=first_text(entry.get("reference")),
    )


def _turns(turns: Iterable[object], where: str) -> Iterator[str]:
    for number, turn in enumerate(turns, 1):
        yield check_turn(turn, f"turn {number} in {where}")


def _gsm8k_question(entry: Entry, number: int, where: str) -> Question:
    problem = _text(entry, "question", where).strip()
    turn, answer = f"Question: {problem}\nAnswer:", first_text(entry.get("answer"))
    return Question(f"gsm8k-{number}", "gsm8k", (turn,), messages=(problem,), answer=answer)


def _humaneval_question(entry: Entry, number: int, where: str) -> Question:
    prompt = _text(entry, "prompt", where)
    request = f"Complete this Python function:\n\n{prompt}"
    answer = first_text(entry.get("canonical_solution"))
    return Question(_identifier(entry, "task_id", where), "humaneval", (prompt,), messages=(request,), answer=answer)


def first_text(value: object) -> str:
    """An answer: a text, or the first of a list of texts; empty without one."""
    first = value[0] if isinstance(value, list) and value else value
    return first.strip() if isinstance(first, str) else ""


def _field(entry: Entry, name: str, where: str) -> object:
    if name not in entry:
        raise InvalidParameterError(f'{where} has no "{name}"')
    return entry[name]


def _text(entry: Entry, name: str, where: str) -> str:
    return check_turn(_field(entry, name, where), f'"{name}" in {where}')


def _identifier(entry: Entry, name: str, where: str) -> str:
    value = _field(entry, name, where)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return check_turn(value, f'"{name}" in {where}')
