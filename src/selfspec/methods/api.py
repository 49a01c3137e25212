"""All that the author of a method imports. ``docs/writing-a-method.md`` explains it with examples.

The method:
    ``Method`` is subclassed: name, summary, source, settings, and ``begin``, which starts on a request.
    ``MethodSettings`` and ``setting`` make its settings, ``Needs`` says what it needs of every request.
    ``PrecisionSettings`` are ``MethodSettings`` with ``draft_bits``, which ``Method`` puts into effect.
    ``LearnedState`` is what it can save and load. ``register`` is for methods inside selfspec only.

One request:
    ``Drafter`` is subclassed: ``plan`` says what drafts the next round, ``learn`` is given the round's ``Feedback``.
    ``FixedDrafter`` plans the same draft every round. ``Continuation`` is what a drafter of found tokens expects.
    ``Prefill`` is what ``begin`` is given: the prompt, the first token, and a ``Probe``, which runs parts of the model.

What can draft a round:
    ``LayerDraft`` drafts with a ``KeptSet`` of the model's sublayers until a limit or a ``ConfidenceThreshold``.
    It may be given a ``Guess`` of what it drafts next.
    ``TokenDraft`` is a ``TokenTree`` of known tokens. ``NoDraft`` drafts nothing.
    ``Draft`` is the protocol of them all, for drafts of one's own.

A draft of one's own:
    ``Draft.propose`` is given the ``Context`` (tokens, cache, sampling rule, ``Target``) and returns a ``Drafting``, a
    coroutine: it yields every ``DraftForward`` that it needs, is sent the ``DraftOutput``, and returns a ``Proposal``.
"""

from selfspec.decoding.context import Context
from selfspec.decoding.draft import Draft, NoDraft, TokenDraft
from selfspec.decoding.drafter import Drafter, Feedback, FixedDrafter, Needs, Prefill
from selfspec.decoding.guess import Continuation, Guess
from selfspec.decoding.layer_draft import LayerDraft
from selfspec.decoding.probe import Probe
from selfspec.decoding.proposal import DraftForward, Drafting, DraftOutput, Proposal
from selfspec.decoding.stopping import ConfidenceThreshold
from selfspec.methods.base import Method
from selfspec.methods.precision_settings import PrecisionSettings
from selfspec.methods.registry import register
from selfspec.methods.settings import MethodSettings, setting
from selfspec.methods.state import LearnedState
from selfspec.model.kept import KeptSet
from selfspec.runtimes.target import Target
from selfspec.sampling.tree import TokenTree

__all__ = [
    "ConfidenceThreshold",
    "Context",
    "Continuation",
    "Draft",
    "DraftForward",
    "DraftOutput",
    "Drafter",
    "Drafting",
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
    "Target",
    "TokenDraft",
    "TokenTree",
    "register",
    "setting",
]
