"""All that the author of a method imports. ``docs/writing-a-method.md`` explains it with examples.

The method:
    ``Method`` is subclassed: name, summary, source, settings, and ``begin``, which starts on a request.
    ``MethodSettings`` and ``setting`` make its settings, ``Needs`` says what it needs of every request.
    ``PrecisionSettings`` are ``MethodSettings`` with ``draft_bits``, which ``Method`` puts into effect.
    ``LearnedState`` is what it can save and load. ``Target`` is the model that it is given. ``register`` is for methods
    inside selfspec only.

One request:
    ``Drafter`` is subclassed: ``plan`` says what drafts the next round, ``learn`` is given the round's ``Feedback``.
    ``FixedDrafter`` plans the same draft every round. ``Continuation`` is what a drafter of found tokens expects.
    ``Prefill`` is what ``begin`` is given: the prompt, the first token, and a ``Probe``, which runs parts of the model.

What drafts a round, a ``Draft``:
    ``LayerDraft`` drafts with a ``KeptSet`` of the model's sublayers until a limit or a ``ConfidenceThreshold``.
    It may be given a ``Guess`` of what it drafts next, a ``Chooser`` of its tokens, which may also end the draft, and
    known tokens to ``Append``.
    ``TokenDraft`` is a ``TokenTree`` of known tokens. ``NoDraft`` drafts nothing. A ``Proposal`` is what was drafted,
    a ``RunRound`` a round of those that follow each other in one call.
"""

from selfspec.decoding.draft import (
    Append,
    Chooser,
    ConfidenceThreshold,
    Draft,
    Guess,
    LayerDraft,
    NoDraft,
    Proposal,
    RunRound,
    TokenDraft,
)
from selfspec.decoding.drafter import Continuation, Drafter, Feedback, FixedDrafter, Needs, Prefill, Probe
from selfspec.methods.base import Method
from selfspec.methods.registry import register
from selfspec.methods.settings import MethodSettings, PrecisionSettings, setting
from selfspec.methods.state import LearnedState
from selfspec.model.kept import KeptSet
from selfspec.runtimes.target import Target
from selfspec.sampling.acceptance import TokenTree

__all__ = [
    "Append",
    "Chooser",
    "ConfidenceThreshold",
    "Continuation",
    "Draft",
    "Drafter",
    "Feedback",
    "FixedDrafter",
    "Guess",
    "KeptSet",
    "LayerDraft",
    "LearnedState",
    "Method",
    "MethodSettings",
    "Needs",
    "NoDraft",
    "PrecisionSettings",
    "Prefill",
    "Probe",
    "Proposal",
    "RunRound",
    "Target",
    "TokenDraft",
    "TokenTree",
    "register",
    "setting",
]
