"""Greedy float32 texts of vLLM: ``python vllm_program.py FOLDER REQUEST``, JSON in, JSON in the last line out.

Run by an interpreter that has vLLM, with ``src`` in its path. ``REQUEST`` has ``prompts`` (token ids), ``tokens`` and
``options`` of the engine, ``together`` (all in one batch). Prints the ``token_ids`` and, with the bridge, its counts.
"""

import json
import os
import sys

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}


def main(folder: str, request: str) -> None:
    """Loads the engine and answers."""
    from vllm import LLM, SamplingParams

    asked = json.loads(request)
    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=4,
        enable_prefix_caching=False,
        **asked["options"],
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=asked["tokens"], ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
    batches = [prompts] if asked["together"] else [[prompt] for prompt in prompts]
    token_ids = [
        list(output.outputs[0].token_ids)
        for batch in batches
        for output in llm.generate(batch, sampling, use_tqdm=False)
    ]
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    drafts = getattr(getattr(worker.model_runner, "drafter", None), "drafts", None)
    counts = {} if drafts is None else {name: getattr(drafts, name) for name in ("drafted", "accepted", "rounds")}
    print("\n" + json.dumps({"token_ids": token_ids, **counts}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
