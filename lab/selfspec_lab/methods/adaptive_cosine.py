"""Adaptive cosine: skip the sublayers that change the residual stream least on the current context."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from selfspec.errors import InvalidSettingError
from selfspec.methods.api import (
    ConfidenceThreshold,
    Draft,
    Drafter,
    Feedback,
    KeptSet,
    LayerDraft,
    Method,
    Needs,
    PrecisionSettings,
    Prefill,
    Target,
    setting,
)
from selfspec.methods.selecting import SHARE_HELP, share_kept_set
from selfspec.methods.skipping import RATIO_HELP, default_skip_ratio

_MOST_PROMPT_ROWS = 64


@dataclass(frozen=True)
class AdaptiveCosineSettings(PrecisionSettings):
    """Settings of ``adaptive-cosine``."""

    skip_ratio: float | None = setting(
        None,
        f"share of the candidates between first and last layer that drafts skip; {RATIO_HELP}",
        minimum=0.0,
        maximum=1.0,
    )
    candidates: str = setting(
        "all", "sublayers that may be skipped (only attention in the paper)", choices=("all", "attention")
    )
    prompt_rows: int | None = setting(
        None,
        "last prompt tokens to average over; none is 64, or a 16th of the hidden size if that is less",
        minimum=1,
        maximum=4096,
    )
    update_interval: int = setting(0, "rounds between two choices; 0 keeps the first one", minimum=0)
    recent_rounds: int = setting(5, "last rounds whose tokens a later choice averages over", minimum=1)
    draft_length: int = setting(12, "most draft tokens of a round", minimum=1, maximum=64)
    confidence_threshold: float = setting(
        0.7, "stop drafting after a token less confident than this; 0 never stops", minimum=0.0, maximum=1.0
    )
    share_kept_set: bool = setting(True, SHARE_HELP)


def similarity_sums(hidden_states: Mapping[int, torch.Tensor], sublayers: Collection[int]) -> torch.Tensor:
    """For each sublayer the sum over the rows of cos(h[i], h[i + 1]), float32 ``[sublayers]``.

    The higher it is, the less the sublayer changes. ``hidden_states`` are ``[rows, hidden]``.
    """
    # One sublayer at a time: float32 copies of all of them would take more memory than the rest of a request.
    pairs = ((hidden_states[index].float(), hidden_states[index + 1].float()) for index in sublayers)
    return torch.stack([functional.cosine_similarity(*pair, dim=-1).sum() for pair in pairs])


class AdaptiveCosine(Method):
    """Skips the sublayers whose output is closest to their input in mean cosine, over the prompt's last tokens.

    The paper skips attention sublayers above a similarity threshold. Here the number is given instead: as in SWIFT,
    ``int(2 (L - 2) r)`` of all sublayers but those of the first and the last layer, so that methods compare at equal
    cost. ``candidates=attention`` keeps the paper's restriction. A request can choose again by its own recent tokens.
    Nothing is carried from one request to the next. Memory above plain decoding: the hidden states of ``prompt_rows``
    tokens, by default less than 1 % of the weights.

    With ``draft_bits`` sublayers are still compared by the target's states, which take no forward; how much a sublayer
    changes the stream hardly depends on its precision.

    In a batch the drafts share one kept set, as ``selfspec.methods.selecting`` says, unless ``share_kept_set`` is off.
    """

    name = "adaptive-cosine"
    summary = "skips the sublayers that change the hidden states least on the current context"
    source = "Draft on the Fly (Metel et al. 2024), the ASD of KnapSpec's related work"
    Settings = AdaptiveCosineSettings
    settings: AdaptiveCosineSettings

    def __init__(self, target: Target, settings: AdaptiveCosineSettings) -> None:
        super().__init__(target, settings)
        step = 2 if settings.candidates == "attention" else 1
        self.candidates = range(2, 2 * (target.layer_count - 1), step)
        ratio = settings.skip_ratio
        if ratio is None:
            ratio = default_skip_ratio(target, len(self.candidates))
        self.skips = int(len(self.candidates) * ratio)
        if not self.skips:
            raise InvalidSettingError(
                f"skip_ratio {ratio} skips none of the {len(self.candidates)} candidates between the "
                "first and the last layer; raise it"
            )
        self.states = frozenset(self.candidates) | {index + 1 for index in self.candidates}

    @property
    def needs(self) -> Needs:
        """The hidden states before and after every candidate, of the prompt's last tokens."""
        rows = self.settings.prompt_rows or max(1, min(_MOST_PROMPT_ROWS, self.target.hidden_size // 16))
        return Needs(prompt_rows=rows, prompt_states=self.states)

    def begin(self, prefill: Prefill) -> Drafter:
        """Starts on a request."""
        return _AdaptiveCosineDrafter(self, similarity_sums(prefill.hidden_states, self.candidates))

    def arrange(self, drafters: Sequence[Drafter], drafts: Sequence[Draft]) -> list[Draft]:
        """One kept set for the drafts of a batch, unless ``share_kept_set`` is off."""
        return share_kept_set(drafts) if self.settings.share_kept_set else list(drafts)

    def draft(self, similarities: torch.Tensor) -> LayerDraft:
        """The draft without the most similar candidates; ``similarities`` are ``[candidates]``, on any scale."""
        order = similarities.sort(descending=True, stable=True).indices[: self.skips]
        skipped = [self.candidates[index] for index in order.tolist()]
        threshold = self.settings.confidence_threshold
        return LayerDraft(
            KeptSet.skipping(skipped, self.target.sublayer_count),
            limit=self.settings.draft_length,
            stop=ConfidenceThreshold(threshold) if threshold > 0 else None,
        )


class _AdaptiveCosineDrafter(Drafter):
    def __init__(self, method: AdaptiveCosine, similarities: torch.Tensor) -> None:
        self._method = method
        self._draft = method.draft(similarities)
        self._recent = torch.zeros_like(similarities)
        self._rounds = 0

    def plan(self) -> Draft:
        """Chooses the kept set again every ``update_interval`` rounds, and drafts with the last one."""
        interval = self._method.settings.update_interval
        if interval and self._rounds == interval:
            self._draft = self._method.draft(self._recent)
            self._recent, self._rounds = torch.zeros_like(self._recent), 0
        self._rounds += 1
        return self._draft

    @property
    def watched(self) -> Collection[int]:
        """The hidden states before and after every candidate, in the last rounds before the next choice."""
        settings = self._method.settings
        left = settings.update_interval - self._rounds
        return self._method.states if settings.update_interval and left < settings.recent_rounds else ()

    def learn(self, feedback: Feedback) -> None:
        """Adds the similarities of the committed rows to those that the next choice is made from."""
        if feedback.hidden_states:
            committed = len(feedback.acceptance.rows)  # drafts are chains: the accepted rows come first
            rows = {index: states[:committed] for index, states in feedback.hidden_states.items()}
            self._recent = self._recent + similarity_sums(rows, self._method.candidates)
