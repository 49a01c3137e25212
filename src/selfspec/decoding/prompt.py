"""Reads a prompt into the cache, a chunk at a time, and chooses the first token."""

from selfspec.decoding.draft import empty_proposal
from selfspec.decoding.events import Event, Failed, Finished, Prefilled
from selfspec.decoding.judging import judge, not_finite
from selfspec.decoding.prompt_scores import score_prompt
from selfspec.decoding.sequence import Sequence
from selfspec.runtimes.logits import Logits
from selfspec.runtimes.target import Target


def read_chunk(target: Target, sequence: Sequence, end: int) -> list[Event]:
    """Runs the next tokens of a prompt through the model.

    Args:
        target: the model.
        sequence: whose prompt is not read to its end.
        end: the end of the chunk, in tokens of the prompt; see ``chunks.Chunks`` for where a chunk may end.

    Returns:
        Nothing until the prompt is read; then that it is, and whether the first token ended the output.
    """
    context = sequence.context
    start = context.cache.length
    assert start < end <= context.prompt_length
    forward = target.lay_out(context.state, end - start)
    kept_rows = min((len(states) for states in sequence.prompt_states.values()), default=0)
    first_kept = context.prompt_length - kept_rows
    rows = slice(max(0, start - first_kept), max(0, end - first_kept))
    copies = {index: states[rows] for index, states in sequence.prompt_states.items()}
    embedded = target.embed(context.token_ids[start:end])
    output = target.run(embedded, range(target.sublayer_count), forward, copies=copies)
    context.cache.commit(range(end - start))
    if (alternatives := sequence.request.prompt_logprobs) is not None:
        scored = sequence.request.prompt_ids[start + 1 : end + 1]
        sequence.output.prompt_logprobs += score_prompt(
            target, output.hidden_states[: len(scored)], scored, alternatives
        )
    if end < context.prompt_length:
        return []
    logits = Logits(target.logits(output.hidden_states[-1:]))
    judgement = judge([context], [empty_proposal(context)], [logits])[0]
    if judgement is None:
        return [Failed(sequence.request, not_finite(context))]
    if sequence.request.max_new_tokens:
        sequence.commit(judgement.acceptance, logits, "prefill")
    else:
        sequence.output.end_without_tokens()
    return [Prefilled(sequence), Finished(sequence)] if sequence.finished else [Prefilled(sequence)]
