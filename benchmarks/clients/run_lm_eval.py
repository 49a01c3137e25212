"""``lm-eval``: scores and texts from the server (``local-completions``) beside those of its ``hf`` backend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from client import HERE, Client, Setting
from run_scripts import FLOAT32

TASKS = HERE / "tasks"
CHOICE, ANSWER = "selfspec_choice", "selfspec_answer"
LARGEST_GAP = 1e-3
"""Between two log-likelihoods of an answer, which are sums over its tokens in float32."""

Samples = dict[str, list[dict[str, Any]]]


def run(setting: Setting) -> dict[str, Any]:
    """Runs both tasks with both backends, and compares every question."""
    model = setting.tokenizer
    ours = _evaluate(
        setting,
        "local-completions",
        f"model={setting.name},base_url={setting.server.url}/v1/completions,tokenizer_backend=huggingface,"
        f"tokenizer={model},tokenized_requests=True,num_concurrent=4,max_retries=1,max_length=2048",
    )
    theirs = _evaluate(setting, "hf", f"pretrained={model},dtype=float32,max_length=2048", "--device", "cpu")
    return compare(ours, theirs)


def compare(ours: Samples, theirs: Samples) -> dict[str, Any]:
    """Compares the samples of two backends.

    Args:
        ours: by task, the samples that lm-eval logs for each question.
        theirs: the same of the reference.

    Returns:
        ``holds``, the number of log-likelihoods with their largest gap and how many are greedy in both or in neither,
        the number of texts with how many are equal, and the metrics of both.
    """
    pairs = [
        (mine, other)
        for a, b in zip(ours[CHOICE], theirs[CHOICE], strict=True)
        for mine, other in zip(a["filtered_resps"], b["filtered_resps"], strict=True)
    ]
    gaps = [abs(float(mine[0]) - float(other[0])) for mine, other in pairs]
    same_greedy = sum(str(mine[1]) == str(other[1]) for mine, other in pairs)
    texts = [(a["resps"], b["resps"]) for a, b in zip(ours[ANSWER], theirs[ANSWER], strict=True)]
    equal = sum(mine == other for mine, other in texts)
    metrics = {
        "acc": [_mean(each[CHOICE], "acc") for each in (ours, theirs)],
        "exact_match": [_mean(each[ANSWER], "exact_match") for each in (ours, theirs)],
    }
    return {
        "holds": max(gaps) < LARGEST_GAP
        and same_greedy == len(pairs)
        and equal == len(texts)
        and all(mine == other for mine, other in metrics.values()),
        "log_likelihoods": len(gaps),
        "largest_gap": max(gaps),
        "same_greedy": same_greedy,
        "texts": len(texts),
        "equal_texts": equal,
        "characters": sum(len(mine[0][0]) for mine, _ in texts),
        "metrics": metrics,
    }


def _evaluate(setting: Setting, backend: str, arguments: str, *options: str) -> Samples:
    output = setting.folder / backend
    limit = ("--limit", "4") if setting.quick else ()
    command = ("run", "--model", backend, "--model_args", arguments, "--tasks", f"{CHOICE},{ANSWER}", *limit, *options)
    setting.run(
        setting.program("lm-eval"),
        *command,
        "--include_path",
        TASKS,
        "--output_path",
        output,
        "--log_samples",
        cwd=TASKS,
    )
    return {task: _read(output, task) for task in (CHOICE, ANSWER)}


def _read(output: Path, task: str) -> list[dict[str, Any]]:
    newest = max(output.rglob(f"samples_{task}_*.jsonl"), key=lambda file: file.stat().st_mtime)
    samples = [json.loads(line) for line in newest.read_text().splitlines()]
    return sorted(samples, key=lambda sample: sample["doc_id"])


def _mean(samples: list[dict[str, Any]], metric: str) -> float:
    return sum(sample[metric] for sample in samples) / len(samples)


LM_EVAL = Client(
    "lm-eval",
    ["torch==2.13.0", "transformers==5.23.0 accelerate lm-eval[api]==0.4.13"],
    run,
    options=(*FLOAT32, "--method", "low-bit"),
)
