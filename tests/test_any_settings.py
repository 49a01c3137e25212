"""Methods with settings, options and requests of any kind write what plain decoding of the same model writes."""

import functools
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

import selfspec
from helpers.checkpoints import make_tokenizer
from helpers.kernels import needs_kernels
from helpers.low_bit_model import random_model
from helpers.models import VOCABULARY, build
from selfspec import Engine, SamplingParams
from selfspec.errors import InvalidSettingError, UnsupportedModelError
from selfspec.methods import METHODS
from selfspec.runtimes.costs.parts import LatencyProfile
from selfspec.runtimes.target import Target

pytestmark = needs_kernels

MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "native": lambda: random_model(num_key_value_heads=2),
    "int4": lambda: selfspec.quantise(random_model(), "int4"),
    "windows": lambda: build("qwen3-window"),
    "experts": lambda: build("mixtral"),
}
"""All in float32, where text may not depend on how many rows run together."""

NAMES = sorted({*METHODS} - {"mtp", "autoregressive", "sparse"})
"""``mtp`` needs a checkpoint with a head of its own (``methods/test_mtp.py``), ``sparse`` a long text."""


@pytest.fixture(autouse=True)
def equal_latencies(monkeypatch: pytest.MonkeyPatch) -> None:
    """``knapspec`` drafts only where measured latencies promise a gain, on a busy machine maybe nowhere."""

    def measured(target: Target, *_: Any) -> LatencyProfile:
        return LatencyProfile(str(target.device), str(target.dtype), target.layer_count, 0.0, 1e-3, 1e-3, 0.0, 0.0)

    monkeypatch.setattr("selfspec.runtimes.costs.latencies.measure_latencies", measured)


@functools.cache
def model_of(name: str) -> PreTrainedModel:
    return MODELS[name]()


def values_of(described: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values of a setting, as ``selfspec methods`` lists it: its bounds, and what lies between or not far above."""
    kind, low, high = described["type"].split()[0], described["minimum"], described["maximum"]
    if described["choices"]:
        values: st.SearchStrategy[Any] = st.sampled_from(described["choices"])
    elif kind == "bool":
        values = st.booleans()
    elif described["name"].endswith("bits"):
        values = st.sampled_from([4, 6, 8, 16])
    elif described["name"] == "group":
        values = st.sampled_from([32, 64])
    elif kind == "int":
        least = int(low or 0)
        most = sys.maxsize if high is None else int(high)
        values = st.integers(least, min(most, least + 40)) | st.just(min(most, 1000))
    else:
        values = st.floats(low or 0.0, 2.0 if high is None else high)
    return values | st.none() if "none" in described["type"] else values


def settings_of(method: str) -> st.SearchStrategy[dict[str, Any]]:
    each = {one["name"]: values_of(one) for one in METHODS[method].Settings.describe()}
    each.pop("trial_seconds", None)  # a time that the tests would wait for
    return st.fixed_dictionaries({}, optional=each)


PARAMS = st.fixed_dictionaries(
    {"max_new_tokens": st.sampled_from([1, 2, 7, 20, 45]), "ignore_eos": st.booleans()},
    optional={
        "stop_token_ids": st.lists(st.integers(0, VOCABULARY - 1), max_size=6),
        "stop": st.sampled_from([("a",), ("!", "Zq")]),
        "repetition_penalty": st.sampled_from([0.8, 1.3]),
        "frequency_penalty": st.sampled_from([-0.5, 1.5]),
        "logit_bias": st.dictionaries(st.integers(0, VOCABULARY - 1), st.sampled_from([-100.0, 3.0]), max_size=3),
        "logprobs": st.integers(0, 3),
    },
)
SAMPLED = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.4, 1.0, 1.6]), "seed": st.integers(0, 5)},
    optional={"top_k": st.integers(0, 9), "top_p": st.sampled_from([0.2, 0.9]), "min_p": st.sampled_from([0.05, 1.0])},
)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "prefill_chunk": st.sampled_from([1, 5, 16]),
        "prefix_cache": st.sampled_from([1 << 14, 1 << 22]),
        "max_batch": st.integers(1, 3),
    },
)


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """A piece, once or repeated, so that there is something to look up."""
    piece = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=30))
    return (piece * draw(st.integers(1, 4)))[:70]


@st.composite
def requests(draw: st.DrawFn) -> list[tuple[list[int], SamplingParams]]:
    """A batch; a later prompt may begin as an earlier one."""
    found: list[tuple[list[int], SamplingParams]] = []
    for _ in range(draw(st.integers(1, 3))):
        ids = draw(prompts())
        if found and draw(st.booleans()):
            earlier = draw(st.sampled_from(found))[0]
            ids = earlier[: draw(st.integers(1, len(earlier)))] + ids[:20]
        found.append((ids, SamplingParams(**draw(PARAMS), **(draw(SAMPLED) if draw(st.booleans()) else {}))))
    return found


def check(method: str, examples: int) -> None:
    """Runs examples, and checks that over all of them the method drafted and its drafts were accepted."""
    seen: Counter[str] = Counter()

    @settings(
        max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=[*HealthCheck]
    )
    @given(st.sampled_from([*MODELS]), settings_of(method), OPTIONS, st.lists(requests(), min_size=1, max_size=2))
    def writes_the_same(
        name: str, own: dict[str, Any], options: dict[str, Any], batches: list[list[tuple[list[int], SamplingParams]]]
    ) -> None:
        model, tokenizer = model_of(name), make_tokenizer()
        try:
            engine = Engine(model, tokenizer, method=method, settings=own, **options)
        except (InvalidSettingError, UnsupportedModelError):  # values that exclude each other, or this model
            seen["refused"] += 1
            return
        plain = Engine(model, tokenizer, method="autoregressive")
        for batch in batches:
            for (ids, params), written in zip(batch, engine.generate_each(batch), strict=True):
                wanted = plain.generate(ids, params)
                assert written.token_ids == wanted.token_ids
                assert (written.text, written.finish_reason) == (wanted.text, wanted.finish_reason)
                assert [each.logprob for each in written.logprobs or ()] == pytest.approx(
                    [each.logprob for each in wanted.logprobs or ()], abs=1e-3
                )
                seen.update(written=1, drafted=written.drafted, accepted=written.accepted)

    writes_the_same()
    assert seen["written"] > 2, f"{seen['refused']} examples were refused"
    assert seen["drafted"] > 0
    assert seen["accepted"] > 0


@pytest.mark.parametrize("method", NAMES)
def test_any_settings_are_lossless(method: str) -> None:
    check(method, 20)


@pytest.mark.slow
@pytest.mark.parametrize("method", NAMES)
def test_any_settings_are_lossless_in_many_examples(method: str) -> None:
    check(method, 400)
