"""Messages of a chat and its commands, which begin with a slash."""

import re
import sys
from collections.abc import Callable
from typing import NamedTuple

from selfspec.cli.chat_session import ChatSession, say
from selfspec.cli.parts_text import parts_lines
from selfspec.cli.settings import parse_assignments
from selfspec.cli.terminal import takes_colour
from selfspec.errors import SelfSpecError
from selfspec.methods import METHODS
from selfspec.methods.base import Method
from selfspec.methods.settings import setting_values


class Command(NamedTuple):
    """A command of the chat: the syntax of its arguments, one line of help, and the function that runs it."""

    arguments: str
    help: str
    run: Callable[[str], None]


class ChatCommands:
    """Runs commands and sends messages to the session.

    Args:
        session: answers the messages.

    Attributes:
        session: answers the messages.
        commands: the commands by name, including the slash.
        failed: whether a message or a command failed.
        ended: whether the chat has ended.
    """

    def __init__(self, session: ChatSession) -> None:
        self.session = session
        self.failed = False
        self.ended = False
        self.commands = {
            "/help": Command("", "lists the commands", self._help),
            "/stats": Command("", "speed and acceptance of the last answer and of the whole chat", self._stats),
            "/method": Command("[NAME [KEY=VALUE ...]]", "shows the drafting method, or changes it", self._method),
            "/drafts": Command("", "turns the colour of accepted draft tokens on or off", self._drafts),
            "/reset": Command("", "clears the conversation, but not the system prompt", self._reset),
            "/system": Command(
                "[TEXT]", "shows the system prompt, or changes it and clears the conversation", self._system
            ),
            "/exit": Command("", "ends the chat", self._exit),
        }

    def read(self, text: str) -> None:
        """Runs a command or answers a message. An error is reported in one line on standard error.

        Args:
            text: a message, or a command, which begins with one slash. Two slashes begin a message with one.
        """
        try:
            if text.startswith("/") and not text.startswith("//"):
                self._run(text)
            elif text.strip():
                self.session.answer(text.removeprefix("/"))
        except SelfSpecError as error:
            self.complain(str(error))

    def complain(self, message: str) -> None:
        """Reports an error in one line on standard error."""
        self.failed = True
        say(f"error: {' '.join(message.split())}")

    def _run(self, text: str) -> None:
        name, *arguments = text.split(maxsplit=1)
        if name in self.commands:
            self.commands[name].run("".join(arguments).strip())
        else:
            self.complain(
                f"there is no command '{name}'; to send a message that begins with a slash, begin it with two"
            )
            self._help("")

    def _help(self, _: str) -> None:
        usages = {f"{name} {command.arguments}": command.help for name, command in self.commands.items()}
        for usage, text in usages.items():
            say(f"{usage:<32}{text}")

    def _stats(self, _: str) -> None:
        last, total = self.session.last, self.session.total
        if last is None:
            say("there is no answer yet")
            return
        say(f"last answer, {last[0]}: {last[1]}")
        say(f"whole chat, {total.answers} answer{'s' * (total.answers > 1)}: {total}")
        for line in parts_lines(self.session.rounds):
            say(line)

    def _method(self, arguments: str) -> None:
        if arguments:
            # The name of a cascade may have spaces between its parts.
            name, *assignments = re.findall(r"[^\s(]+\([^)]*\)?|\S+", arguments)
            self.session.switch(name, parse_assignments(assignments, "/method"))
        say(f"method: {_describe(self.session.engine.method)}")
        if not arguments:
            say(f"methods: {', '.join(METHODS)}")

    def _drafts(self, _: str) -> None:
        self.session.show_drafts = not self.session.show_drafts
        if not self.session.show_drafts:
            say("accepted draft tokens are no longer coloured")
        elif takes_colour(sys.stdout):
            say("accepted draft tokens are coloured green")
        else:
            say("accepted draft tokens are not coloured: colours are off (NO_COLOR is set, or this is no terminal)")

    def _reset(self, _: str) -> None:
        self.session.conversation.reset()
        say("the conversation is cleared")

    def _system(self, arguments: str) -> None:
        conversation = self.session.conversation
        if arguments:
            conversation.set_system(arguments)
            say("the system prompt is changed and the conversation is cleared")
        else:
            say(f"system prompt: {conversation.system or 'that of the chat template, if it has one'}")

    def _exit(self, _: str) -> None:
        self.ended = True


def _describe(method: Method) -> str:
    """A method's name and the settings that differ from the defaults."""
    defaults = setting_values(method.Settings())
    values = setting_values(method.settings)
    return " ".join([method.name, *(f"{name}={value}" for name, value in values.items() if value != defaults[name])])
