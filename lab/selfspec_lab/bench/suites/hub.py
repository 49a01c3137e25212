"""Suites from data sets of the Hugging Face hub, read with ``datasets`` (``selfspec-lab[bench]``)."""

import importlib
import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from selfspec.errors import InvalidParameterError, SelfSpecError
from selfspec_lab.bench.suites.files import check_turn, first_text
from selfspec_lab.bench.suites.types import Question, ReadyPart

FORM = "hub:NAME[:CONFIG[:SPLIT[:COLUMN[:ANSWERS]]]]"

_CHAT_COLUMNS = ("turns", "question", "instruction")
_TEXT_COLUMN = "text"
_COLUMNS = (*_CHAT_COLUMNS, "prompt", _TEXT_COLUMN)
"""Columns that hold questions in most data sets, the most likely first."""


class Address(NamedTuple):
    """A column of a data set.

    Attributes:
        name: name of the data set, ``owner/name`` or ``name``.
        config: configuration; ``None`` for the default.
        split: split.
        column: column with the questions; ``None`` for the first known column.
        answers: column with their answers; ``None`` for none.
    """

    name: str
    config: str | None
    split: str
    column: str | None
    answers: str | None = None


def parse_address(text: str) -> Address:
    """Parses the text after ``hub:``; missing or empty parts have defaults, ``test`` for the split.

    Raises:
        InvalidParameterError: the text has another form.
    """
    name, *rest = text.split(":")
    if len(rest) > 4:
        raise InvalidParameterError(f"'hub:{text}' has too many parts; expected is {FORM}")
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):
        raise InvalidParameterError(
            f"'{name}' is not the name of a data set on the hub; expected is {FORM} (prompts:FILE reads a file)"
        )
    config, split, column, answers = [*rest, "", "", "", ""][:4]
    return Address(name, config or None, split or "test", column or None, answers or None)


def hub_part(address: Address) -> ReadyPart:
    """Reads the questions of a data set.

    The column has texts or lists of texts (turns). Lists, and columns named ``turns``, ``question`` or ``instruction``,
    are chat messages; other texts are to be continued. Rows without text are left out. The column ``category``, if
    present, has the categories; otherwise the data set's name is the only category.

    Raises:
        SelfSpecError: ``datasets`` is not installed, or the hub cannot be reached.
        InvalidParameterError: data set, configuration, split or column do not exist, or the column holds no text.
    """
    rows = _load(address)
    column = _find_column(rows.column_names, address)
    values = list(rows[column])
    categories = list(rows["category"]) if "category" in rows.column_names else [None] * len(values)
    answers = list(rows[_check_answers(rows.column_names, address)]) if address.answers else [""] * len(values)
    questions = tuple(_questions(address.name.rpartition("/")[2], column, values, categories, answers))
    if not questions:
        raise InvalidParameterError(
            f"column '{column}' of {_describe(address)} holds no text; name another column: {FORM}"
        )
    return ReadyPart(questions, chat=column in _CHAT_COLUMNS or isinstance(values[0], list))


def _load(address: Address) -> Any:
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError as error:
        raise SelfSpecError(
            "a suite from the hub needs datasets; run `pip install './lab[bench]'` in a checkout of selfspec"
        ) from error
    try:
        return datasets.load_dataset(address.name, address.config, split=address.split)
    except ConnectionError as error:
        raise SelfSpecError(
            f"cannot reach the hub for {_describe(address)}, and it is not in the local cache; try again online, "
            "without HF_HUB_OFFLINE, or save its questions to a file and name that: prompts:FILE"
        ) from error
    except Exception as error:  # any error of datasets, pyarrow or the hub client
        reason = textwrap.shorten(str(error) or type(error).__name__, 240, placeholder=" …")
        raise InvalidParameterError(f"cannot load {_describe(address)}: {reason} (expected is {FORM})") from error


def _find_column(columns: Sequence[str], address: Address) -> str:
    wanted = [address.column] if address.column else _COLUMNS
    for column in wanted:
        if column in columns:
            return column
    missing = f"no column '{address.column}'" if address.column else f"none of the columns {', '.join(_COLUMNS)}"
    raise InvalidParameterError(f"{_describe(address)} has {missing}; name one of {', '.join(columns)}: {FORM}")


def _check_answers(columns: Sequence[str], address: Address) -> str:
    if address.answers in columns:
        return str(address.answers)
    raise InvalidParameterError(
        f"{_describe(address)} has no column '{address.answers}' of answers; name one of {', '.join(columns)}: {FORM}"
    )


def _questions(
    stem: str, column: str, values: Sequence[object], categories: Sequence[object], answers: Sequence[object]
) -> Iterator[Question]:
    for number, (value, category, answer) in enumerate(zip(values, categories, answers, strict=True), 1):
        turns = value if isinstance(value, list) else [value]
        if not turns or turns == [None] or (isinstance(value, str) and not value.strip()):
            continue
        checked = tuple(check_turn(turn, f"'{column}' in row {number} of '{stem}'") for turn in turns)
        named = isinstance(category, str) and category.strip()
        messages = tuple(f"Continue this text:\n\n{turn}" for turn in checked) if column == _TEXT_COLUMN else ()
        key, group = f"{stem}-{number}", str(category) if named else stem
        yield Question(key, group, checked, messages=messages, answer=first_text(answer))


def _describe(address: Address) -> str:
    config = f" ({address.config})" if address.config else ""
    return f"split '{address.split}' of the data set '{address.name}'{config}"
