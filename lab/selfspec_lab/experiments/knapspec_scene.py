"""Shared by the parts of claim 7: KnapSpec with given latencies, its selections at the end of texts, long texts."""

import importlib
import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from selfspec.errors import InvalidParameterError
from selfspec.methods.api import LearnedState, Prefill
from selfspec.methods.knapsack import Selection
from selfspec.methods.knapspec import KnapSpec, KnapSpecDrafter, KnapSpecSettings
from selfspec_lab.measuring import LatencyProfile, Target, measure_latencies
from selfspec_lab.testing import read_text

MODEL = "tiny"
"""The default checkpoint."""

WINDOW = 16
"""Tokens that a selection at the end of a text uses."""

_PASSES = 30

_MODULES = (
    *("argparse", "difflib", "heapq", "shutil", "tarfile", "configparser", "optparse", "zipfile", "doctest", "inspect"),
    *("locale", "mailbox", "pickle", "platform", "pydoc", "random", "smtplib", "statistics", "subprocess", "threading"),
    *("turtle", "typing", "uuid", "calendar"),
)
"""Modules of the standard library with sources of several thousand tokens."""


def measure_profile(target: Target) -> LatencyProfile:
    """Measures the latencies of a model, ignoring kept profiles.

    Raises:
        InvalidParameterError: the model has too few layers to select from.
    """
    if target.layer_count < 3:
        raise InvalidParameterError(
            f"knapspec never skips the first and the last layer, so a model of {target.layer_count} layers leaves "
            "nothing to select; use one of at least 3 layers"
        )
    return measure_latencies(target, repeats=_PASSES)


def knapspec_with(target: Target, profile: LatencyProfile, **settings: Any) -> KnapSpec:
    """KnapSpec, on the paper's schedule, with given latencies instead of measured ones.

    Args:
        target: the model.
        profile: its latencies.
        **settings: values of its settings.
    """
    method = KnapSpec(target, KnapSpecSettings(**{"schedule": "paper", **settings}))
    method.restore(LearnedState({"latency_profile": profile.to_dict()}))
    return method


def read(method: KnapSpec, token_ids: Sequence[int]) -> Prefill:
    """Prefills a text, so that the method can select at its end, on its last ``WINDOW`` tokens."""
    needs = replace(method.needs, prompt_rows=WINDOW, prompt_states=frozenset(method.watched))
    return read_text(method.target, token_ids, needs)[1]


@torch.inference_mode()
def select(method: KnapSpec, prefilled: Prefill) -> Selection:
    """The method's selection at the end of a text."""
    drafter = method.begin(prefilled)
    assert isinstance(drafter, KnapSpecDrafter)
    drafter.choose(torch.stack([prefilled.hidden_states[index] for index in method.watched]))
    assert drafter.selection is not None
    return drafter.selection


def read_sources(tokenizer: PreTrainedTokenizerBase, count: int, tokens: int) -> list[list[int]]:
    """The first tokens of modules of the standard library.

    Args:
        tokenizer: the model's tokenizer.
        count: number of modules, up to 24.
        tokens: number of tokens of each.

    Returns:
        Token ids of each.
    """
    sources = [inspect.getsource(importlib.import_module(name)) for name in _MODULES[:count]]
    return [tokenizer.encode(source, truncation=True, max_length=tokens) for source in sources]


def last_tokens(document: Sequence[int], count: int) -> list[int]:
    """The document's first token (which may be BOS), then its last ``count - 1`` tokens."""
    return [document[0], *document[len(document) - count + 1 :]]
