"""One kept set for the layer drafts of a batch.

If the drafts of several requests keep the same sublayers, their tokens go through a sublayer in one forward, which
reads its weights once. A method whose kept sets depend on the context chooses one of them for the batch: the *medoid*,
the set that differs from the sets of all requests in the fewest sublayers. The choice depends on the sets alone, and
with one request it is that request's own set.

Eight chat prompts together on SmolLM2-135M, 64 new tokens, bfloat16, two cores (``selfspec bench batches``): ``clasp``
generates 96 tokens a second with a shared set and 83 with own sets, ``knapspec`` (96 new tokens) 49 and 46; ``del`` on
``tiny-early-exit`` 308 and 310.
"""

from collections.abc import Sequence
from dataclasses import replace

from selfspec.decoding.draft import Draft, LayerDraft
from selfspec.model.kept import KeptSet

SHARE_HELP = (
    "in a batch, draft all requests with the kept set that differs least from those of all; off, each has its own"
)
"""Help of the setting ``share_kept_set``."""


def medoid(kept_sets: Sequence[KeptSet]) -> KeptSet:
    """The kept set with the smallest sum of differences to all sets, the first of these on a tie.

    The difference of two sets is the number of sublayers that one keeps and the other skips.
    """
    members = [frozenset(kept.sublayers) for kept in kept_sets]
    differences = [sum(len(one ^ other) for other in members) for one in members]
    return kept_sets[differences.index(min(differences))]


def share_kept_set(drafts: Sequence[Draft]) -> list[Draft]:
    """Gives the layer drafts of a batch one kept set, their medoid."""
    kept_sets = [draft.kept for draft in drafts if isinstance(draft, LayerDraft)]
    return with_kept_set(drafts, medoid(kept_sets)) if kept_sets else list(drafts)


def with_kept_set(drafts: Sequence[Draft], kept: KeptSet) -> list[Draft]:
    """Layer drafts with another kept set. Their limits and stopping rules stay, and so do drafts of other kinds."""
    return [replace(draft, kept=kept) if isinstance(draft, LayerDraft) else draft for draft in drafts]
