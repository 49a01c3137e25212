"""``guidellm``: a short load of synthetic chats, one and four at a time. Its figures are its own, not ours."""

from __future__ import annotations

import json
from typing import Any

from client import Client, Setting

STREAMS = (1, 4)
REQUESTS, QUICK_REQUESTS = 24, 4
"""Chats for each number of streams."""

PROMPT_TOKENS, NEW_TOKENS = 128, 64


def run(setting: Setting) -> dict[str, Any]:
    """Runs the load; all chats have to be answered in full."""
    count = QUICK_REQUESTS if setting.quick else REQUESTS
    output = setting.folder / "guidellm.json"
    setting.run(
        *(setting.program("guidellm"), "run", "--disable-console"),
        *("--backend", f"kind=openai_http,target={setting.server.url},model={setting.name}"),
        *("--profile", "kind=concurrent,streams=1", "--override", "profile.streams", ",".join(map(str, STREAMS))),
        *("--constraint", f"kind=max_requests,count={count}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={NEW_TOKENS}"),
        *("--tokenizer", f"kind=huggingface_auto,model={setting.tokenizer}"),
        *("--output", f"kind=json,path={output}"),
    )
    loads = [_figures(each) for each in json.loads(output.read_text())["benchmarks"]]
    whole = all(load["successful"] == count and load["output_tokens"] == count * NEW_TOKENS for load in loads)
    return {"holds": whole and len(loads) == len(STREAMS), "requests": count, "loads": loads}


def _figures(benchmark: dict[str, Any]) -> dict[str, Any]:
    """What the report shows of one number of streams."""
    done, metrics = benchmark["requests"]["successful"], benchmark["metrics"]
    return {
        "streams": benchmark["config"]["strategy"]["streams"],
        "successful": len(done),
        "errored": len(benchmark["requests"]["errored"]),
        "output_tokens": sum(each["output_tokens"] for each in done),
        "tokens_per_second": metrics["output_tokens_per_second"]["successful"]["mean"],
        "first_token_ms": metrics["time_to_first_token_ms"]["successful"]["median"],
        "between_tokens_ms": metrics["inter_token_latency_ms"]["successful"]["median"],
    }


GUIDELLM = Client("guidellm", ["torch==2.13.0", "guidellm==0.8.1"], run)
