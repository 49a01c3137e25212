"""Where a request runs natively, and what makes it leave: every such decision is made here."""

from collections.abc import Collection, Iterable

from selfspec.decoding.draft import LayerDraft, Proposal
from selfspec.decoding.output import Output
from selfspec.runtimes.chain import NATIVE, Path
from selfspec.sampling.processors import ScoreProcessor
from selfspec.sampling.rules import Coupled, Rule

PROCESSED = Path("a logits processor changes scores")
REJECTION = Path("rejection sampling draws from scores")
WIDTHS = Path("the draft is a tree")
CHOOSER = Path("the method chooses the draft tokens")
WATCHED = Path("the method watches hidden states")
MANY_ROWS = Path("more rows than the kernels take")
LOGPROBS = Path("log-probabilities are reported")
MTP = Path("a multi-token-prediction head drafts")
ENDS = Path("stop strings or criteria are checked after every token")

LEAVING = (PROCESSED, REJECTION, WIDTHS, CHOOSER, WATCHED, MANY_ROWS)
"""What makes a draft or a verification leave the native way on a model that has one."""


def choosing_path(rule: Rule, processor: ScoreProcessor) -> Path:
    """Whether kernels choose the tokens of a request: by the largest logit, or by noise after a temperature."""
    if rule.chooses_best:
        return NATIVE if processor.keeps_scores else PROCESSED
    if not isinstance(rule, Coupled):
        return REJECTION
    return NATIVE if processor.temperature else PROCESSED


def draft_path(draft: LayerDraft, choosing: Path, model: Path) -> Path:
    """Where a layer draft runs, given who chooses the request's tokens and where the draft's sublayers run."""
    if not choosing.native:
        return choosing
    if draft.widths is not None or draft.choose is not None:
        return CHOOSER if draft.widths is None else WIDTHS
    return model


def run_path(output: Output, watched: Collection[int], logprobs: int | None, choosing: Path, model: Path) -> Path:
    """Whether several steps of plain decoding run as one call: where they need no more than tokens."""
    if watched:
        return WATCHED
    if logprobs is not None:
        return LOGPROBS
    if not output.ends_by_ids:
        return ENDS
    return model if choosing.native else choosing


def verification_path(proposals: Iterable[Proposal], most: int, model: Path) -> Path:
    """Where a verification runs; ``most`` is the number of rows of a sequence that the kernels take."""
    if not model.native:
        return model
    return MANY_ROWS if any(len(proposal.rows) >= most for proposal in proposals) else NATIVE
