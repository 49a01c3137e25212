"""What the width of a verification costs: the full model over several rows, against one row."""

from collections.abc import Sequence

import torch

from selfspec.runtimes.target import Target
from selfspec_lab.bench.timing import interleaved_seconds

ROW_COUNTS = (1, 2, 4, 8, 16, 32, 64)

_REPEATS = 5


@torch.inference_mode()
def verify_rows_seconds(
    target: Target, token_ids: Sequence[int], context: int, row_counts: Sequence[int] = ROW_COUNTS
) -> dict[int, float]:
    """Median seconds of verifying chains of some widths, taken in turns: layout, all sublayers, final norm, head.

    Args:
        target: the model.
        token_ids: what fills context and rows, repeated as often as it takes.
        context: committed tokens before the rows.
        row_counts: widths; those that the model's context has no room for are left out.

    Returns:
        Seconds by width.
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
        step = target.begin(state, end - start)
        target.logits(target.run(target.embed(ids[start:end]), everything, step).hidden_states[-fitting[-1] :])

    forward(0, context)
    state.cache.commit(range(context))
    tasks = {rows: lambda rows=rows: forward(context, context + rows) for rows in fitting}
    return interleaved_seconds(tasks, target.device, repeats=_REPEATS)
