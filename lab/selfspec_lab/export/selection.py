"""The kept set that a method finds on some texts."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from selfspec import Engine, Prompt
from selfspec.decoding.draft import LayerDraft
from selfspec.errors import InvalidParameterError
from selfspec.methods import find_method
from selfspec.methods.draft_verify import SelfSpec
from selfspec.methods.selecting import SelectingMethod
from selfspec.model.kept import KeptSet
from selfspec_lab.tuning import tune

LOW_BIT = "low-bit"
EXPORTED = ("knapspec", "clasp", "swift", "self-spec", LOW_BIT)
"""Methods whose drafts a checkpoint can hold."""

OFFLINE: dict[str, dict[str, Any]] = {"swift": {"schedule": "paper"}}
"""Settings by method for a search that need not pay for itself while it runs."""


def check_method(name: str) -> None:
    """Checks that a method drafts with one part of the model.

    Raises:
        UnknownMethodError: there is no such method.
        InvalidParameterError: it has no kept set.
    """
    if name not in EXPORTED:
        find_method(name)
        raise InvalidParameterError(
            f"'{name}' has no kept set that a checkpoint could hold; choose {', '.join(EXPORTED)}"
        )


def find_kept(
    engine: Engine,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    iterations: int,
    state: Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> KeptSet:
    """Lets the engine's method search on some prompts, or loads what it has found before.

    Args:
        engine: with one of the methods ``EXPORTED``.
        prompts: what it searches on.
        max_new_tokens: tokens to generate for each.
        iterations: sets that ``self-spec`` measures; the others search while they generate.
        state: a state file of the method; it is used as it is, without a search.
        progress: is called with a line of text before each part that takes long.

    Returns:
        The sublayers that draft; for ``low-bit`` all of them.

    Raises:
        InvalidParameterError: the method selected nothing that skips a sublayer.
        StateError: the state is not of this method or model.
    """
    if engine.method.name == LOW_BIT:
        return KeptSet.full(engine.target.sublayer_count)
    if state is not None:
        engine.load_state(state)
    elif isinstance(engine.method, SelfSpec):
        return _fastest(engine, prompts, max_new_tokens, iterations, progress)
    else:
        for number, prompt in enumerate(prompts, 1):
            progress(f"searching on text {number} of {len(prompts)}")
            engine.generate(prompt, max_new_tokens=max_new_tokens, ignore_eos=True)
    return _selected(engine.method)


def _fastest(
    engine: Engine, prompts: Sequence[Prompt], max_new_tokens: int, iterations: int, progress: Callable[[str], None]
) -> KeptSet:
    trials = []
    for trial in tune(engine, prompts, iterations=iterations, max_new_tokens=max_new_tokens):
        trials.append(trial)
        progress(f"{len(trials)} of {iterations} sets measured")
    best = max(trials, key=lambda trial: trial.tokens_per_second)
    return KeptSet.skipping(best.skipped, engine.target.sublayer_count)


def _selected(method: Any) -> KeptSet:
    if isinstance(method, SelfSpec):
        return KeptSet.skipping(method.profile.skipped, method.target.sublayer_count)
    assert isinstance(method, SelectingMethod)
    draft = None if method.last_choice is None else method.last_choice.draft
    if not isinstance(draft, LayerDraft) or not draft.kept.skipped:
        raise InvalidParameterError(
            f"{method.name} selected no sublayers to skip on these texts; give more or longer ones by --texts and "
            "--max-new-tokens, or another method"
        )
    return draft.kept
