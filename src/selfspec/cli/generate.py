"""``selfspec generate``: generates a continuation of a prompt."""

import json
import sys
from typing import TYPE_CHECKING

import typer

from selfspec.cli import options
from selfspec.cli.inputs import kept_state, read_prompt, read_settings, sampling_params
from selfspec.cli.stats import draft_lines, path_lines, summary
from selfspec.cli.terminal import TextWriter, own_warnings, prepare_method, silence_libraries
from selfspec.errors import InvalidParameterError

if TYPE_CHECKING:
    from selfspec.engine import Stream


@options.with_engine_options
def generate(
    ctx: typer.Context,
    engine: options.EngineChoice,
    prompt: options.Prompt = None,
    prompt_file: options.PromptFile = None,
    state: options.State = None,
    chat: options.Chat = False,
    max_new_tokens: options.MaxNewTokens = 128,
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
    stop: options.Stop = None,
    ignore_eos: options.IgnoreEos = False,
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
    text, method_settings = read_prompt(prompt, prompt_file), read_settings(engine.method, engine.settings, state)
    silence_libraries()
    params = sampling_params(ctx.params)  # temperature, top_p, seed and so on
    loaded = engine.load(settings=method_settings)
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
