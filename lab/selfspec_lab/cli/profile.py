"""``selfspec profile``: the latencies of a model's parts on this machine."""

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from selfspec.cli.api import options, silence_libraries


@options.with_engine_options
def profile(
    engine: options.ModelChoice,
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure again even if there is a saved profile.")] = False,
    as_json: options.Json = False,
) -> None:
    """Measures bytes and seconds of each component of a model and saves them in the user's cache folder.

    Example: selfspec profile --model smollm2 --dtype bfloat16
    """
    from selfspec.errors import InvalidParameterError
    from selfspec_lab.measuring import RUNTIMES, keep_profile, measure_profile, profile_path, read_profile

    if engine.runtime not in RUNTIMES:
        raise InvalidParameterError(f"there is no runtime '{engine.runtime}'; choose one of {', '.join(RUNTIMES)}")
    silence_libraries()
    target = engine.load(method="autoregressive").target
    found = None if refresh else read_profile(target)
    if found is None:
        found = measure_profile(target, progress=lambda text: typer.echo(text, err=True))
        path = keep_profile(target, found)
        typer.echo("the profile could not be saved" if path is None else f"saved in {path}", err=True)
    else:
        typer.echo(f"from {profile_path(target)}; --refresh measures again", err=True)
    typer.echo(json.dumps(found, indent=2, allow_nan=False) if as_json else profile_text(found))


def profile_text(profile: Mapping[str, Any]) -> str:
    """A profile as text."""
    plain = profile["plain"]
    fraction = f"{plain['bandwidth_fraction']:.0%} of the copy bandwidth"
    lines = [
        f"{profile['date']}, {profile['device']}, {profile['dtype']}, runtime {profile['runtime']}",
        "bytes      " + ", ".join(f"{part} {size:,}" for part, size in profile["bytes"].items()),
        f"copy       {profile['copy_bytes_per_second'] / 1e9:.1f} GB/s",
        f"plain      {plain['tokens_per_second']:.1f} tokens/s, {fraction}",
        "",
        "microseconds of one branch; n tokens of context",
        f"{'rows':>5}{'attention':>26}{'MLP':>10}{'head':>10}{'rest':>10}",
    ]
    for rows, parts in profile["rows"].items():
        line = f"{parts['attention_base'] * 1e6:,.0f} + {parts['attention_per_token'] * 1e6:.3f} n"
        numbers = "".join(f"{parts[part] * 1e6:>10,.0f}" for part in ("mlp", "head", "rest"))
        lines.append(f"{rows:>5}{line:>26}{numbers}")
    return "\n".join(lines)
