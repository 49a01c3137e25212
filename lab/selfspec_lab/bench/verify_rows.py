"""Times forwards of the full model over several rows."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from selfspec_lab.bench.spread import median_seconds
from selfspec_lab.measuring import ROW_COUNTS, Target

_REPEATS = 5


@torch.inference_mode()
def verify_rows_seconds(
    target: Target, token_ids: Sequence[int], context: int, row_counts: Sequence[int] = ROW_COUNTS
) -> dict[int, float]:
    """Median seconds of verification forwards, timed in turns; arguments as of ``row_forwards``.

    Returns:
        Seconds by number of rows.
    """
    tasks = row_forwards(target, token_ids, context, row_counts)
    return median_seconds(tasks, target.device, repeats=_REPEATS) if tasks else {}


@torch.inference_mode()
def row_forwards(
    target: Target, token_ids: Sequence[int], context: int, row_counts: Sequence[int]
) -> dict[int, Callable[[], None]]:
    """Verification forwards: layout, all sublayers, final norm and head.

    Args:
        target: the model.
        token_ids: tokens for context and rows, repeated as needed.
        context: number of committed tokens before the rows.
        row_counts: numbers of rows; those that exceed the model's context are left out.

    Returns:
        By number of rows what runs one, inside ``torch.inference_mode``.
    """
    fitting = [rows for rows in row_counts if context + rows <= target.context_limit]
    if not fitting:
        return {}
    length = context + max(fitting)
    repeated = (list(token_ids) * (length // len(token_ids) + 1))[:length]
    ids = torch.tensor(repeated, dtype=torch.long, device=target.device)
    state = target.new_sequence(length, capacity=length, last_length=length)
    everything = range(target.sublayer_count)

    def forward(start: int, end: int) -> None:
        step = target.lay_out(state, end - start)
        target.logits(target.run(target.embed(ids[start:end], step), everything, step).hidden_states[-fitting[-1] :])

    forward(0, context)
    state.cache.commit(range(context))
    return {rows: partial(forward, context, context + rows) for rows in fitting}
