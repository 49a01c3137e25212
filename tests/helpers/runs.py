"""Prompt lengths and settings that every method is tried with on the tiny models."""

from dataclasses import dataclass, field
from typing import Any

from helpers.models import LAYERS
from selfspec.methods import METHODS
from selfspec.methods.base import Method

METHODS_OF_ANY_MODEL: dict[str, type[Method]] = {
    name: each for name, each in METHODS.items() if name not in ("low-bit", "mtp", "sparse")
}
"""Methods that need neither kernels, nor a head, nor a long text; the others have tests of their own."""


@dataclass(frozen=True)
class Run:
    """A method at work on one prompt."""

    length: int
    settings: dict[str, Any] = field(default_factory=dict)
    new_tokens: int = 24


RUNS: dict[str, tuple[Run, ...]] = {
    "autoregressive": (Run(1), Run(17), Run(64)),
    "clasp": (
        Run(1, {"skipped_layers": 2, "update_interval": 1, "draft_exit_threshold": 0.2, "draft_length": 4}),
        Run(17, {"skip_ratio": 0.5, "update_interval": 3, "draft_exit_threshold": 0.0, "draft_length": 3}),
        Run(64, {"skipped_layers": 1, "update_interval": 2, "draft_exit_threshold": 0.3, "draft_length": 8}),
    ),
    "uniform": (
        Run(1, {"skip_ratio": 0.5, "draft_length": 3, "confidence_threshold": 0.0}),
        Run(17, {"skip_ratio": 0.3, "draft_length": 8, "confidence_threshold": 0.3}),
        Run(64, {"skip_ratio": 1.0, "draft_length": 2, "confidence_threshold": 0.9}),
    ),
    "knapspec": (
        Run(1, {"interval": 5, "schedule": "paper", "recent_rounds": 1}),
        Run(64, {"interval": 8, "schedule": "paper", "confidence_threshold": 0.3, "tpt": "with_head"}),
    ),
    "layerskip": (
        Run(2, {"exit_layer": 1, "draft_length": 2}),
        Run(64, {"exit_layer": 3, "draft_length": 6}),
        Run(17, {"exit_layer": LAYERS - 1, "draft_length": 20}),
    ),
    "layerskip-fs": (
        Run(1, {"exit_layer": 5, "draft_length": 2}),
        Run(64, {"exit_layer": 2, "draft_length": 9, "max_draft_length": 10}),
    ),
    "layerskip-dv": (
        Run(2, {"exit_layer": 4, "threshold": 0.2}),
        Run(64, {"exit_layer": 2, "threshold": 0.8, "step": 0.1}),
    ),
    "del": (
        Run(2, {"schedule": "paper"}),
        Run(17, {"schedule": "paper", "d_max": 3, "omega": 0.0, "keep_prompt": True}),
        Run(64, {"d_max": 40, "omega": 1.0, "context_window": 5, "allow_no_draft": False}),
    ),
    "swift": (
        Run(1, {"context_window": 6, "bayesian_interval": 3, "confidence_threshold": 0.3, "max_draft_length": 5}),
        Run(17, {"context_window": 4, "skip_ratio": 0.6, "dynamic_verification": False}),
        Run(64, {"context_window": 8, "confidence_threshold": 0.0, "max_draft_length": 3, "max_siblings": 5}),
    ),
    "self-spec": (
        Run(2, {"threshold": 0.2}),
        Run(64, {"skip_ratio": 0.7, "threshold": 0.8, "step": 0.1}),
    ),
    "prompt-lookup": (
        Run(1, {"num_tokens": 4}, new_tokens=48),
        Run(64, {"max_matching_ngram_size": 1}, new_tokens=33),
    ),
    "suffix": (Run(1, {"max_spec_factor": 2.0}, new_tokens=48), Run(64, new_tokens=33)),
    "token-recycling": (
        Run(1, {"candidates": 8, "tree_size": 24, "prompt_rows": 0}, new_tokens=48),
        Run(64, {"candidates": 4, "tree_size": 12, "tree_depth": 4}, new_tokens=33),
    ),
}
"""Settings that suit six layers; a method without an entry runs with its defaults."""

DEFAULT_RUNS = (Run(1), Run(64))
