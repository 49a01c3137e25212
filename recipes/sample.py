"""Text that a checkpoint writes, through ``transformers`` as a user would run it, and whether its form is right."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPT_TOKENS = {"code": 96, "prose": 48}
COMPLETION_TOKENS = {"math": 200, "code": 160, "prose": 96}
_START_CHARACTERS = 2_000


@dataclass(frozen=True, slots=True)
class Sample:
    """One continuation of held-out text.

    Attributes:
        prompt: start of a held-out document.
        completion: what the model wrote after it.
        well_formed: a math answer ends in ``#### number``, code parses up to its unfinished end, prose ends sentences.
    """

    prompt: str
    completion: str
    well_formed: bool


class Writer:
    """Continues held-out documents greedily."""

    def __init__(self, checkpoint: Path) -> None:
        """Load the checkpoint in float32."""
        self._tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self._model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)

    def sample(self, domain: str, document: str) -> Sample:
        """Continue the start of a document; of a math problem the question is the prompt."""
        prompt = self._start(domain, document)
        inputs = self._tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        written = self._model.generate(**inputs, max_new_tokens=COMPLETION_TOKENS[domain], do_sample=False)
        completion = self._tokenizer.decode(written[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return Sample(prompt, completion, _well_formed(domain, prompt, completion))

    def _start(self, domain: str, document: str) -> str:
        if domain == "math":
            return document[: document.index("\nAnswer:") + len("\nAnswer:")]
        ids = self._tokenizer(document[:_START_CHARACTERS], add_special_tokens=False)["input_ids"]
        return self._tokenizer.decode(ids[: PROMPT_TOKENS[domain]])


def _well_formed(domain: str, prompt: str, completion: str) -> bool:
    if domain == "math":
        return re.search(r"#### -?[\d.,]+$", completion.strip()) is not None
    if domain == "code":
        return _parses(prompt + completion)
    return re.search(r"[.!?]", completion) is not None


def _parses(source: str) -> bool:
    """Tell whether the source is Python when its last lines, a statement cut short, are left out."""
    lines = source.splitlines()
    for cut in range(min(12, len(lines) // 2)):
        try:
            ast.parse("\n".join(lines[: len(lines) - cut]))
        except SyntaxError:
            continue
        return True
    return False
