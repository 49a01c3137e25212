"""A conversation with a chat model: its messages, and which of them fit the model's context."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from selfspec.errors import ContextLengthError

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
class Turn:
    """A user's message with the prompt that answers it. Returned by ``Conversation.begin``.

    Attributes:
        user: the message.
        messages: the prompt as messages: the system prompt, the exchanges that fit, the user's message.
        token_ids: the prompt as token ids.
        max_new_tokens: longest answer, in tokens.
        left_out: number of the oldest exchanges that do not fit the context.
    """

    user: str
    messages: tuple[Message, ...]
    token_ids: tuple[int, ...]
    max_new_tokens: int
    left_out: int


class Conversation:
    """The exchanges of a chat, as many as fit the model's context.

    ``begin`` changes nothing; ``keep`` does. A message that could not be answered is not part of the conversation.

    Args:
        encode: maps messages to token ids with the model's chat template.
        room: maps the length of a prompt in tokens to the number of new tokens that fit after it; zero or negative if
            none do.
        max_new_tokens: longest answer, in tokens.
        system: the system prompt; ``None`` uses the chat template's own, if it has one.

    Attributes:
        system: the system prompt.
        exchanges: the exchanges that the next prompt is made of, oldest first.
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

    def begin(self, user: str) -> Turn:
        """Builds the prompt for a message.

        The oldest exchanges are left out, as few as possible, until the answer fits: ``max_new_tokens``, but at most a
        quarter of the context. The system prompt and the message always stay.

        Args:
            user: the message.

        Returns:
            The message with its prompt.

        Raises:
            ContextLengthError: the message does not fit the context even without any exchange.
            SelfSpecError: ``encode`` refused the messages.
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
        return Turn(user, tuple(messages), token_ids, min(self._max_new_tokens, room), left_out)

    def keep(self, turn: Turn, answer: str) -> None:
        """Adds a message and its answer, and drops the exchanges that the turn left out.

        Args:
            turn: returned by the last ``begin``.
            answer: the answer, complete or stopped early.
        """
        self.exchanges = [*self.exchanges[turn.left_out :], Exchange(turn.user, answer)]

    def reset(self) -> None:
        """Removes all exchanges. The system prompt stays."""
        self.exchanges = []

    def set_system(self, system: str) -> None:
        """Sets the system prompt and removes all exchanges.

        Args:
            system: the system prompt.

        Raises:
            SelfSpecError: ``encode`` refuses it; the conversation is unchanged.
        """
        self._encode([_message("system", system), _message("user", "Hello")])
        self.system = system
        self.reset()

    def _messages(self, exchanges: Sequence[Exchange], user: str) -> list[Message]:
        messages = [] if self.system is None else [_message("system", self.system)]
        for exchange in exchanges:
            messages += [_message("user", exchange.user), _message("assistant", exchange.assistant)]
        return [*messages, _message("user", user)]


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
