"""The prompt of a chat in a terminal: editing, history, completion."""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from selfspec.user_cache import cache_folder

if TYPE_CHECKING:
    from selfspec.cli.chat_commands import ChatCommands

HISTORY_FILE = "chat-history"
_MENU_LINES = 4


def talk(commands: "ChatCommands", methods: Iterable[str]) -> None:
    """Reads and answers messages in the terminal until the user leaves.

    Args:
        commands: runs what the user enters.
        methods: names that are completed after ``/method``.
    """
    prompt = make_prompt({**dict.fromkeys(commands.commands, ()), "/method": tuple(methods)})
    while not commands.ended:
        try:
            commands.read(prompt())
        except KeyboardInterrupt:
            continue  # clears the line; Ctrl-C during an answer is handled by the session
        except EOFError:
            return


def make_prompt(words: Mapping[str, Iterable[str]]) -> Callable[[], str]:
    """Makes a function that reads one message or command.

    Enter sends, Alt-Enter inserts a newline, pasted text may have several lines. Ctrl-C raises ``KeyboardInterrupt``,
    Ctrl-D on an empty line raises ``EOFError``.

    Args:
        words: the commands, each with the words that are completed after it.

    Returns:
        The function.
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
    except (OSError, RuntimeError):  # RuntimeError: there is no home folder
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
    """Completes commands and their first argument.

    Args:
        words: the commands, each with the words that may follow it.
    """

    def __init__(self, words: Mapping[str, Iterable[str]]) -> None:
        self._words = words

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        """The completions of the text before the cursor."""
        parts = document.text_before_cursor.split(" ")
        known: Iterable[str] = {1: self._words, 2: self._words.get(parts[0], ())}.get(len(parts), ())
        if parts[0].startswith("/"):
            yield from (Completion(word, -len(parts[-1])) for word in known if word.startswith(parts[-1]))
