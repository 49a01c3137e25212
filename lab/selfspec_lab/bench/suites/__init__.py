"""The suites of ``selfspec bench run``: bundled prompts, files of known benchmarks, texts, and streams of these."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from selfspec.errors import InvalidParameterError
from selfspec.methods.settings import suggest
from selfspec_lab.bench.suites.files import gsm8k_part, humaneval_part, prompts_part, spec_bench_part
from selfspec_lab.bench.suites.forms import FORMS, as_summaries, only, with_shots
from selfspec_lab.bench.suites.hub import FORM, hub_part, parse_address
from selfspec_lab.bench.suites.mini import MINI, mini_message
from selfspec_lab.bench.suites.selection import Selection
from selfspec_lab.bench.suites.text import text_part
from selfspec_lab.bench.suites.types import Encode, Part, Question, ReadyPart, Suite

__all__ = ["SUITES", "Encode", "Question", "Suite", "SuiteSource", "read_suite"]

SUITES = {
    "mini": ("mini", "bundled prompts: code, math, prose"),
    "spec-bench": ("spec-bench:FILE", "Spec-Bench's JSONL, chat of one or more turns"),
    "gsm8k": ("gsm8k:FILE", "JSONL of word problems"),
    "humaneval": ("humaneval:FILE", "JSONL of functions to write"),
    "text": ("text:FILE", "passages of a text, each of --context tokens"),
    "prompts": ("prompts:FILE", 'your own prompts: one per line, or JSONL with "prompt"'),
    "hub": (FORM, "a data set of the Hugging Face hub"),
    "only": ("only:CATEGORY+CATEGORY:SUITE", "some categories of a suite: only:summarization:spec-bench:FILE"),
    "shots": ("shots:N:SUITE", "texts to continue: N questions with answers, then a question"),
    "summary": ("summary:SUITE", "texts or passages to summarise"),
    "stream": ("stream:SUITE+SUITE+...", "suites, or categories of mini, one after another: stream:code+math+prose"),
}
"""By name of a suite: its form, and its description."""

_FILES: dict[str, Callable[[Path], ReadyPart]] = {
    "spec-bench": spec_bench_part,
    "gsm8k": gsm8k_part,
    "humaneval": humaneval_part,
    "prompts": prompts_part,
}


@dataclass(frozen=True)
class SuiteSource:
    """A suite whose files have been read and checked, before a tokenizer is known.

    Attributes:
        name: the spec without folders.
        parts: groups of questions, in order.
        ordered: whether it is a stream.
        chat: whether all turns are chat messages.
    """

    name: str
    parts: tuple[Part, ...]
    ordered: bool
    chat: bool

    def load(self, encode: Encode, context: int) -> Suite:
        """Makes the suite.

        Args:
            encode: the model's tokenizer.
            context: length of the passages of ``text:FILE``, in tokens; other suites ignore it.

        Raises:
            InvalidParameterError: a text is shorter than a passage.
        """
        questions = [question for part in self.parts for question in part.questions(encode, context)]
        return Suite(self.name, _with_own_keys(questions), self.ordered, self.chat)


def read_suite(spec: str, *, limit: int | None = None, seed: int = 0) -> SuiteSource:
    """Reads and checks a suite, without a model.

    Args:
        spec: one of the forms in ``SUITES``. Paths within a stream cannot contain ``+``.
        limit: most questions per category, spread evenly over it; for a text, most passages. In a stream it applies to
            each part separately.
        seed: seed of the choice of questions.

    Raises:
        InvalidParameterError: the suite is unknown, a file is missing or has another form, or the limit is below 1.
        SelfSpecError: a hub suite cannot be read.
    """
    selection = Selection(limit, seed)
    if spec.partition(":")[0] == "stream":
        return _read_stream(spec, selection)
    part = _chosen(_read_part(spec, selection, list(SUITES)), selection)
    return SuiteSource(_without_folders(spec), (part,), ordered=False, chat=part.chat)


def _read_stream(spec: str, selection: Selection) -> SuiteSource:
    specs = [each.strip() for each in spec.partition(":")[2].split("+")]
    if not all(specs):
        raise InvalidParameterError(f"'{spec}' has an empty part; expected is {SUITES['stream'][0]}")
    known = [*MINI, *(name for name in SUITES if name != "stream")]
    parts = [_chosen(_read_part(each, selection, known), selection) for each in specs]
    name = "+".join(_without_folders(each) for each in specs)
    return SuiteSource(f"stream:{name}", tuple(parts), ordered=True, chat=all(part.chat for part in parts))


def _read_part(spec: str, selection: Selection, known: Sequence[str]) -> Part:
    """Reads all questions of one suite, or one category of mini, if its name is in ``known``; of a text, passages."""
    name, colon, rest = spec.partition(":")
    if name not in known:
        raise InvalidParameterError(_unknown(name, known))
    if name == "mini" or name in MINI:
        if colon:
            raise InvalidParameterError(f"'{name}' is bundled and takes no file, but this is '{spec}'")
        return _mini_part(MINI if name == "mini" else [name])
    if not rest.strip():
        raise InvalidParameterError(f"'{spec}' lacks a name after the colon; expected is {SUITES[name][0]}")
    if name in FORMS:
        return _read_form(name, rest, selection, known)
    if name == "hub":
        return hub_part(parse_address(rest))
    if name == "text":
        return text_part(_expand(rest), selection)
    return _FILES[name](_expand(rest))


def _read_form(name: str, rest: str, selection: Selection, known: Sequence[str]) -> Part:
    """Reads a suite in a form of ``FORMS``."""
    if name == "summary":
        return as_summaries(_read_part(rest, selection, known))
    value, _, inner = rest.partition(":")
    part = _read_part(inner, selection, known)
    if not isinstance(part, ReadyPart):
        raise InvalidParameterError(f"'{name}:{rest}' needs questions, not passages of a text; {SUITES[name][0]}")
    if name == "only":
        return only(part, [each.strip() for each in value.split("+")])
    if not value.isdecimal() or int(value) < 1:
        raise InvalidParameterError(f"'{name}:{rest}' needs a number of examples; expected is {SUITES[name][0]}")
    return with_shots(part, int(value))


def _chosen(part: Part, selection: Selection) -> Part:
    return replace(part, ready=selection.choose(part.ready)) if isinstance(part, ReadyPart) else part


def _unknown(name: str, known: Sequence[str]) -> str:
    if name in MINI:
        return f"'{name}' is a category of mini, not a suite; write stream:{name}"
    forms = ", ".join(SUITES[each][0] if each in SUITES else each for each in known)
    return f"there is no suite '{name}'{suggest(name, dict.fromkeys(known))}; choose from {forms}"


def _mini_part(categories: Iterable[str]) -> ReadyPart:
    return ReadyPart(
        tuple(
            Question(f"{category}-{number}", category, (prompt,), messages=(mini_message(category, prompt),))
            for category in categories
            for number, prompt in enumerate(MINI[category], 1)
        )
    )


def _expand(path: str) -> Path:
    """Expands ``~``, which a shell does not expand in ``text:~/book.txt``."""
    try:
        return Path(path).expanduser()
    except RuntimeError:  # no such user; reading the file will raise an error
        return Path(path)


def _without_folders(spec: str) -> str:
    name, colon, rest = spec.partition(":")
    if name in FORMS:
        value, between, inner = ("", "", rest) if name == "summary" else rest.partition(":")
        return f"{name}{colon}{value}{between}{_without_folders(inner)}"
    return f"{name}{colon}{rest if name == 'hub' else Path(rest).name}"


def _with_own_keys(questions: Iterable[Question]) -> tuple[Question, ...]:
    """Makes keys unique; the second question with a key gets ``key#2``."""
    taken: set[str] = set()
    renamed = []
    for question in questions:
        key, number = question.key, 1
        while key in taken:
            number += 1
            key = f"{question.key}#{number}"
        taken.add(key)
        renamed.append(replace(question, key=key))
    return tuple(renamed)
