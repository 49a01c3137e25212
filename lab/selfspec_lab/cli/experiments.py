"""``selfspec experiments``: tests the claims of the papers."""

from pathlib import Path
from typing import Annotated

import typer

from selfspec.cli.api import options, silence_libraries
from selfspec_lab.cli.bench_options import Dirty

experiments = typer.Typer(
    no_args_is_help=True, help="Tests the claims of the papers, and says which hold, are refuted or undecided."
)


@experiments.command("list", epilog="Example: selfspec experiments list")
def list_experiments() -> None:
    """Lists the experiments: the claim of each, and its source."""
    from selfspec_lab.experiments import EXPERIMENTS

    for experiment in EXPERIMENTS.values():
        typer.echo(f"{experiment.number}  {experiment.name}  ({experiment.source})\n   {experiment.claim}")


@experiments.command("run", epilog="Example: selfspec experiments run all --quick --out results")
def run(
    name: Annotated[str, typer.Argument(help="Names of experiments, separated by commas, or all.")],
    model: Annotated[
        str | None, typer.Option(help=f"Default: the checkpoint of each experiment. {options.MODEL_HELP}")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Measure less, with wider spreads.")] = False,
    device: options.Device = "auto",
    seed: Annotated[int, typer.Option(help="Seed of the random numbers.", min=0)] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for a JSON file and a picture of each.")] = None,
    dirty: Dirty = False,
) -> None:
    """Runs experiments, and prints each status with its figures.

    With --out, Ctrl-C keeps the experiments that are finished; the same command goes on after them.
    """
    from selfspec.errors import InvalidParameterError
    from selfspec.loading import parse_device
    from selfspec_lab.bench.stamp import check_clean
    from selfspec_lab.experiments import EXPERIMENTS, find_experiment
    from selfspec_lab.plots import check_drawing

    chosen = list(EXPERIMENTS) if name == "all" else [each.strip() for each in name.split(",")]
    found = {each: find_experiment(each) for each in chosen}
    parse_device(device)
    if out is not None:
        check_clean(dirty)
        check_drawing()
        if out.exists() and not out.is_dir():
            raise InvalidParameterError(f"--out '{out}' is a file; name a folder")
    if model is not None:
        from selfspec.loading import resolve_name

        resolve_name(model)
    silence_libraries()

    from selfspec_lab.bench.benchmark import explain
    from selfspec_lab.experiments.lab import Lab
    from selfspec_lab.experiments.store import find_kept, run_experiment, save_result

    lab = Lab(model, quick=quick, device=device, seed=seed, progress=lambda text: typer.echo(f"  {text}", err=True))
    failed: list[str] = []
    for each, experiment_class in found.items():
        typer.echo(f"{each} ...", err=True)
        try:
            experiment, saved = experiment_class(), tuple[Path, ...]()
            result = None if out is None else find_kept(experiment, lab, out)
            if result is not None:
                typer.echo(f"  measured already, on {result['stamp']['date'][:10]} in this state", err=True)
            else:
                result = run_experiment(experiment, lab)
                saved = save_result(experiment, result, out) if out is not None else ()
        except InvalidParameterError:
            raise
        except Exception as error:  # the other experiments still run
            failed.append(each)
            typer.echo(f"{experiment_class.number}. {each}: FAILED, {explain(error)}")
            continue
        typer.echo(f"{experiment.number}. {each}: {result['status'].upper()}")
        for check in result["checks"]:
            typer.echo(f"   {check['status']}: {check['statement']}: {check['figure']}")
        for path in saved:
            typer.echo(f"  {path}", err=True)
    if failed:
        raise typer.Exit(1)


@experiments.command("document", epilog="Example: selfspec experiments document results experiments.md")
def document(
    results: Annotated[
        Path, typer.Argument(help="Folder that `selfspec experiments run --out` wrote, or a folder of such folders.")
    ],
    out: Annotated[Path, typer.Argument(help="Markdown file to write.")],
) -> None:
    """Writes a page about all results in a folder: claims, statuses, figures, pictures."""
    from selfspec.errors import InvalidParameterError
    from selfspec_lab.experiments.document import render_document
    from selfspec_lab.experiments.store import read_folders

    text = render_document(read_folders(results), out)
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidParameterError(f"the page cannot be written to '{out}': {error.strerror or error}") from error
