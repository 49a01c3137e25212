"""Turns the questions of a suite into prompts (token ids) with the answers of plain decoding."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from selfspec import Engine
from selfspec.errors import ContextLengthError, InvalidPromptError
from selfspec.types import SamplingParams
from selfspec_lab.bench.suites import Question, Suite


@dataclass(frozen=True)
class RunPrompt:
    """A prompt of a run.

    Attributes:
        key: unique in the run: the question's key, followed by ``/`` and the number of the turn if it has several.
        category: the question's category.
        token_ids: the prompt.
        answer: token ids of plain decoding's output.
    """

    key: str
    category: str
    token_ids: tuple[int, ...]
    answer: tuple[int, ...] = ()


@dataclass(frozen=True)
class Skipped:
    """A prompt that is left out.

    Attributes:
        key: key of the prompt.
        category: the question's category.
        reason: why it is left out.
    """

    key: str
    category: str
    reason: str


def answer_suite(
    suite: Suite,
    plain: Engine,
    params: SamplingParams,
    *,
    chat: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[list[RunPrompt], list[Skipped]]:
    """Answers every turn of every question with plain decoding.

    A later turn follows plain decoding's answers to the earlier ones, so all candidates get the same prompts. A turn
    that exceeds the context is left out, with all turns after it.

    Args:
        suite: the questions.
        plain: plain decoding.
        params: sampling parameters.
        chat: whether questions are chat messages for the chat template; otherwise they are texts to continue.
        progress: is called with a line of text before each question.

    Returns:
        The prompts with their answers, and the prompts left out.
    """
    prompts: list[RunPrompt] = []
    skipped: list[Skipped] = []
    for number, question in enumerate(suite.questions, start=1):
        progress(f"plain answers: question {number} of {len(suite.questions)}")
        messages: list[dict[str, str]] = []
        for key, turn in _turns(question, chat=chat):
            messages.append({"role": "user", "content": turn if isinstance(turn, str) else ""})
            try:
                token_ids = _encode(plain, turn, messages, chat=chat)
                plain.target.check_length(len(token_ids), params.max_new_tokens)
            except (ContextLengthError, InvalidPromptError) as error:
                skipped.append(Skipped(key, question.category, str(error)))
                break
            answer = plain.generate(token_ids, params)
            messages.append({"role": "assistant", "content": answer.text})
            prompts.append(RunPrompt(key, question.category, tuple(token_ids), answer.token_ids))
    return prompts, skipped


def _turns(question: Question, *, chat: bool) -> Sequence[tuple[str, str | tuple[int, ...]]]:
    """The question's turns with the keys of their prompts."""
    if question.token_ids is not None:
        return [(question.key, question.token_ids)]
    turns = (question.messages or question.turns) if chat else question.turns
    if len(turns) == 1:
        return [(question.key, turns[0])]
    return [(f"{question.key}/{number}", turn) for number, turn in enumerate(turns, start=1)]


def _encode(
    plain: Engine, turn: str | tuple[int, ...], messages: Sequence[Mapping[str, str]], *, chat: bool
) -> list[int]:
    """Token ids of a turn with the messages before it; passages of token ids are unchanged."""
    if not isinstance(turn, str):
        return plain.encode(turn)
    if chat:
        return plain.encode(list(messages))
    return plain.encode("\n\n".join(message["content"] for message in messages))
