"""On a real, trained chat model: every method writes what the model alone writes, and the ones that search draft well.

The model is ``smollm2``; where it is not installed (`selfspec models install smollm2`) these tests are skipped.
"""

import functools
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase

from selfspec import METHODS, Engine, SamplingParams, load_model
from selfspec.loading import INSTALLABLE, find_installed
from selfspec.runtimes.target import Target
from selfspec_lab.prompts import CHAT_PROMPTS
from selfspec_lab.testing import verifies_exactly

PLAIN = "autoregressive"
PARAMS = SamplingParams(max_new_tokens=12)
_NOTE = "Ann, the meeting moved to Thursday at ten. Bring the plans of the harbour. We meet in the town hall."
PROMPTS = {
    torch.float32: (next(iter(CHAT_PROMPTS.values())), f"Sum up this note in one sentence.\n\n{_NOTE}"),
    torch.bfloat16: (f"Sum up this note in one sentence.\n\n{_NOTE}",),
}
"""Short messages, since most of the time of these tests goes into reading prompts."""
SEARCHING = ("clasp", "knapspec", "self-spec", "swift")
"""Methods that choose which sublayers draft by what they see of the model."""
QUICK = ("autoregressive", "auto", "clasp")
"""Methods that are compared with transformers each time; all are in bfloat16."""

_FILE = find_installed(INSTALLABLE["smollm2"])
pytestmark = [
    pytest.mark.trained,
    pytest.mark.skipif(_FILE is None, reason="smollm2 is not installed: selfspec models install smollm2"),
]


@functools.cache
def load(dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in bfloat16, or the same weights in float32, with the numbers of its file."""
    return load_model("smollm2", dtype=dtype)


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@functools.cache
def expected(dtype: torch.dtype) -> list[tuple[int, ...]]:
    """What the model alone writes: in float32 by transformers' ``generate``, in bfloat16 by plain decoding."""
    model, tokenizer = load(dtype)
    engine = Engine(model, tokenizer, method="autoregressive")
    if dtype == torch.bfloat16:
        return [engine.generate(ask(text), PARAMS).token_ids for text in PROMPTS[dtype]]
    outputs = []
    for text in PROMPTS[dtype]:
        prompt = torch.tensor([engine.encode(ask(text))])
        written: Any = model.generate(prompt, do_sample=False, max_new_tokens=PARAMS.max_new_tokens)  # type: ignore[operator]
        outputs.append(tuple(written[0, prompt.shape[1] :].tolist()))
    return outputs


CASES = [
    pytest.param(dtype, method, marks=[pytest.mark.slow] * (dtype == torch.float32 and method not in QUICK))
    for dtype in (torch.float32, torch.bfloat16)
    for method in METHODS
    if method not in ("mtp", "sparse")  # they need a head, and a long text
]


@pytest.mark.parametrize(("dtype", "method"), CASES, ids=str)
def test_every_method_writes_the_models_own_text(dtype: torch.dtype, method: str) -> None:
    if dtype == torch.bfloat16 and not verifies_exactly(dtype):
        pytest.skip("on this processor a verification in bfloat16 rounds otherwise than single steps")
    model, tokenizer = load(dtype)
    settings = {"recent_tokens": 4} if method == "knapspec" else {}  # so that short outputs have a draft
    engine = Engine(model, tokenizer, method, settings=settings)
    results = [engine.generate(ask(text), PARAMS) for text in PROMPTS[dtype]]
    assert [result.token_ids for result in results] == expected(dtype)
    assert method == PLAIN or sum(result.drafted for result in results) > 0
    if method in SEARCHING:
        assert sum(result.accepted for result in results) > 0


def test_answers_make_sense() -> None:
    model, tokenizer = load(torch.bfloat16)
    answer = Engine(model, tokenizer, "suffix").generate(ask("In which city is the Eiffel Tower?"), max_new_tokens=48)
    assert "Paris" in answer.text
    assert answer.finish_reason == "eos"


@pytest.mark.slow
def test_weights_are_those_that_transformers_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _FILE is not None
    gguf = pytest.importorskip("gguf")
    # transformers makes this map, which takes 17 ms, for every module of the model.
    monkeypatch.setattr("gguf.get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
    read: Any = AutoModelForCausalLM.from_pretrained(
        _FILE.parent, gguf_file=_FILE.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    weights, (model, tokenizer) = read.state_dict(), load_model("smollm2", unpack=True)
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())
    assert Target(model).parameter_count == Target(load(torch.bfloat16)[0]).parameter_count == 134_515_008
    assert len(tokenizer) == 49_152


def test_the_tokenizer_is_lossless_and_knows_the_marks_of_a_chat() -> None:
    model, tokenizer = load(torch.bfloat16)
    text = "def area(r):\n    return 3.14159 * r ** 2  # naïve, 漢字 🙂\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    ids = Engine(model, tokenizer, method="autoregressive").encode(ask("Hello"))
    assert tokenizer.convert_ids_to_tokens([ids[0], tokenizer.eos_token_id]) == ["<|im_start|>", "<|im_end|>"]


def test_an_engine_is_made_by_its_name() -> None:
    engine = Engine.from_pretrained("smollm2", "suffix")
    result = engine.generate(ask(CHAT_PROMPTS["summary"]), max_new_tokens=24)
    assert result.accepted > 0
    plain = Engine(engine.target.model, engine.tokenizer, method="autoregressive").generate(
        ask(CHAT_PROMPTS["summary"]), max_new_tokens=24
    )
    assert result.token_ids == plain.token_ids or not verifies_exactly(torch.bfloat16)
