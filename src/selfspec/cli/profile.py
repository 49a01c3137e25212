"""``selfspec profile``: the cost model of a model on this machine."""

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from selfspec.cli import options
from selfspec.cli.terminal import silence_libraries


def profile(
    model: options.Model = "tiny",
    widen: options.Widen = 1,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    runtime: options.Runtime = "auto",
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure anew although there is a kept profile.")] = False,
    as_json: options.Json = False,
) -> None:
    """Measures bytes and seconds of each part of a model, once, and keeps them in the user's cache folder."""
    from selfspec.errors import InvalidParameterError
    from selfspec.loading import load_model
    from selfspec.runtimes.latency_store import keep_profile, profile_path, read_profile
    from selfspec.runtimes.target import RUNTIMES, Target
    from selfspec_lab.bench.profile import measure_profile

    if runtime not in RUNTIMES:
        raise InvalidParameterError(f"there is no runtime '{runtime}'; choose one of {', '.join(RUNTIMES)}")
    silence_libraries()
    loaded, _ = load_model(model, dtype=dtype, device=device, widen=widen)
    target = Target(loaded, runtime)
    found = None if refresh else read_profile(target)
    if found is None:
        found = measure_profile(target, progress=lambda text: typer.echo(text, err=True))
        path = keep_profile(target, found)
        typer.echo("could not be kept" if path is None else f"kept in {path}", err=True)
    else:
        typer.echo(f"from {profile_path(target)}; --refresh measures anew", err=True)
    typer.echo(json.dumps(found, indent=2, allow_nan=False) if as_json else profile_text(found))


def profile_text(profile: Mapping[str, Any]) -> str:
    """A profile for people."""
    plain = profile["plain"]
    fraction = f"{plain['bandwidth_fraction']:.0%} of the copy bandwidth"
    lines = [
        f"{profile['stamp']['date']}, {profile['device']}, {profile['dtype']}, runtime {profile['runtime']}",
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
