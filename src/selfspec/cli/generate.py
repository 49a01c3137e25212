"""``selfspec generate``: generates a continuation of a prompt."""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from selfspec.cli import options
from selfspec.cli.engine import load_engine
from selfspec.cli.prompt import read_prompt
from selfspec.cli.sampling import sampling_params
from selfspec.cli.settings import read_settings
from selfspec.cli.state import kept_state
from selfspec.cli.terminal import TextWriter, own_warnings, prepare, silence_libraries
from selfspec.errors import InvalidParameterError

if TYPE_CHECKING:
    from selfspec.generation import Stream
    from selfspec.types import Generation, Round


def generate(
    ctx: typer.Context,
    prompt: options.Prompt = None,
    prompt_file: options.PromptFile = None,
    model: options.Model = options.DEFAULT_MODEL,
    method: options.Method = options.DEFAULT_METHOD,
    settings: options.Settings = None,
    state: options.State = None,
    chat: options.Chat = False,
    dtype: options.Dtype = "auto",
    weights: options.Weights = None,
    device: options.Device = "auto",
    runtime: options.Runtime = "auto",
    keep_copies: options.KeepCopies = False,
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
    _check_output(as_json=as_json, show_drafts=show_drafts, logprobs=logprobs)
    text, method_settings = read_prompt(prompt, prompt_file), read_settings(method, settings, state)
    silence_libraries()
    params = sampling_params(ctx.params)  # temperature, top_p, seed and so on
    engine = load_engine(ctx.params, method_settings)
    prepare(engine)
    stream = engine.stream([{"role": "user", "content": text}] if chat else text, params)
    writer = TextWriter(sys.stdout, show_drafts=show_drafts)
    with own_warnings(), kept_state(engine, state):
        if as_json:
            typer.echo(json.dumps(stream.result.to_dict(), allow_nan=False))
        else:
            _write(stream, writer)
        if stats:
            writer.end_line_on(sys.stderr)
            _print_stats(stream.result)


def _check_output(*, as_json: bool, show_drafts: bool, logprobs: int | None) -> None:
    if as_json and show_drafts:
        raise InvalidParameterError(
            "--show-drafts colours the streamed text, and --json streams none; give only one of them"
        )
    if logprobs is not None and not as_json:
        raise InvalidParameterError("--logprobs writes numbers into the JSON object; add --json")


def _write(stream: "Stream", writer: TextWriter) -> None:
    try:
        for piece in stream:
            writer.write(piece)
    finally:
        writer.end()


def _print_stats(result: "Generation") -> None:
    from selfspec.cli.parts_text import parts_lines

    typer.echo("\n".join((summary(result), *parts_lines(result.rounds), *path_lines(result.rounds))), err=True)


def path_lines(rounds: "Sequence[Round]") -> list[str]:
    """Where drafts and verifications ran, natively or not, and why."""
    found = {"drafts": [each.drafting for each in rounds], "verification": [each.verification for each in rounds]}
    counted = {name: Counter(str(path) for path in paths if path is not None) for name, paths in found.items()}
    return [
        f"{name}: " + ", ".join(f"{text} ({count} rounds)" for text, count in counts.most_common())
        for name, counts in counted.items()
        if counts
    ]


def summary(result: "Generation") -> str:
    """One line about an output: speed, drafts, memory and finish reason."""
    return (
        f"{result.method}: {result.new_token_count} tokens, {result.tokens_per_second:.1f} tokens/s, "
        f"{result.round_count} rounds, {result.accepted} of {result.drafted} draft tokens accepted "
        f"({result.acceptance_rate:.0%}), mean generated length {result.mean_generated_length:.2f}, "
        f"peak memory {result.peak_memory_bytes / 2**20:.0f} MiB, ended by {result.finish_reason}"
    )
