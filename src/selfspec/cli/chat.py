"""``selfspec chat``: a conversation in the terminal."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from selfspec.cli import options
from selfspec.cli.inputs import decode_utf8, kept_state, read_settings, sampling_params
from selfspec.cli.terminal import prepare_method, silence_libraries
from selfspec.errors import InvalidPromptError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from selfspec.cli.chat_repl import ChatCommands

PREFIX_CACHE = 2**30
"""Maximum bytes of keys and values of earlier turns, so that each turn reads only what is new."""

FAILED = 2
"""Exit code if a message or a command from a pipe failed."""


@dataclass(frozen=True)
class AnswerChoice(options.SamplingChoice):
    """How the tokens of an answer are chosen."""

    max_new_tokens: int = options.option(512, "Longest answer, in tokens.")


@options.with_engine_options
def chat(
    engine: options.EngineChoice,
    adapters: options.AdapterChoice,
    sampling: AnswerChoice,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The system prompt; default: that of the chat template.")
    ] = None,
    state: options.State = None,
    show_drafts: options.ShowDrafts = False,
) -> None:
    """Chats with a model in the terminal. From a pipe, each line is a message. /help lists the commands.

    The chat begins with the first adapter, if there are any; /adapter takes another one.
    """
    method_settings = read_settings(engine.method, engine.settings, state)
    engine.begin()

    from selfspec.cli.chat_repl import ChatCommands, talk
    from selfspec.cli.chat_session import ChatSession

    silence_libraries()
    params = sampling_params({**vars(sampling), "adapter": next(iter(adapters.named), None)})
    _check_template_early(engine.model)
    loaded = engine.load(settings=method_settings, prefix_cache=PREFIX_CACHE, adapters=adapters.named)
    _check_template(engine.model, loaded.tokenizer)
    if not loaded.method.begins_at_once:
        prepare_method(loaded)
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    session = ChatSession(loaded, params, system=system, show_drafts=show_drafts, interactive=interactive)
    with kept_state(loaded, state):
        if interactive:
            head = f"{engine.model} with {loaded.method.name}. /help lists the commands,"
            typer.echo(f"{head} Ctrl-C stops an answer, Ctrl-D ends the chat.", err=True)
            talk(ChatCommands(session))
        else:
            _read_lines(ChatCommands(session))


def _read_lines(commands: "ChatCommands") -> None:
    for line in sys.stdin.buffer:
        try:
            commands.handle(decode_utf8(line, "a message on standard input").rstrip("\r\n"))
        except InvalidPromptError as error:
            commands.complain(str(error))
        if commands.ended:
            break
    if commands.failed:
        raise typer.Exit(FAILED)


def _check_template_early(model: str) -> None:
    """Refuses a model without a chat template before its weights are loaded, if its tokenizer has files of its own."""
    from selfspec.loading.catalog import InstallableModel, resolve_name
    from selfspec.loading.loader import load_tokenizer, reaching

    try:
        source = resolve_name(model)
        if isinstance(source, InstallableModel) or (isinstance(source, Path) and not source.is_dir()):
            return
        with reaching(model):
            tokenizer = load_tokenizer(str(source))
    except Exception:  # loading the model reports the error
        return
    _check_template(model, tokenizer)


def _check_template(model: str, tokenizer: "PreTrainedTokenizerBase | None") -> None:
    if not getattr(tokenizer, "chat_template", None):
        raise InvalidPromptError(
            f"'{model}' has no chat template, so it cannot chat; choose a chat model, such as smollm2, or use "
            "`selfspec generate`"
        )
