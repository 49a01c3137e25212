"""Rewrites the samples of an evaluated checkpoint and keeps all figures: ``python recipes/sample.py --help``.

A sample is text that the checkpoint writes, through ``transformers`` as a user would run it. The prompts are those of
``selfspec_lab.prompts``, which were written for this project: a card shows no text of a data set. The form is measured
on held-out text too, of which only the counts are kept.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

from card import write_card
from data import MIXTURE, Domain
from selfspec_lab.prompts import PROMPTS

PROMPT_TOKENS = {"code": 96, "prose": 48}
COMPLETION_TOKENS = {"math": 200, "code": 160, "prose": 96}
_START_CHARACTERS = 2_000

app = typer.Typer(help=__doc__, add_completion=False)


@dataclass(frozen=True, slots=True)
class Sample:
    """One continuation.

    Attributes:
        prompt: what the model was given.
        completion: what the model wrote after it.
        well_formed: a math answer ends in ``#### number``, code parses up to its unfinished end, prose ends sentences.
    """

    prompt: str
    completion: str
    well_formed: bool


class Writer:
    """Continues prompts and beginnings of documents, greedily."""

    def __init__(self, checkpoint: Path) -> None:
        """Load the checkpoint in float32."""
        self._tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self._model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)

    def samples(self, count: int) -> dict[str, list[dict[str, Any]]]:
        """Continue the first prompts of ``selfspec_lab.prompts``.

        Args:
            count: prompts of each domain.

        Returns:
            by domain, the fields of one ``Sample`` for each prompt.
        """
        return {name: [asdict(self._continue(name, prompt)) for prompt in PROMPTS[name][:count]] for name in MIXTURE}

    def form(self, domain: Domain, count: int) -> dict[str, int]:
        """Count the well-formed continuations of held-out text.

        Args:
            domain: its first held-out documents are continued from their start, a math problem from its question.
            count: documents at most.

        Returns:
            ``documents`` and how many of them were continued ``well_formed``.
        """
        prompts = [self._start(domain.name, document) for document in domain.held_out[:count]]
        well_formed = [self._continue(domain.name, prompt).well_formed for prompt in prompts]
        return {"documents": len(well_formed), "well_formed": sum(well_formed)}

    def _continue(self, domain: str, prompt: str) -> Sample:
        inputs = self._tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        written = self._model.generate(**inputs, max_new_tokens=COMPLETION_TOKENS[domain], do_sample=False)
        completion = self._tokenizer.decode(written[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return Sample(prompt, completion, _well_formed(domain, prompt, completion))

    def _start(self, domain: str, document: str) -> str:
        if domain == "math":
            return document[: document.index("\nAnswer:") + len("\nAnswer:")]
        ids = self._tokenizer(document[:_START_CHARACTERS], add_special_tokens=False)["input_ids"]
        return self._tokenizer.decode(ids[: PROMPT_TOKENS[domain]])


@app.command()
def renew_samples(
    checkpoint: Annotated[Path, typer.Argument(help="Folder with the figures of evaluate.py.")],
    samples: Annotated[int, typer.Option(min=1, help="Continuations per domain; the card shows the first.")] = 6,
) -> None:
    """Rewrite the samples in a checkpoint's figures and its model card, and nothing else."""
    figures = json.loads((checkpoint / "evaluation.json").read_text(encoding="utf-8"))
    figures["samples"] = Writer(checkpoint).samples(samples)
    (checkpoint / "evaluation.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    write_card(checkpoint, json.loads((checkpoint / "training.json").read_text(encoding="utf-8")), figures)


def _well_formed(domain: str, prompt: str, completion: str) -> bool:
    if domain == "math":
        return re.search(r"#### -?[\d.,]+$", completion.strip()) is not None
    if domain == "code":
        return _parses(prompt + completion)
    return re.search(r"[.!?]", completion) is not None


def _parses(source: str) -> bool:
    """Return whether the source is valid Python without its last lines, an incomplete statement."""
    lines = source.splitlines()
    for cut in range(min(12, len(lines) // 2)):
        try:
            ast.parse("\n".join(lines[: len(lines) - cut]))
        except SyntaxError:
            continue
        return True
    return False


if __name__ == "__main__":
    app()
