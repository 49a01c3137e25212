"""What the parts of claim 7 share: KnapSpec with known latencies, what it selects at the end of a text, long texts."""

import importlib
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from selfspec.errors import InvalidParameterError
from selfspec.methods.base import Prefill
from selfspec.methods.knapsack import Selection
from selfspec.methods.knapspec import KnapSpec, KnapSpecDrafter, KnapSpecSettings
from selfspec.methods.state import LearnedState
from selfspec.runtimes.latency import LatencyProfile, measure_latencies
from selfspec.runtimes.target import Target
from selfspec_lab.experiments.prefilled import prefill_text

MODEL = "tiny"
"""The checkpoint that the parts run on unless another one is asked for."""

_PASSES = 30

_MODULES = ("argparse", "difflib", "heapq", "shutil", "tarfile", "textwrap", "configparser", "optparse")
"""Of the standard library, with sources of several thousand tokens."""


def measure_profile(target: Target) -> LatencyProfile:
    """The latencies of this model on this machine, now, whatever profile may be kept of it.

    Raises:
        InvalidParameterError: the model has no sublayers to select from.
    """
    if target.layer_count < 3:
        raise InvalidParameterError(
            f"knapspec never skips the first and the last layer, so a model of {target.layer_count} layers leaves it "
            "nothing to select; take one of at least 3"
        )
    return measure_latencies(target, repeats=_PASSES)


def knapspec_with(target: Target, profile: LatencyProfile, **settings: Any) -> KnapSpec:
    """KnapSpec that takes given latencies instead of measuring any.

    Args:
        target: the model.
        profile: its latencies.
        **settings: values of its settings by name.
    """
    method = KnapSpec(target, KnapSpecSettings(**settings))
    method.restore(LearnedState({"latency_profile": profile.to_dict()}))
    return method


def read(method: KnapSpec, token_ids: Sequence[int]) -> Prefill:
    """Runs a text through the target for the method to select at its end."""
    return prefill_text(method.target, token_ids, method.needs)


@torch.inference_mode()
def select(method: KnapSpec, prefilled: Prefill) -> Selection:
    """What the method selects for the first round behind a text."""
    drafter = method.begin(prefilled)
    assert isinstance(drafter, KnapSpecDrafter)
    assert drafter.selection is not None
    return drafter.selection


def read_sources(tokenizer: PreTrainedTokenizerBase, count: int, tokens: int) -> list[list[int]]:
    """The first tokens of modules of the standard library.

    Args:
        tokenizer: the model's.
        count: how many modules, up to eight.
        tokens: length of each.

    Returns:
        Token ids of each.
    """
    sources = [inspect.getsource(importlib.import_module(name)) for name in _MODULES[:count]]
    return [tokenizer.encode(source, truncation=True, max_length=tokens) for source in sources]


def last_tokens(document: Sequence[int], count: int) -> list[int]:
    """A document's end behind its first token, which may be one that texts begin with: the same end at any length."""
    return [document[0], *document[len(document) - count + 1 :]]
