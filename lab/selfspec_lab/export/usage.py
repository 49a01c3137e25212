"""The commands that use an exported draft, for each engine that takes it."""

import json
from pathlib import Path

GGUF_NAME = "draft.gguf"


def usage(form: str, model: str, folder: Path, length: int) -> dict[str, str]:
    """By engine what runs it with a draft model.

    Args:
        form: ``transformers`` or ``gguf``.
        model: name of the target. Names that selfspec alone knows are replaced by ``MODEL``.
        folder: where the draft is.
        length: draft tokens of a round.
    """
    named = model if "/" in model or Path(model).exists() else "MODEL"
    return _llama_cpp(named, folder, length) if form == "gguf" else _of_checkpoints(named, folder, length)


def _llama_cpp(model: str, folder: Path, length: int) -> dict[str, str]:
    target = model if model.endswith(".gguf") else "MODEL.gguf"
    draft = f"-md {folder / GGUF_NAME} --spec-type draft-simple --spec-draft-n-max {length}"
    return {"llama.cpp": f"llama-server -m {target} {draft}"}


def _of_checkpoints(model: str, folder: Path, length: int) -> dict[str, str]:
    speculative = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": length}
    return {
        "transformers": (
            f'assistant = AutoModelForCausalLM.from_pretrained("{folder}")\n'
            "output = model.generate(**inputs, assistant_model=assistant)"
        ),
        "vLLM": f"vllm serve {model} --speculative-config '{json.dumps(speculative)}'",
        "SGLang": (
            f"python -m sglang.launch_server --model-path {model} --speculative-algorithm STANDALONE "
            f"--speculative-draft-model-path {folder} --speculative-num-steps {length} --speculative-eagle-topk 1 "
            f"--speculative-num-draft-tokens {length + 1}"
        ),
    }
