"""A chat session: the conversation, answers to its messages, and a method that can be switched."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import typer

from selfspec.chat_encoder import ChatEncoder
from selfspec.cli.stats import Counts
from selfspec.cli.terminal import TextWriter, own_warnings
from selfspec.engine import Engine, Stream
from selfspec.engine_options import EngineOptions
from selfspec.errors import ContextLengthError
from selfspec.loading.adapter_files import find_adapter
from selfspec.methods import find_method, make_method
from selfspec.types import SamplingParams

Message = dict[str, str]
"""``role`` (system, user or assistant) and ``content``, as chat templates take them."""

ANSWER_SHARE = 4
"""Old exchanges are dropped until one ``ANSWER_SHARE``-th of the context is free for the answer."""


@dataclass(frozen=True)
class Exchange:
    """A user's message and the answer to it."""

    user: str
    assistant: str


@dataclass(frozen=True)
class ChatTurn:
    """A user's message with the prompt that answers it, and how many of the oldest exchanges the prompt leaves out."""

    user: str
    messages: tuple[Message, ...]
    token_ids: tuple[int, ...]
    max_new_tokens: int
    left_out: int


class Conversation:
    """The exchanges of a chat, as many as fit the model's context.

    ``begin`` changes nothing; ``keep`` does. A message that could not be answered is not part of the conversation.
    ``encode`` applies the model's chat template; ``room`` maps the length of a prompt to the number of new tokens that
    fit after it. Without a system prompt the chat template's own is used, if it has one.
    """

    def __init__(
        self,
        encode: Callable[[list[Message]], Sequence[int]],
        room: Callable[[int], int],
        *,
        max_new_tokens: int,
        system: str | None = None,
    ) -> None:
        self.system = system
        self.exchanges: list[Exchange] = []
        self._encode = encode
        self._room = room
        self._max_new_tokens = max_new_tokens

    def begin(self, user: str) -> ChatTurn:
        """Builds the prompt for a message; raises ``ContextLengthError`` if it does not fit even alone.

        The oldest exchanges are left out, as few as possible, until the answer fits: ``max_new_tokens``, but at most a
        quarter of the context. The system prompt and the message always stay.
        """
        wanted = max(1, min(self._max_new_tokens, self._room(0) // ANSWER_SHARE))
        for left_out in range(len(self.exchanges) + 1):
            messages = self._messages(self.exchanges[left_out:], user)
            token_ids = tuple(self._encode(messages))
            room = self._room(len(token_ids))
            if room >= wanted:
                break
        if room < 1:
            raise ContextLengthError(
                f"the message has {len(token_ids)} tokens with the system prompt, and the model's context of "
                f"{self._room(0)} leaves no room for an answer; shorten it"
            )
        return ChatTurn(user, tuple(messages), token_ids, min(self._max_new_tokens, room), left_out)

    def keep(self, turn: ChatTurn, answer: str) -> None:
        """Adds a message and its answer, and drops the exchanges that the turn left out."""
        self.exchanges = [*self.exchanges[turn.left_out :], Exchange(turn.user, answer)]

    def reset(self) -> None:
        """Removes all exchanges. The system prompt stays."""
        self.exchanges = []

    def set_system(self, system: str) -> None:
        """Sets the system prompt and removes all exchanges; nothing changes if the chat template refuses it."""
        self._encode([_message("system", system), _message("user", "Hello")])
        self.system = system
        self.reset()

    def _messages(self, exchanges: Sequence[Exchange], user: str) -> list[Message]:
        messages = [] if self.system is None else [_message("system", self.system)]
        for exchange in exchanges:
            messages += [_message("user", exchange.user), _message("assistant", exchange.assistant)]
        return [*messages, _message("user", user)]


class ChatSession:
    """Prints answers to standard output and everything else to standard error. The engine has a tokenizer.

    ``last`` has the method and the counts of the last answer, ``total`` those of all answers. In an interactive session
    Ctrl-C stops the answer instead of the chat.
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
        assert engine.tokenizer is not None
        encoder = ChatEncoder(engine.tokenizer, engine.target.vocab_size)
        self.conversation = Conversation(encoder.encode_chat, engine.target.room, max_new_tokens=params.max_new_tokens)
        if system is not None:
            self.conversation.set_system(system)
        self.show_drafts = show_drafts
        self.last: tuple[str, Counts] | None = None
        self.total = Counts()
        self._engines = {(engine.method.name, engine.method.settings): engine}
        self._params = params
        self._interactive = interactive

    def answer(self, message: str) -> None:
        """Answers a message and adds both to the conversation, which stays unchanged after an error."""
        turn = self.conversation.begin(message)
        if turn.left_out:
            say(f"(the conversation no longer fits the context: {_oldest(turn.left_out)} left out)")
        params = replace(self._params, max_new_tokens=turn.max_new_tokens)
        stream = self.engine.stream(turn.token_ids, params)
        texts: list[str] = []
        times: list[float] = []
        with own_warnings():
            finished = self._write(stream, texts, times)
        text = stream.result.text if finished else "".join(texts)
        if finished or text:
            self.conversation.keep(turn, text)
            seconds = times[-1] - times[0] if times else 0.0
            self.last = (self.engine.method.name, Counts.of(stream, len(texts), seconds))
            self.total += self.last[1]
        self._report_end(stream, "".join(texts), finished)

    def switch(self, name: str, values: Mapping[str, str]) -> None:
        """Switches the drafting method. A method that was used before keeps what it has learned."""
        chosen = find_method(name)
        key = chosen.name, chosen.Settings.parse(chosen.name, values)
        if key not in self._engines:
            target = self.engine.target
            method = make_method(chosen, target, values)
            shared = EngineOptions(
                prefix_cache=self.engine.prefix_cache or 0,
                cache_dir=self.engine.kept,
                adapters=self.engine.options.adapters,
            )
            self._engines[key] = Engine(target.model, self.engine.tokenizer, method, shared)
        self.engine = self._engines[key]

    @property
    def adapter(self) -> str | None:
        """The adapter with which answers are written; ``None`` for the model itself."""
        return self._params.adapter

    def adapt(self, name: str | None) -> None:
        """Takes another adapter of the engine, or the model itself; the conversation stays."""
        find_adapter(self.engine.adapters, name)
        self._params = replace(self._params, adapter=name)

    def _write(self, stream: Stream, texts: list[str], times: list[float]) -> bool:
        """Prints an answer as it is generated, and notes its pieces; returns false if it was stopped."""
        writer = TextWriter(sys.stdout, show_drafts=self.show_drafts)
        try:
            for piece in stream:
                times.append(time.perf_counter())
                texts.append(piece.text)
                writer.write(piece)
        except KeyboardInterrupt:
            if not self._interactive:
                raise
            return False
        finally:
            if (text := "".join(texts)) and not text.endswith("\n"):
                sys.stdout.write("\n")
            sys.stdout.flush()
        return True

    def _report_end(self, stream: Stream, text: str, finished: bool) -> None:
        """Prints why an answer ended, unless the model ended it."""
        if not finished:
            say("(stopped)" if text else "(stopped before the first word; the message is dropped)")
        elif stream.result.finish_reason == "length":
            count = stream.result.new_token_count
            full = count < self._params.max_new_tokens
            say(f"(cut off after {count} tokens: {'the context is full' if full else '--max-new-tokens'})")
        elif not text:
            say("(the answer is empty)")


def say(text: str) -> None:
    """Prints a line that is not part of an answer to standard error."""
    typer.echo(text, err=True)


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _oldest(count: int) -> str:
    return "the oldest message and its answer are" if count == 1 else f"the {count} oldest messages and answers are"
