"""``selfspec tune``: searches a set of skipped sublayers offline."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from selfspec.cli.api import options, silence_libraries

if TYPE_CHECKING:
    from selfspec_lab.tuning import Trial

INTERRUPTED = 130


@options.with_engine_options
def tune(
    engine: options.ModelChoice,
    method: Annotated[str, typer.Argument(help="What to tune: self-spec.")],
    prompts: Annotated[
        Path,
        typer.Option(
            help='UTF-8 file of calibration prompts: one per line, or .jsonl with a string "prompt" per line.'
        ),
    ],
    out: Annotated[Path, typer.Option(help="The profile to write, a state file of the method.")],
    iterations: Annotated[int, typer.Option(help="Sets of sublayers to measure.")] = 100,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate for each prompt.")] = 32,
    seed: Annotated[int, typer.Option(help="Seed of the search.", min=0)] = 0,
    paper: Annotated[
        bool, typer.Option("--paper", help="As published: the first and the last layer may be skipped too.")
    ] = False,
) -> None:
    """Searches the skipped sublayers that decode fastest (Draft & Verify). Ctrl-C saves the best so far.

    Example: selfspec tune self-spec --model tiny --prompts prompts.txt --out profile
    """
    from selfspec_lab.tuning import check_request, read_prompts

    check_request(method, iterations, max_new_tokens, out)
    texts = read_prompts(prompts)

    from rich.console import Console
    from rich.progress import Progress

    from selfspec_lab.tuning import tune as trials_of
    from selfspec_lab.tuning import write_profile

    silence_libraries()
    loaded = engine.load(method=method, settings={"fixed_ends": not paper})
    trials: list[Trial] = []
    interrupted = False
    console = Console(stderr=True, highlight=False)
    try:
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task("tuning", total=iterations)
            for trial in trials_of(loaded, texts, iterations=iterations, max_new_tokens=max_new_tokens, seed=seed):
                trials.append(trial)
                progress.update(bar, advance=1, description=_describe(_best(trials)))
    except KeyboardInterrupt:
        if not trials:
            raise
        interrupted = True
    best = _best(trials)
    write_profile(loaded, best, len(trials), out)
    typer.echo(f"{len(trials)} sets measured", err=True)
    typer.echo(f"uniform skipping: {_describe(trials[0])}", err=True)
    typer.echo(f"best: {_describe(best)}", err=True)
    typer.echo(f"profile written to {out}", err=True)
    if interrupted:
        typer.echo("interrupted", err=True)
        raise typer.Exit(INTERRUPTED)


def _best(trials: "list[Trial]") -> "Trial":
    return max(trials, key=lambda trial: trial.tokens_per_second)


def _describe(trial: "Trial") -> str:
    return (
        f"{trial.tokens_per_second:.1f} tokens/s, {len(trial.skipped)} sublayers skipped, "
        f"{trial.acceptance_rate:.0%} accepted"
    )
