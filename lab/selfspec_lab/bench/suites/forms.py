"""Forms of the papers' prompts, made of other suites: some categories, examples before a question, summaries."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from selfspec.errors import InvalidParameterError
from selfspec_lab.bench.suites.text import shared_prefix
from selfspec_lab.bench.suites.types import Encode, Part, Question, ReadyPart

FORMS = ("only", "shots", "summary")
"""Names of the forms: ``only:A+B:SUITE``, ``shots:N:SUITE`` and ``summary:SUITE``."""

_BEFORE, _AFTER = "Article: ", "\nSummary:"


def only(part: ReadyPart, categories: Sequence[str]) -> ReadyPart:
    """The questions of some categories.

    Raises:
        InvalidParameterError: there are none of one of them.
    """
    present = dict.fromkeys(question.category for question in part.ready)
    for category in categories:
        if category not in present:
            raise InvalidParameterError(f"there is no category '{category}'; choose from {', '.join(present)}")
    return replace(part, ready=tuple(question for question in part.ready if question.category in categories))


def with_shots(part: ReadyPart, count: int) -> ReadyPart:
    """Questions after worked examples, as base models are asked: the first ``count`` ones with their answers.

    The examples are not asked themselves. The result are texts to continue.

    Raises:
        InvalidParameterError: the suite has no answers, or too few questions.
    """
    answered = [question for question in part.ready if question.answer and len(question.turns) == 1]
    if len(answered) <= count:
        raise InvalidParameterError(
            f"{count} examples and a question need {count + 1} questions with answers, but the suite has "
            f"{len(answered)}; gsm8k:FILE, humaneval:FILE and hub:NAME:CONFIG:SPLIT:COLUMN:ANSWERS have them"
        )
    examples = "".join(f"{each.turns[0]} {each.answer}\n\n" for each in answered[:count])
    return ReadyPart(tuple(replace(each, turns=(examples + each.turns[0],), messages=()) for each in answered[count:]))


def as_summaries(part: Part) -> Part:
    """Texts to summarise: each between ``Article:`` and ``Summary:``."""
    if not isinstance(part, ReadyPart):
        return _LongSummaries(part)
    return ReadyPart(
        tuple(
            replace(each, turns=tuple(f"{_BEFORE}{turn}{_AFTER}" for turn in each.turns), messages=())
            for each in part.ready
        )
    )


@dataclass(frozen=True)
class _LongSummaries:
    """Passages that were cut by tokens, to summarise.

    Attributes:
        part: the passages.
        chat: always false: they are texts to continue.
    """

    part: Part
    chat: bool = False

    def questions(self, encode: Encode, context: int) -> tuple[Question, ...]:
        """The passages, each before ``Summary:``, together ``context`` tokens."""
        prefix = shared_prefix(encode)
        before, after = encode(_BEFORE)[len(prefix) :], encode(_AFTER)[len(prefix) :]
        found = []
        for each in self.part.questions(encode, context - len(before) - len(after)):
            assert each.token_ids is not None
            tokens = (*prefix, *before, *each.token_ids[len(prefix) :], *after)
            found.append(replace(each, token_ids=tokens))
        return tuple(found)
