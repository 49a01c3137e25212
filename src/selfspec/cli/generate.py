"""``selfspec generate``: generates a continuation of a prompt."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from selfspec.cli import options
from selfspec.cli.inputs import kept_state, read_prompt, read_settings, sampling_params
from selfspec.cli.stats import draft_lines, path_lines, summary
from selfspec.cli.terminal import TextWriter, own_warnings, prepare_method, silence_libraries
from selfspec.errors import InvalidParameterError

if TYPE_CHECKING:
    from selfspec.engine import Stream


@dataclass(frozen=True)
class OutputChoice(options.SamplingChoice):
    """How tokens are chosen, and when an output ends."""

    presence_penalty: float = options.option(0.0, "Above 0 makes tokens of the output less likely.")
    frequency_penalty: float = options.option(0.0, "The same, for each occurrence.")
    min_tokens: int = options.option(0, "No end-of-sequence token before this many tokens.")
    json_schema: Path | None = options.option(
        None, "Write JSON that the JSON schema in this file allows.", metavar="FILE"
    )
    stop: list[str] | None = options.option(None, "A string that ends the output; repeatable.")
    ignore_eos: bool = options.option(False, "Continue past end-of-sequence tokens.", "--ignore-eos")


@options.with_engine_options
def generate(
    engine: options.EngineChoice,
    adapters: options.AdapterChoice,
    sampling: OutputChoice,
    prompt: options.Prompt = None,
    prompt_file: options.PromptFile = None,
    state: options.State = None,
    chat: options.Chat = False,
    stats: options.Stats = False,
    as_json: options.JsonOutput = False,
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
    if len(adapters.adapter or ()) > 1:
        raise InvalidParameterError("a text has one adapter; give --adapter once")
    text, method_settings = read_prompt(prompt, prompt_file), read_settings(engine.method, engine.settings, state)
    engine.begin()
    silence_libraries()
    params = sampling_params({**vars(sampling), "logprobs": logprobs, "adapter": next(iter(adapters.named), None)})
    loaded = engine.load(settings=method_settings, adapters=adapters.named)
    if not loaded.method.begins_at_once:
        prepare_method(loaded)
    stream = loaded.stream([{"role": "user", "content": text}] if chat else text, params)
    writer = TextWriter(sys.stdout, show_drafts=show_drafts)
    with own_warnings(), kept_state(loaded, state):
        if as_json:
            typer.echo(json.dumps(stream.result.to_dict(), allow_nan=False))
        else:
            _write(stream, writer)
        if stats:
            writer.end_line_on(sys.stderr)
            rounds = stream.result.rounds
            typer.echo("\n".join((summary(stream.result), *draft_lines(rounds), *path_lines(rounds))), err=True)


def _write(stream: "Stream", writer: TextWriter) -> None:
    try:
        for piece in stream:
            writer.write(piece)
    finally:
        writer.end()
