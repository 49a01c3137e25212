"""The kept set that a method finds on some texts."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from selfspec import Engine, Prompt
from selfspec.decoding.draft import LayerDraft
from selfspec.errors import InvalidParameterError
from selfspec.methods import find_method
from selfspec.methods.fixed import Profile, SelfSpec
from selfspec.methods.payoff import expected_speedup
from selfspec.methods.selecting import SelectingMethod
from selfspec.model.kept import KeptSet
from selfspec.runtimes.target import Target
from selfspec_lab.export.whole import Text, agreeing
from selfspec_lab.tuning import tune

LOW_BIT = "low-bit"
EXPORTED = ("knapspec", "clasp", "swift", "self-spec", LOW_BIT)
"""Methods whose drafts a checkpoint can hold."""

MOST_DRAFTED = 8
"""Most draft tokens of a round."""

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
) -> tuple[KeptSet, list[Text]]:
    """Lets the engine's method search on some prompts, or loads what it has found before.

    What a method selects for one text may not serve another one. Of what it has selected after each text, the set is
    taken that promises most on all of them.

    Args:
        engine: with one of the methods ``EXPORTED``.
        prompts: what it searches on.
        max_new_tokens: tokens to generate for each.
        iterations: sets that ``self-spec`` measures; the others search while they generate.
        state: a state file of the method; its set is taken as it is.
        progress: is called with a line of text before each part that takes long.

    Returns:
        The sublayers that draft, for ``low-bit`` all of them; and the prompts with what the target wrote.

    Raises:
        InvalidParameterError: the method selected nothing that skips a sublayer.
        StateError: the state is not of this method or model.
    """
    if engine.method.name == LOW_BIT:
        return KeptSet.full(engine.target.sublayer_count), []
    if state is not None:
        engine.load_state(state)
    elif isinstance(engine.method, SelfSpec):
        _tune(engine, prompts, max_new_tokens, iterations, progress)
    saved = [] if state is None else [_selected(engine.method)]
    texts: list[Text] = []
    found = []
    for number, prompt in enumerate(prompts, 1):
        progress(f"searching on text {number} of {len(prompts)}")
        ids = engine.encode(prompt)
        texts.append((ids, engine.generate(ids, max_new_tokens=max_new_tokens, ignore_eos=True).token_ids))
        found.append(_selected(engine.method))
    sets = dict.fromkeys(kept for kept in saved or found if kept is not None and kept.skipped)
    if not sets:
        raise InvalidParameterError(
            f"{engine.method.name} selected no sublayers to skip on these texts; give more or longer ones by --texts "
            "and --max-new-tokens, or another method"
        )
    return max(sets, key=lambda kept: _promise(engine.target, kept, texts)), texts


def _promise(target: Target, kept: KeptSet, texts: Sequence[Text]) -> float:
    """The speedup of a kept set by its agreement with the target, if every sublayer takes as long."""
    tokens = sum(len(written) for _, written in texts)
    right = sum(agreeing(target, kept, *text) for text in texts)
    return expected_speedup(right / tokens, len(kept.sublayers) / kept.total, MOST_DRAFTED)


def _tune(
    engine: Engine, prompts: Sequence[Prompt], max_new_tokens: int, iterations: int, progress: Callable[[str], None]
) -> None:
    """The search of ``selfspec tune``; the method uses its best set from then on."""
    trials = []
    for trial in tune(engine, prompts, iterations=iterations, max_new_tokens=max_new_tokens):
        trials.append(trial)
        progress(f"{len(trials)} of {iterations} sets measured")
    method: Any = engine.method
    method.adopt(Profile(max(trials, key=lambda trial: trial.tokens_per_second).skipped))


def _selected(method: Any) -> KeptSet | None:
    """What a method drafts with now; ``None`` before it has selected anything, or if it drafts nothing."""
    if isinstance(method, SelfSpec):
        return KeptSet.skipping(method.profile.skipped, method.target.sublayer_count)
    assert isinstance(method, SelectingMethod)
    draft = None if method.last_choice is None else method.last_choice.draft
    return draft.kept if isinstance(draft, LayerDraft) else None
