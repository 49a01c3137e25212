"""Cascades: the first stage that has a draft drafts; what is found guesses for the layers of a later stage."""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from selfspec.decoding.draft import Draft, LayerDraft, NoDraft, TokenDraft
from selfspec.decoding.drafter import Drafter, Feedback, Needs, Prefill
from selfspec.errors import InvalidSettingError, StateError, UnknownMethodError
from selfspec.methods.base import Method
from selfspec.methods.registry import find_method
from selfspec.methods.settings import MethodSettings, setting, suggest
from selfspec.methods.state import LearnedState
from selfspec.runtimes.seen_text import AttentionShares
from selfspec.runtimes.target import Target

if TYPE_CHECKING:
    from typing_extensions import Self

MOST_STAGES = 3

_BEFORE_OTHERS: Mapping[str, Mapping[str, Any]] = {
    "suffix": {"min_match_length": 4},
    "prompt-lookup": {"min_matching_ngram_size": 3},
}
"""Defaults of settings that differ before another stage, by the stage's method."""


@dataclass(frozen=True)
class CascadeSettings(MethodSettings):
    """Settings of a cascade itself, and those of its stages, which are set as ``STAGE.NAME``."""

    nested: bool = setting(True, "what earlier stages find guesses for the layer draft of a later one")
    guess_match: int = setting(2, "shortest match to guess from, in tokens", minimum=1)
    guess_length: int = setting(3, "guessed tokens in one forward of the draft, at most", minimum=1, maximum=32)

    stages: tuple[MethodSettings, ...] = ()
    names: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def parse(cls, method: str, values: Mapping[str, Any]) -> "Self":
        """Takes the settings of a stage as ``STAGE.NAME``, or as a mapping at ``STAGE``."""
        own: dict[str, Any] = {}
        of_stages: dict[str, dict[str, Any]] = {name: {} for name in cls.names}
        for name, value in values.items():
            stage, dot, key = name.partition(".")
            if stage not in of_stages:
                own[name] = value
                continue
            if not dot and not isinstance(value, Mapping):
                raise InvalidSettingError(f"'{stage}' is a stage of {method}; set one of its settings, {stage}.NAME")
            for one, given in {key: value}.items() if dot else value.items():
                if one in of_stages[stage]:
                    raise InvalidSettingError(f"{stage}.{one} is given twice; leave one out")
                of_stages[stage][one] = given
        known = dict.fromkeys(entry["name"] for entry in super().describe())
        if (unknown := next((name for name in own if name not in known), None)) is not None:
            every = ", ".join([*known, *(f"{name}.NAME" for name in cls.names)])
            raise InvalidSettingError(
                f"{method} has no setting '{unknown}'{suggest(unknown, known)} (its settings: {every})"
            )
        parsed = super().parse(method, own)
        stages = zip(cls.names, parsed.stages, strict=True)
        given_stages = (type(usual).parse(name, usual.to_values() | of_stages[name]) for name, usual in stages)
        return replace(parsed, stages=tuple(given_stages))

    def to_values(self) -> dict[str, Any]:
        """Its own values, and those of stages as ``STAGE.NAME``."""
        stages = zip(self.names, self.stages, strict=True)
        return super().to_values() | {
            f"{stage}.{name}": value for stage, own in stages for name, value in own.to_values().items()
        }

    @classmethod
    def describe(cls) -> list[dict[str, Any]]:
        """Its own settings, and those of stages as ``STAGE.NAME``."""
        own, usual = super().describe(), cls()
        for stage, settings in zip(cls.names, usual.stages, strict=True):
            for entry in type(settings).describe():
                own.append(
                    {**entry, "name": f"{stage}.{entry['name']}", "default": settings.to_values()[entry["name"]]}
                )
        return own


class Cascade(Method):
    """Two or three methods in order: each round is drafted by the first that has a draft.

    Token drafts come first, since they cost nothing. One that finds no match, or a match that is too short by its own
    settings, leaves the round to the next stage. With ``nested``, what it does find guesses for the layers that draft
    then: they draft their own tokens, several in one forward where the guesses are right (``LayerDraft.guess``), and
    the target verifies them.

    A stage learns from the rounds that it drafted, and from those of other stages what it can use
    (``Drafter.observe``). In a batch each request may be at another stage; a stage plans for those that reach it.
    ``docs/cascades.md`` has the measurements that the defaults rest on.
    """

    name = "cascade"
    summary = "cascade(suffix, low-bit): the first of 2 or 3 methods that has a draft (--set STAGE.KEY=VALUE)"
    source = "cascade speculative drafting (Chen et al. 2024), with drafts of the model itself"
    Settings = CascadeSettings
    settings: CascadeSettings
    stages: ClassVar[tuple[type[Method], ...]] = ()

    def __init__(self, target: Target, settings: CascadeSettings) -> None:
        super().__init__(target, settings)
        self.methods = tuple(stage(target, own) for stage, own in zip(self.stages, settings.stages, strict=True))

    @classmethod
    def named(cls, names: Sequence[str]) -> "type[Cascade]":
        """The cascade of methods by name."""
        return cls.of([find_method(name) for name in names])

    @classmethod
    def of(cls, stages: Sequence[type[Method]]) -> "type[Cascade]":
        """The cascade of two or three different methods, in the order in which they are asked: a class of its own."""
        names = [stage.name for stage in stages]
        if any(issubclass(stage, Cascade) for stage in stages):
            raise UnknownMethodError("a stage of a cascade cannot be a cascade; write all stages side by side")
        if not 2 <= len(stages) <= MOST_STAGES:
            raise UnknownMethodError(
                f"a cascade has 2 or {MOST_STAGES} stages, not {len(stages)}; write for example "
                "cascade(suffix, low-bit)"
            )
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise UnknownMethodError(f"the cascade has '{twice}' twice; name each stage once")
        return _cascade_of(tuple(stages))

    @property
    def needs(self) -> Needs:
        """What all stages need together."""
        return Needs.union([method.needs for method in self.methods])

    def begin(self, prefill: Prefill) -> Drafter:
        """Starts all stages on a request."""
        stages = [method.begin(_restricted(prefill, method.needs)) for method in self.methods]
        return CascadeDrafter(self, stages)

    def plan(self, drafters: Sequence[Drafter]) -> list[Draft]:
        """Asks one stage after the other, each for all requests that the stages before it have left."""
        drafts: dict[Drafter, Draft] = {}
        for level, method in enumerate(self.methods):
            waiting = [each for each in drafters if isinstance(each, CascadeDrafter) and each not in drafts]
            planned = method.plan([drafter.stages[level] for drafter in waiting]) if waiting else []
            for drafter, draft in zip(waiting, planned, strict=True):
                if not drafter.leaves(level, draft):
                    drafts[drafter] = drafter.take(level, draft)
        return [drafts[drafter] for drafter in drafters]

    def prepare(self, progress: Callable[[str], None] = lambda _: None) -> None:
        """Prepares all stages."""
        for method in self.methods:
            method.prepare(progress)

    def state(self) -> LearnedState:
        """What its stages have learned, under their names."""
        states = {method.name: state for method in self.methods if (state := _state_of(method)) is not None}
        if not states:
            return super().state()
        return LearnedState(
            {name: state.values for name, state in states.items()},
            {f"{name}.{key}": tensor for name, state in states.items() for key, tensor in state.tensors.items()},
        )

    def restore(self, state: LearnedState) -> None:
        """Loads the state of all stages that learn, or of none where one does not fit."""
        self.state()
        before = {method: saved for method in self.methods if (saved := _state_of(method)) is not None}
        try:
            for method in before:
                method.restore(_stage_of(state, method.name))
        except Exception:
            for method, saved in before.items():
                method.restore(saved)
            raise


@functools.cache
def _cascade_of(stages: tuple[type[Method], ...]) -> type[Cascade]:
    """The class of a cascade, one for equal stages."""
    names = tuple(stage.name for stage in stages)
    before_others = [_BEFORE_OTHERS.get(name, {}) for name in names[:-1]]
    usual = tuple(stage.Settings(**changed) for stage, changed in zip(stages, [*before_others, {}], strict=True))
    own = [("stages", tuple[MethodSettings, ...], field(default=usual))]
    bases = (CascadeSettings,)
    settings = make_dataclass("CascadeSettings", own, bases=bases, frozen=True, namespace={"names": names})
    name = f"{Cascade.name}({', '.join(names)})"
    namespace = {"name": name, "Settings": settings, "stages": stages, "learns": any(stage.learns for stage in stages)}
    return type("Cascade", (Cascade,), {**namespace, "__doc__": Cascade.__doc__, "__module__": __name__})


def _restricted(prefill: Prefill, needs: Needs) -> Prefill:
    """With no more states of the prompt than these needs ask for."""
    rows, wanted = needs.prompt_rows, needs.prompt_states if needs.prompt_rows else frozenset()
    states = {index: states[-rows:] for index, states in prefill.hidden_states.items() if index in wanted}
    return replace(prefill, hidden_states=states)


def _state_of(method: Method) -> LearnedState | None:
    """What a stage has learned; ``None`` where it learns nothing, or its settings leave nothing to save."""
    try:
        return method.state() if method.learns else None
    except StateError:
        return None


def _stage_of(state: LearnedState, name: str) -> LearnedState:
    values = state.values.get(name)
    if not isinstance(values, dict):
        raise StateError(f"this state has nothing of {name}; give another file, or start without it")
    start = f"{name}."
    tensors = {key.removeprefix(start): tensor for key, tensor in state.tensors.items() if key.startswith(start)}
    return LearnedState(values, tensors)


class CascadeDrafter(Drafter):
    """One request, with the drafters of the cascade's stages, in their order."""

    def __init__(self, method: Cascade, stages: Sequence[Drafter]) -> None:
        self.stages = tuple(stages)
        self._method = method
        self._level = 0
        self._planned: Draft = NoDraft()

    def plan(self) -> Draft:
        """The draft of the first stage that has one."""
        return self._method.plan([self])[0]

    def leaves(self, level: int, draft: Draft) -> bool:
        """Whether a stage leaves the round to the next one: it drafts nothing, and wants nothing of a plain round."""
        stage = self.stages[level]
        return isinstance(draft, NoDraft) and not stage.watched and level + 1 < len(self.stages)

    def take(self, level: int, draft: Draft) -> Draft:
        """The draft of a stage for the coming round, with guesses where layers draft and earlier stages find tokens."""
        self._level, self._planned = level, draft
        if level and self._method.settings.nested and isinstance(draft, LayerDraft):
            draft = replace(draft, guess=self._guess)
        if isinstance(draft, NoDraft | TokenDraft):
            draft = replace(draft, follow=None)  # all stages look again after each round
        return replace(draft, name=self._method.methods[level].name)

    @property
    def attention_shares(self) -> AttentionShares | None:
        """Of the first stage that drafts by them, which all rounds note: it may draft after any."""
        return next((stage.attention_shares for stage in self.stages if stage.attention_shares is not None), None)

    @property
    def mask_embedding(self) -> torch.Tensor | None:
        """That of the stage whose draft it is."""
        return self.stages[self._level].mask_embedding

    @property
    def watched(self) -> Collection[int]:
        """What the stage that drafts watches, and what others follow."""
        return {*self.stages[self._level].watched, *(index for stage in self.stages for index in stage.followed)}

    def learn(self, feedback: Feedback) -> None:
        """The stage that drafted learns from the round, the others observe it."""
        own = replace(feedback, draft=self._planned)
        for level, stage in enumerate(self.stages):
            if level == self._level:
                stage.learn(own)
            else:
                stage.observe(own)

    def _guess(self, drafted: Sequence[int]) -> tuple[int, ...]:
        """What the first of the earlier stages that finds a match expects after the drafted tokens."""
        settings = self._method.settings
        for stage in self.stages[: self._level]:
            found = stage.continue_after(drafted)
            if found.match_length >= settings.guess_match:
                return found.token_ids[: settings.guess_length]
        return ()
