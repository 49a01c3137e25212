"""Trains the bundled checkpoints from plain text: ``python recipes/train.py tiny --help``."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tokenizers import Tokenizer

import replicas
from data import Mixer, encode_stream, load_domains
from export import read_checkpoint, write_checkpoint
from model import Llama, Shape
from mtp import train_head
from mtp_export import held_out_rows, measure_head, read_head, record, write_head
from optimizer import Rates
from own_texts import OwnTexts
from phases import EARLY_EXIT_RECIPE, MTP, MTP_AGAIN, TINY_RECIPE, Phase, Recipe
from selfspec import Engine
from tokenizer import BOS, train_tokenizer
from training import Settings, initial_checkpoint, train_phase

HELD_OUT_ROWS = 32
"""Rows of each domain on which a head is measured."""

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)

Gsm8k = Annotated[Path, typer.Option(help="Folder with gsm8k_train.jsonl and gsm8k_test.jsonl, or the train file.")]
Books = Annotated[Path, typer.Option(help="Folder of novels, *.txt.")]
Out = Annotated[Path, typer.Option(help="Folder to write the checkpoint into.")]
Work = Annotated[Path, typer.Option(help="Folder of training checkpoints, shared by both recipes and resumed from.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Steps = Annotated[int | None, typer.Option(help="Total steps, all phases scaled to it; the recipe's own by default.")]
Processes = Annotated[int, typer.Option(help="Processes that train together; on a CPU one for each core is best.")]
Compiled = Annotated[bool, typer.Option("--compile/--no-compile", help="Use torch.compile (a CPU needs g++ for it).")]
Seed = Annotated[int, typer.Option(help="Seed of the weights, the order of the text and the subsets.")]


@app.command("tiny")
def tiny(
    gsm8k: Gsm8k,
    books: Books,
    out: Out,
    work: Work = Path("build/training"),
    device: Device = "auto",
    processes: Processes = 1,
    steps: Steps = None,
    seed: Seed = 0,
    compiled: Compiled = True,
) -> None:
    """Train with stochastic depth over sublayers: any subset of the middle ones drafts well."""
    settings = Settings(Shape(), Rates(), seed, _device(device), compiled, work)
    run_recipe(TINY_RECIPE, settings, gsm8k, books, out, processes, steps)


@app.command("tiny-early-exit")
def tiny_early_exit(
    gsm8k: Gsm8k,
    books: Books,
    out: Out,
    work: Work = Path("build/training"),
    device: Device = "auto",
    processes: Processes = 1,
    steps: Steps = None,
    seed: Seed = 0,
    compiled: Compiled = True,
) -> None:
    """Continue from ``tiny`` with the LayerSkip recipe: the first layers, the final norm and the LM head draft well."""
    settings = Settings(Shape(), Rates(), seed, _device(device), compiled, work)
    run_recipe(EARLY_EXIT_RECIPE, settings, gsm8k, books, out, processes, steps)


@app.command("tiny-mtp")
def tiny_mtp(
    gsm8k: Gsm8k,
    books: Books,
    out: Out,
    model: Annotated[Path, typer.Option(help="Folder of the checkpoint, as `tiny` writes it; it stays as it is.")],
    head: Annotated[Path | None, typer.Option(help="Folder of a head to go on with, by the model's own texts.")] = None,
    work: Work = Path("build/training"),
    steps: Steps = None,
    seed: Seed = 0,
) -> None:
    """Train a multi-token-prediction head for a checkpoint, and write a folder that has both."""
    weights, shape, tokenizer = read_checkpoint(model)
    llama = Llama(shape, weights, compiled=False)
    domains = load_domains(gsm8k, books)
    streams = {name: encode_stream(tokenizer, domain.train, seed) for name, domain in domains.items()}
    work.mkdir(parents=True, exist_ok=True)
    texts: Mixer | OwnTexts = Mixer(streams, tokenizer.token_to_id(BOS), seed)
    stage, start = (MTP_AGAIN, read_head(head)) if head else (MTP, None)
    if head:
        texts = OwnTexts(texts, Engine.from_pretrained(str(model), method="autoregressive", max_batch=stage.rows))
    trained = train_head(llama, texts, stage, work / "tiny-mtp.pt", steps, start)
    held_out = {name: encode_stream(tokenizer, domain.held_out, seed) for name, domain in domains.items()}
    with torch.no_grad():
        figures = {
            name: measure_head(llama, trained, held_out_rows(stream, stage.length, HELD_OUT_ROWS))
            for name, stream in held_out.items()
        }
    training = record(steps or stage.steps, stage.rows * stage.length, seed, head)
    write_head(out, model, llama, trained, training, figures)


def run_recipe(
    recipe: Recipe,
    settings: Settings,
    gsm8k: Path,
    books: Path,
    out: Path,
    processes: int,
    steps: int | None,
) -> None:
    """Train the phases in order, continuing an interrupted run; write the checkpoint.

    Args:
        recipe: what to do.
        settings: of the run.
        gsm8k: see `data.load_math`.
        books: folder of novels.
        out: folder of the checkpoint.
        processes: that train together.
        steps: total, the phases scaled to it; None takes the recipe's own numbers.
    """
    phases = recipe.phases
    if steps is not None:
        phases = tuple(phase.scaled(steps / sum(phase.steps for phase in phases)) for phase in phases)
    settings.work.mkdir(parents=True, exist_ok=True)
    domains = load_domains(gsm8k, books)
    path = settings.work / "tokenizer.json"
    if not path.exists():
        texts = (text for domain in domains.values() for text in domain.train)
        train_tokenizer(texts, settings.shape.vocabulary).save(str(path))
    tokenizer = Tokenizer.from_file(str(path))
    streams = {name: encode_stream(tokenizer, domain.train, settings.seed) for name, domain in domains.items()}
    mixer = Mixer(streams, tokenizer.token_to_id(BOS), settings.seed)
    replicas.launch(processes, train_phases, phases, mixer, settings)
    checkpoint = train_phases(phases, mixer, settings)
    write_checkpoint(out, blend(recipe, checkpoint, settings.work), settings.shape, tokenizer)
    record = {
        "recipe": recipe.name,
        "blended": {"phase": recipe.blended, "share": recipe.share} if recipe.blended else None,
        "seed": settings.seed,
        "tokens": checkpoint["tokens"],
        "steps": checkpoint["step"],
        "phases": {
            phase.name: {"steps": phase.steps, "tokens": phase.tokens, "mixture": phase.mixture} for phase in phases
        },
        "domain_tokens": {name: len(stream) for name, stream in streams.items()},
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    (out / "training.json").write_text(json.dumps(record, indent=2) + "\n")


def train_phases(phases: tuple[Phase, ...], mixer: Mixer, settings: Settings) -> dict[str, Any]:
    """Run all phases, or this process's part of them; return the last checkpoint."""
    checkpoint = initial_checkpoint(settings)
    for phase in phases:
        checkpoint = train_phase(phase, mixer, checkpoint, settings)
    return checkpoint


def blend(recipe: Recipe, checkpoint: dict[str, Any], work: Path) -> dict[str, torch.Tensor]:
    """Return the final weights: the last phase's, or their average with those of the blended phase."""
    masters: dict[str, torch.Tensor] = checkpoint["masters"]
    if recipe.blended is None:
        return masters
    earlier = torch.load(work / f"{recipe.blended}.pt", map_location="cpu")["masters"]
    return {name: torch.lerp(weight.cpu(), earlier[name], recipe.share) for name, weight in masters.items()}


def _device(name: str) -> torch.device:
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)


if __name__ == "__main__":
    app()
