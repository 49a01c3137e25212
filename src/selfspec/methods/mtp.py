"""Multi-token prediction: a head that ships inside the checkpoint drafts from the target's last hidden state."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from selfspec.decoding.draft import Follow, JointConfidence, MtpDraft, StoppingRule
from selfspec.decoding.drafter import Drafter, Feedback, Needs, Prefill
from selfspec.methods.base import Method
from selfspec.methods.registry import register
from selfspec.methods.settings import MethodSettings, fraction, setting
from selfspec.model.transfer import send
from selfspec.runtimes.formats import TILE
from selfspec.runtimes.mtp_head import MtpHead, MtpText
from selfspec.runtimes.precision import Precision
from selfspec.runtimes.target import Target
from selfspec.types import Forecast

_USUAL_BITS = 8
"""A head mostly reads its weights, and drafts nearly the same tokens with half of their bits."""


@dataclass(frozen=True)
class MtpSettings(MethodSettings):
    """Settings of ``mtp``."""

    draft_length: int = setting(
        8, "most draft tokens of a round; the head is applied again for each", minimum=1, maximum=64
    )
    # Low, since the likeliest token is accepted more often than its probability says.
    threshold: float = fraction(0.25, "drafts end when the product of their confidences falls below it")
    vocabulary: int | None = setting(
        None,
        "draft only the first N token ids, which a BPE tokenizer learned first and texts have most; none for all",
        minimum=TILE,
    )
    draft_bits: int | None = setting(
        None,
        "bits of the head's weights: 8, 6 or 4; 16 for the checkpoint's own; none for 8 where CPU kernels run it",
        minimum=4,
    )
    prompt_rows: int = setting(4096, "most of the prompt's last tokens that the head reads", minimum=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.precision  # refuses bits that do not exist

    @property
    def precision(self) -> Precision | None:
        """Of the weights that draft; ``None`` for the checkpoint's own."""
        precision = Precision.of(_USUAL_BITS if self.draft_bits is None else self.draft_bits)
        return None if precision.is_full else precision


@register
class Mtp(Method):
    """Drafts with the multi-token-prediction head of the checkpoint (DeepSeek-V3, section 2.2).

    Row ``p`` of the head reads the target's hidden state of token ``p``, after the final norm, and the embedding of
    token ``p + 1``, and gives the token after it through the target's LM head. Of several heads the first is used, and
    applied again to its own normed output. With ``vocabulary`` it drafts frequent tokens only, for which
    a part of the LM head is read (FR-Spec: Zhao et al. 2025). What a prefix cache knew of a prompt is not read by the
    head.
    """

    name = "mtp"
    summary = "the checkpoint's multi-token-prediction head drafts"
    source = "DeepSeek-V3 (DeepSeek-AI 2024), section 2.2"
    Settings = MtpSettings
    settings: MtpSettings

    def __init__(self, target: Target, settings: MtpSettings) -> None:
        super().__init__(target, settings)
        self.head = MtpHead(target, settings.vocabulary, settings.precision, required=settings.draft_bits is not None)

    @property
    def needs(self) -> Needs:
        """The prompt's last hidden states, where they are computed."""
        return needs_of(self.head, self.settings)

    def prepare(self, progress: Callable[[str], None] = lambda _: None) -> None:
        """Makes the head's low-bit weights, where it drafts with them."""
        if self.needs_preparation:
            progress("the head's low-bit weights")
            _ = self.head.runner

    @property
    def needs_preparation(self) -> bool:
        """Whether it has low-bit weights to make."""
        return self.head.precision is not None

    def begin(self, prefill: Prefill) -> Drafter:
        """Starts on a request."""
        return MtpDrafter(self.head, self.settings, prefill)


def needs_of(head: MtpHead, settings: MtpSettings) -> Needs:
    """What a head needs of a request: the prompt's last hidden states, where they are computed."""
    return Needs(
        prompt_rows=settings.prompt_rows,
        prompt_states=frozenset({head.reads}),
        needed_rows=1,
        token_bytes=head.own.slot_bytes,
    )


class MtpDrafter(Drafter):
    """Drafts with the head, and gives it the target's states of the accepted tokens."""

    def __init__(self, head: MtpHead, settings: MtpSettings, prefill: Prefill) -> None:
        self._head, self._settings = head, settings
        ((self._index, states),) = prefill.hidden_states.items()
        rows = len(states)
        self._text = head.begin(rows + prefill.room)
        following = [*prefill.prompt_ids[len(prefill.prompt_ids) - rows + 1 :], prefill.first_token]
        self._head.add(self._text, states, send(following, states.device))

    @property
    def followed(self) -> Collection[int]:
        """The target's last hidden states, of which the head's rows are made."""
        return (self._index,)

    watched = followed

    @property
    def mtp_text(self) -> MtpText:
        """What the head knows of the text."""
        return self._text

    @property
    def unread(self) -> int:
        """Tokens of the text that the head reads before its next draft."""
        return sum(len(tokens) for _, tokens in self._text.missing)

    def plan(self) -> MtpDraft:
        """The draft of the head."""
        settings = self._settings
        stop = JointConfidence(settings.threshold) if settings.threshold else None
        return self.draft(settings.draft_length, stop, follow=lambda _: self.plan())

    def draft(
        self,
        limit: int,
        stop: StoppingRule | None,
        *,
        follow: Follow | None = None,
        name: str | None = None,
        forecast: Forecast | None = None,
    ) -> MtpDraft:
        """A draft of at most ``limit`` tokens, which ends as ``stop`` says, and what follows it in a run."""
        return MtpDraft(self._head, self._text, limit, stop, follow, name, forecast)

    def learn(self, feedback: Feedback) -> None:
        """Gives the head the states of the accepted rows, each with the token after it; a run has given them itself."""
        if feedback.run:
            return
        rows, token_ids = feedback.acceptance.rows, feedback.acceptance.token_ids
        states = feedback.hidden_states[self._index]
        states = states[: len(rows)] if rows[-1] == len(rows) - 1 else states[send(rows, states.device)]
        self._head.add(self._text, states, send(token_ids, states.device))

    observe = learn
