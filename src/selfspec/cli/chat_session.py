"""A chat session: answers messages, with a method that can be switched."""

import sys
from collections.abc import Mapping
from dataclasses import replace

import typer

from selfspec.cli.chat_stats import AnswerLog, Counts
from selfspec.cli.terminal import TextWriter, own_warnings
from selfspec.conversation import Conversation
from selfspec.engine import Engine, Stream
from selfspec.methods import find_method, make_method
from selfspec.methods.settings import parse_settings
from selfspec.types import Round, SamplingParams


class ChatSession:
    """Prints answers to standard output and everything else to standard error.

    Args:
        engine: generates the answers.
        params: sampling parameters; ``max_new_tokens`` is the longest answer.
        system: the system prompt; ``None`` uses the chat template's own, if it has one.
        show_drafts: colour accepted draft tokens.
        interactive: whether Ctrl-C stops an answer instead of the chat.

    Attributes:
        engine: generates the next answer.
        conversation: the messages so far.
        show_drafts: colour accepted draft tokens.
        last: the method and the counts of the last answer.
        total: the counts of all answers.
        rounds: of all answers.

    Raises:
        InvalidPromptError: the chat template refuses the system prompt.
    """

    def __init__(
        self,
        engine: Engine,
        params: SamplingParams,
        *,
        system: str | None = None,
        show_drafts: bool = False,
        interactive: bool = False,
    ) -> None:
        self.engine = engine
        self.conversation = Conversation(engine.encode, engine.target.room, max_new_tokens=params.max_new_tokens)
        if system is not None:
            self.conversation.set_system(system)
        self.show_drafts = show_drafts
        self.last: tuple[str, Counts] | None = None
        self.total = Counts()
        self.rounds: list[Round] = []
        self._engines = {(engine.method.name, engine.method.settings): engine}
        self._params = params
        self._interactive = interactive

    def answer(self, message: str) -> None:
        """Answers a message and adds both to the conversation.

        Args:
            message: the user's message.

        Raises:
            SelfSpecError: it cannot be answered; the conversation is unchanged.
        """
        turn = self.conversation.begin(message)
        if turn.left_out:
            say(f"(the conversation no longer fits the context: {_oldest(turn.left_out)} left out)")
        params = replace(self._params, max_new_tokens=turn.max_new_tokens)
        stream, log = self.engine.stream(turn.token_ids, params), AnswerLog()
        with own_warnings():
            finished = self._write(stream, log)
        if finished or log.text:
            self.conversation.keep(turn, stream.result.text if finished else log.text)
            self.last = (self.engine.method.name, log.counts(stream))
            self.total += self.last[1]
            self.rounds += stream.rounds
        self._say_how_it_ended(stream, log, finished)

    def switch(self, name: str, values: Mapping[str, str]) -> None:
        """Switches the drafting method. A method that was used before keeps what it has learned.

        Args:
            name: name of the method.
            values: settings by name; the others keep their defaults.

        Raises:
            UnknownMethodError: no method has this name.
            InvalidSettingError: a setting is unknown, out of range, or does not fit this model.
        """
        chosen = find_method(name)
        key = chosen.name, parse_settings(chosen.Settings, chosen.name, values)
        if key not in self._engines:
            target = self.engine.target
            method = make_method(chosen, target, values)
            prefixes = self.engine.prefix_cache or 0
            self._engines[key] = Engine(target.model, self.engine.tokenizer, method, prefix_cache=prefixes)
        self.engine = self._engines[key]

    def _write(self, stream: Stream, log: AnswerLog) -> bool:
        """Prints an answer as it is generated; returns false if it was stopped."""
        writer = TextWriter(sys.stdout, show_drafts=self.show_drafts)
        try:
            for piece in stream:
                log.note(piece)
                writer.write(piece)
        except KeyboardInterrupt:
            if not self._interactive:
                raise
            return False
        finally:
            if log.text and not log.text.endswith("\n"):
                sys.stdout.write("\n")
            sys.stdout.flush()
        return True

    def _say_how_it_ended(self, stream: Stream, log: AnswerLog, finished: bool) -> None:
        """Reports why an answer ended, unless the model ended it."""
        if not finished:
            say("(stopped)" if log.text else "(stopped before the first word; the message is dropped)")
        elif stream.result.finish_reason == "length":
            count = stream.result.new_token_count
            full = count < self._params.max_new_tokens
            say(f"(cut off after {count} tokens: {'the context is full' if full else '--max-new-tokens'})")
        elif not log.text:
            say("(the answer is empty)")


def say(text: str) -> None:
    """Prints a line that is not part of an answer to standard error."""
    typer.echo(text, err=True)


def _oldest(count: int) -> str:
    return "the oldest message and its answer are" if count == 1 else f"the {count} oldest messages and answers are"
