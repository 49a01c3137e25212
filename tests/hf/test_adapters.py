"""PEFT's adapters: those of layers are a part of the target; what is no part of the layers is refused."""

import copy
from typing import Any

import pytest
import torch

from helpers.models import build, plain_text, prompt
from selfspec import Engine, custom_generate
from selfspec.errors import UnsupportedModelError

peft = pytest.importorskip("peft")

TEXT, LENGTH = prompt(12), 20
UNIFORM = {"skip_ratio": 0.5, "draft_length": 4, "confidence_threshold": 0.0}
TASK = "CAUSAL_LM"
LORA = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type=TASK)
LAYERS = {
    "lora": LORA,
    "lora everywhere": peft.LoraConfig(r=4, target_modules="all-linear", task_type=TASK),
    "dora": peft.LoraConfig(r=4, use_dora=True, target_modules=["q_proj", "down_proj"], task_type=TASK),
    "lora of embedding and head": peft.LoraConfig(r=4, target_modules=["embed_tokens", "lm_head"], task_type=TASK),
    "a head of its own": peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type=TASK),
    "ia3": peft.IA3Config(task_type=TASK),
}
OTHERS = {
    "prompt tuning": (peft.PromptTuningConfig(num_virtual_tokens=4, task_type=TASK), "before the prompt"),
    "prefix tuning": (peft.PrefixTuningConfig(num_virtual_tokens=4, task_type=TASK), "before the prompt"),
    "alora": (
        peft.LoraConfig(r=4, target_modules=["q_proj"], alora_invocation_tokens=[TEXT[8]], task_type=TASK),
        "an aLoRA adapter begins at certain tokens",
    ),
}


def adapted(config: Any) -> Any:
    """A model with an adapter whose weights are random."""
    model = peft.get_peft_model(copy.deepcopy(build("llama")), config)
    return randomise(model)


def randomise(model: Any, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if any(part in name for part in ("lora_", "ia3", "modules_to_save")):
                weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
    return model.eval()


def generate(model: Any, **options: Any) -> tuple[int, ...]:
    ids = torch.tensor([TEXT])
    common = {"attention_mask": torch.ones_like(ids), "max_new_tokens": LENGTH, "do_sample": False, "pad_token_id": 0}
    return tuple(model.generate(input_ids=ids, **common, **options)[0, len(TEXT) :].tolist())


@pytest.mark.parametrize("name", LAYERS)
def test_an_adapter_of_layers_is_a_part_of_the_target(name: str) -> None:
    model = adapted(LAYERS[name])
    expected = generate(model)
    assert expected != plain_text("llama", TEXT, LENGTH)
    assert generate(model, custom_generate=custom_generate("uniform", UNIFORM)) == expected
    output = Engine(model, method="uniform", settings=UNIFORM).generate(TEXT, max_new_tokens=LENGTH)
    assert output.token_ids == expected
    assert output.accepted > 0


def test_the_active_adapter_counts_at_each_call() -> None:
    model, loop = adapted(LORA), custom_generate("uniform", UNIFORM)
    model.add_adapter("other", LORA)
    randomise(model, 1)
    texts = set()
    for change in (None, "other", "merged", "unmerged", "disabled"):
        if change == "other":
            model.set_adapter("other")
        elif change == "merged":
            model.merge_adapter()
        elif change == "unmerged":
            model.unmerge_adapter()
        elif change == "disabled":
            model.base_model.disable_adapter_layers()
        expected = generate(model)
        assert generate(model, custom_generate=loop) == expected
        texts.add(expected)
    assert len(texts) == 3
    assert plain_text("llama", TEXT, LENGTH) in texts


@pytest.mark.parametrize("name", OTHERS)
def test_an_adapter_that_is_no_part_of_the_layers_is_refused(name: str) -> None:
    config, message = OTHERS[name]
    model = adapted(config)
    with pytest.raises(UnsupportedModelError, match=message):
        generate(model, custom_generate=custom_generate)
    with pytest.raises(UnsupportedModelError, match=message):
        Engine(model)


def test_an_adapter_for_each_row_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"adapter_names chooses an adapter for each row.* set_adapter"):
        generate(adapted(LORA), custom_generate=custom_generate, adapter_names=["default"])
