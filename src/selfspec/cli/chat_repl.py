"""What the user types in a chat: messages, commands, which begin with a slash, and the prompt of a terminal."""

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from selfspec.cli.chat_session import ChatSession, say
from selfspec.cli.inputs import parse_assignments
from selfspec.cli.stats import draft_lines
from selfspec.cli.terminal import own_warnings, takes_colour
from selfspec.errors import SelfSpecError
from selfspec.files import cache_folder, check_own
from selfspec.methods import METHODS
from selfspec.methods.base import Method

HISTORY_FILE = "chat-history"
_MENU_LINES = 4


class Command(NamedTuple):
    """A command of the chat: the syntax of its arguments, one line of help, and the function that runs it."""

    arguments: str
    help: str
    run: Callable[[str], None]


class ChatCommands:
    """Runs commands and sends messages to the session.

    ``commands`` are the commands by name, including the slash. ``failed`` is true once a message or a command failed,
    ``ended`` once the user has left.
    """

    def __init__(self, session: ChatSession) -> None:
        self.session = session
        self.failed = False
        self.ended = False
        self.commands = {
            "/help": Command("", "lists the commands", self._help),
            "/stats": Command("", "speed and acceptance of the last answer and of the whole chat", self._stats),
            "/method": Command("[NAME [KEY=VALUE ...]]", "shows the drafting method, or changes it", self._method),
            "/adapter": Command("[NAME|none]", "shows the adapter, or takes another one, or none", self._adapter),
            "/drafts": Command("", "turns the colour of accepted draft tokens on or off", self._drafts),
            "/reset": Command("", "clears the conversation, but not the system prompt", self._reset),
            "/system": Command(
                "[TEXT]", "shows the system prompt, or changes it and clears the conversation", self._system
            ),
            "/exit": Command("", "ends the chat", self._exit),
        }

    def handle(self, text: str) -> None:
        """Runs a command or answers a message. Two slashes begin a message with one. Errors are printed."""
        try:
            if text.startswith("/") and not text.startswith("//"):
                self._run(text)
            elif text.strip():
                self.session.answer(text.removeprefix("/"))
        except SelfSpecError as error:
            self.complain(str(error))

    def complain(self, message: str) -> None:
        """Prints an error as one line to standard error."""
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
        for name, command in self.commands.items():
            say(f"{f'{name} {command.arguments}':<32}{command.help}")

    def _stats(self, _: str) -> None:
        last, total = self.session.last, self.session.total
        if last is None:
            say("there is no answer yet")
            return
        say(f"last answer, {last[0]}: {last[1]}")
        say(f"whole chat, {total.answers} answer{'s' * (total.answers > 1)}: {total}")
        for line in draft_lines(total.rounds):
            say(line)

    def _method(self, arguments: str) -> None:
        if arguments:
            # The name of a cascade may have spaces between its stages.
            name, *assignments = re.findall(r"[^\s(]+\([^)]*\)?|\S+", arguments)
            with own_warnings():
                self.session.switch(name, parse_assignments(assignments, "/method"))
        say(f"method: {_describe(self.session.engine.method)}")
        if not arguments:
            say(f"methods: {', '.join(METHODS)}")

    def _adapter(self, name: str) -> None:
        if name:
            self.session.adapt(None if name == "none" else name)
        say(f"adapter: {self.session.adapter or 'none'}")
        if not name:
            say(f"adapters: {', '.join(self.session.engine.adapters) or 'none (--adapter)'}")

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


def talk(commands: ChatCommands) -> None:
    """Reads and answers messages in the terminal until the user leaves."""
    completions = {"/method": tuple(METHODS), "/adapter": (*commands.session.engine.adapters, "none")}
    prompt = make_prompt({**dict.fromkeys(commands.commands, ()), **completions})
    while not commands.ended:
        try:
            commands.handle(prompt())
        except KeyboardInterrupt:
            continue  # clears the line; Ctrl-C during an answer is handled by the session
        except EOFError:
            return


def make_prompt(words: Mapping[str, Iterable[str]]) -> Callable[[], str]:
    """Makes a function that reads one message or command; ``words`` maps commands to completions of their argument.

    Enter sends, Alt-Enter inserts a newline, pasted text may have several lines. Ctrl-C raises ``KeyboardInterrupt``,
    Ctrl-D on an empty line raises ``EOFError``.
    """
    bindings = KeyBindings()

    @bindings.add("enter")
    def _send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    prompts: PromptSession[str] = PromptSession(
        "> ",
        multiline=True,
        prompt_continuation="  ",
        history=open_history(),
        completer=CommandCompleter(words),
        key_bindings=bindings,
        reserve_space_for_menu=_MENU_LINES,
        enable_suspend=True,
    )
    return prompts.prompt


def open_history() -> History:
    """Opens the history of all chats in the user's cache folder; a history in memory if that cannot be written."""
    try:
        path = cache_folder() / HISTORY_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)  # readable by the user only
        check_own(path)
    except OSError:
        return InMemoryHistory()
    return _TolerantHistory(path)


class _TolerantHistory(FileHistory):
    """A history file whose read and write errors are ignored."""

    def load_history_strings(self) -> Iterable[str]:
        try:
            return list(super().load_history_strings())
        except OSError:
            return []

    def store_string(self, string: str) -> None:
        try:
            super().store_string(string)
        except (OSError, UnicodeError):
            return


class CommandCompleter(Completer):
    """Completes commands and their first argument."""

    def __init__(self, words: Mapping[str, Iterable[str]]) -> None:
        self._words = words

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        """The completions of the text before the cursor."""
        typed = document.text_before_cursor.split(" ")
        known: Iterable[str] = {1: self._words, 2: self._words.get(typed[0], ())}.get(len(typed), ())
        if typed[0].startswith("/"):
            yield from (Completion(word, -len(typed[-1])) for word in known if word.startswith(typed[-1]))


def _describe(method: Method) -> str:
    """A method's name and the settings that differ from the defaults."""
    defaults = method.Settings().to_values()
    values = method.settings.to_values()
    return " ".join([method.name, *(f"{name}={value}" for name, value in values.items() if value != defaults[name])])
