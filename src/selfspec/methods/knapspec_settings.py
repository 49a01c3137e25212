"""The settings of KnapSpec."""

from dataclasses import dataclass

from selfspec.methods.payoff import SCHEDULE_HELP
from selfspec.methods.precision_settings import PrecisionSettings, check_selection
from selfspec.methods.settings import setting
from selfspec.methods.sharing import SHARE_HELP


@dataclass(frozen=True)
class KnapSpecSettings(PrecisionSettings):
    """Settings of ``knapspec``."""

    interval: int | None = setting(
        None,
        "rounds between two selections, at least; none is 64 below 10 billion parameters and 128 from there",
        minimum=1,
    )
    schedule: str = setting(
        "ours",
        f"when it selects: {SCHEDULE_HELP}, first after recent_rounds rounds drafted by the whole model, on all their "
        "tokens",
        choices=("ours", "paper"),
    )
    recent_rounds: int = setting(5, "with schedule=paper, rounds whose tokens a selection uses", minimum=1, maximum=64)
    recent_tokens: int | None = setting(
        None,
        "with schedule=ours, output tokens over which the rows of a selection are spread; none is 40. There are as "
        "many rows as a 64th of the hidden size, at least 8, which bounds the memory",
        minimum=1,
        maximum=128,
    )
    similarity_threshold: float = setting(
        0.5, "prune states whose mean cosine to the target's is lower", minimum=-1.0, maximum=1.0
    )
    max_draft_length: int = setting(10, "longest draft, in the objective too", minimum=1, maximum=64)
    confidence_threshold: float = setting(
        0.7,
        "stop drafting after a token less confident than this; 0 drafts the selected length",
        minimum=0.0,
        maximum=1.0,
    )
    fused_selection: bool = setting(
        False,
        "run a selection in the same forward as the next verification, so that weights are read once; its set drafts "
        "one round later",
    )
    tpt: str = setting(
        "paper",
        "time of a step in the objective: paper counts attention and MLP, with_head adds embedding, norm and LM head",
        choices=("paper", "with_head"),
    )
    share_kept_set: bool = setting(True, SHARE_HELP)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_selection(self, fused=self.fused_selection)
