"""``selfspec generate``: generates a continuation of a prompt."""

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from selfspec.cli import options
from selfspec.cli.prompt import read_prompt
from selfspec.cli.sampling import sampling_params
from selfspec.cli.state import check_state, kept_state
from selfspec.cli.terminal import TextWriter, own_warnings, prepare, silence_libraries
from selfspec.errors import InvalidParameterError, InvalidSettingError

if TYPE_CHECKING:
    from selfspec.generation import Stream
    from selfspec.types import Generation


def generate(
    ctx: typer.Context,
    prompt: options.Prompt = None,
    prompt_file: options.PromptFile = None,
    model: options.Model = options.DEFAULT_MODEL,
    method: options.Method = options.DEFAULT_METHOD,
    settings: options.Settings = None,
    state: options.State = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a user message of a chat.")] = False,
    dtype: options.Dtype = "auto",
    weights: options.Weights = None,
    device: options.Device = "auto",
    runtime: options.Runtime = "auto",
    keep_copies: options.KeepCopies = False,
    max_new_tokens: Annotated[
        int, typer.Option(help="Longest output, in tokens.", rich_help_panel=options.CHOOSING)
    ] = 128,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    min_tokens: options.MinTokens = 0,
    json_schema: options.JsonSchema = None,
    seed: options.Seed = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="A string that ends the output; repeatable.", rich_help_panel=options.CHOOSING),
    ] = None,
    ignore_eos: Annotated[
        bool,
        typer.Option("--ignore-eos", help="Continue past end-of-sequence tokens.", rich_help_panel=options.CHOOSING),
    ] = False,
    stats: Annotated[
        bool,
        typer.Option(
            "--stats",
            help="Print speed and drafts to standard error.",
            rich_help_panel=options.OUTPUT,
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help=options.JSON_HELP, rich_help_panel=options.OUTPUT)] = False,
    logprobs: options.Logprobs = None,
    show_drafts: options.ShowDrafts = False,
) -> None:
    """Generates a continuation of a prompt and streams it to standard output."""
    if as_json and show_drafts:
        raise InvalidParameterError(
            "--show-drafts colours the streamed text, and --json streams none; give only one of them"
        )
    if logprobs is not None and not as_json:
        raise InvalidParameterError("--logprobs writes numbers into the JSON object; add --json")
    text, method_settings = read_prompt(prompt, prompt_file), parse_assignments(settings or ())
    if state is not None:
        check_state(method, state)

    from selfspec.engine import Engine

    silence_libraries()
    params = sampling_params(ctx.params)  # temperature, top_p, seed and so on
    engine = Engine.from_pretrained(
        model,
        method,
        settings=method_settings,
        dtype=dtype,
        device=device,
        weights=weights,
        runtime=runtime,
        keep_copies=keep_copies,
    )
    prepare(engine)
    stream = engine.stream([{"role": "user", "content": text}] if chat else text, params)
    with own_warnings(), kept_state(engine, state):
        if not as_json:
            _write(stream, show_drafts)
        result = stream.result
        if as_json:
            typer.echo(json.dumps(result.to_dict(), allow_nan=False))
        if stats:
            from selfspec.cli.parts_text import parts_lines

            typer.echo("\n".join((summary(result), *parts_lines(result.rounds))), err=True)


def parse_assignments(assignments: Sequence[str], source: str = "--set") -> dict[str, str]:
    """Parses settings given by ``--set``.

    Args:
        assignments: strings of the form ``key=value``.
        source: the option or command that they come from, for messages.

    Returns:
        Values by key, as text.

    Raises:
        InvalidSettingError: an assignment has no ``=``, or a key is given twice.
    """
    settings: dict[str, str] = {}
    for assignment in assignments:
        key, equals, value = (part.strip() for part in assignment.partition("="))
        if not key or not equals:
            raise InvalidSettingError(f"{source} takes KEY=VALUE, not '{assignment}'")
        if key in settings:
            raise InvalidSettingError(f"{source} gives '{key}' twice")
        settings[key] = value
    return settings


def _write(stream: "Stream", show_drafts: bool) -> None:
    writer = TextWriter(sys.stdout, show_drafts=show_drafts)
    try:
        for piece in stream:
            writer.write(piece)
    finally:
        writer.end()


def summary(result: "Generation") -> str:
    """One line about an output: speed, drafts, memory and finish reason."""
    return (
        f"{result.method}: {result.new_token_count} tokens, {result.tokens_per_second:.1f} tokens/s, "
        f"{result.round_count} rounds, {result.accepted} of {result.drafted} draft tokens accepted "
        f"({result.acceptance_rate:.0%}), mean generated length {result.mean_generated_length:.2f}, "
        f"peak memory {result.peak_memory_bytes / 2**20:.0f} MiB, ended by {result.finish_reason}"
    )
