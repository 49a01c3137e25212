"""The bridge in vLLM: in float32 and one process, texts are those without it.

Needs an interpreter that has vLLM and numpy: ``SELFSPEC_VLLM_PYTHON=/path/to/python``.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("SELFSPEC_VLLM_PYTHON")
SPECULATIVE = {
    "method": "custom_class",
    "model": "selfspec.bridges.vllm.SuffixProposer",
    "num_speculative_tokens": 8,
}
ROW_COSTS = {"selfspec": {"row_costs": {"1": 1.0, "64": 1.1}}}
PROMPTS = [[5, 6, 7, 8] * 6, list(range(10, 40)), [5, 6, 7, 8] * 6]
TOKENS = 64

pytestmark = pytest.mark.skipif(PYTHON is None, reason="SELFSPEC_VLLM_PYTHON names no interpreter with vLLM")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose heads have a size that vLLM's attention takes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
    )
    path = tmp_path_factory.mktemp("vllm")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def ask(folder: Path, together: bool, **options: Any) -> dict[str, Any]:
    """What a new engine writes."""
    assert PYTHON is not None
    request = json.dumps({"prompts": PROMPTS, "tokens": TOKENS, "together": together, "options": options})
    done = subprocess.run(
        [PYTHON, str(ROOT / "tests/bridges/vllm_program.py"), str(folder), request],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


@pytest.mark.parametrize("together", [False, True])
def test_texts_are_those_without_the_bridge(folder: Path, together: bool) -> None:
    plain = ask(folder, together)
    drafted = ask(folder, together, speculative_config=SPECULATIVE, additional_config=ROW_COSTS)
    assert drafted["token_ids"] == plain["token_ids"]
    assert [len(each) for each in drafted["token_ids"]] == [TOKENS] * 3
    least = 1 if together else TOKENS // 2  # alone, the third text is copied from the first
    assert drafted["drafted"] >= drafted["accepted"] >= least
