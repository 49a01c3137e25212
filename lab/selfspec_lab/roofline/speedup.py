"""What a draft of few bits is predicted to gain on a device: rounds as ``auto`` plans them, with predicted costs."""

from collections.abc import Mapping
from typing import NamedTuple

from selfspec.errors import InvalidParameterError
from selfspec.planning.plans import MOST_DRAFTED, DraftPolicy, Outlook
from selfspec.runtimes.costs.rows import MOST_ROWS
from selfspec_lab.roofline.devices import Device
from selfspec_lab.roofline.shapes import ModelShape
from selfspec_lab.roofline.step import step_seconds

_SETTLED = 1e-9


class Prediction(NamedTuple):
    """What is predicted of decoding on a device; nothing of it is measured there.

    Attributes:
        step: seconds of plain decoding's step.
        eight_rows: seconds of a forward of 8 rows.
        draft: seconds of a forward of the model at few bits.
        tokens: that a round is expected to commit.
        speedup: tokens a second over plain decoding's.
    """

    step: float
    eight_rows: float
    draft: float
    tokens: float
    speedup: float


def predict(
    shape: ModelShape,
    device: Device,
    acceptance: float,
    bits: int = 4,
    context: int = 1024,
    reached: Mapping[int, float] | None = None,
) -> Prediction:
    """Decoding with drafts of the model's own weights at fewer bits, each of which is accepted with one probability.

    A second is worth the tokens that decoding gives in it (``DraftPolicy``); the rate is what repeated planning settles
    at. Planning, launches and what the host does are not in it.

    Args:
        shape: the sizes of the model.
        device: where it runs.
        acceptance: of a draft token, if those before it are accepted.
        bits: of the weights of drafts.
        context: slots of the cache that every row sees.
        reached: by bits of a weight the fraction of the roofline that forwards reach; all of it where none is given.

    Raises:
        InvalidParameterError: for an acceptance that is not between 0 and 1.
    """
    if not 0 <= acceptance <= 1:
        raise InvalidParameterError(f"an acceptance is between 0 and 1, not {acceptance}")
    whole, low = ((reached or {}).get(each, 1.0) for each in (16, bits))
    rows = (step_seconds(shape, device, count, context=context) / whole for count in range(1, MOST_ROWS + 1))
    verify = (0.0, *rows)
    draft = step_seconds(shape, device, bits=bits, context=context) / low
    outlook = Outlook([1.0], [acceptance])
    rate, tokens = 1 / verify[1], 1.0
    while True:
        policy = DraftPolicy(outlook, draft, verify, rate, MOST_DRAFTED)
        found = policy.plan.tokens_per_second
        if found <= rate * (1 + _SETTLED):
            return Prediction(verify[1], verify[8], draft, tokens, rate * verify[1])
        rate, tokens = found, policy.plan.tokens
