"""How the logits of a sequence change before a token is chosen, in the form that kernels take: biases and penalties."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from ctypes import addressof, c_float, c_int, c_long
from dataclasses import dataclass, field

from selfspec.runtimes.structures import NativeChanges


@dataclass(frozen=True)
class Changes:
    """Biases and penalties of a request, in the order in which they apply (``SamplingParams``).

    Attributes:
        bias: what is added to the logits of single tokens, by id.
        repetition: divides those above 0 of tokens of the text, and multiplies the others.
        presence: is subtracted from those of tokens that were written.
        frequency: the same, for each time.
        first_end: the first position for which ``end_ids`` may be chosen.
        end_ids: tokens that end the output.
    """

    bias: Mapping[int, float] = field(default_factory=dict)
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    first_end: int = 0
    end_ids: Collection[int] = ()


class ChangedLogits:
    """The tokens of a sequence whose logits change, which are more as its text grows.

    Args:
        changes: how they change.
        prompt_ids: its prompt.
        new_tokens: most tokens that are written.

    Attributes:
        structure: for the C++ code; the memory it points to belongs to this object.
    """

    def __init__(self, changes: Changes, prompt_ids: Sequence[int], new_tokens: int) -> None:
        text = dict.fromkeys(prompt_ids) if changes.repetition != 1 else {}
        known, ends = [*dict.fromkeys((*changes.bias, *text))], [*changes.end_ids]
        self._places = {token_id: place for place, token_id in enumerate(known)}
        most = len(known) + new_tokens
        self._tokens, self._times, self._bias = (c_long * most)(*known), (c_int * most)(), (c_float * most)()
        self._times[: len(known)] = [0 if token_id in text else -1 for token_id in known]
        self._bias[: len(known)] = [changes.bias.get(token_id, 0.0) for token_id in known]
        self.structure = NativeChanges(
            tokens=self._tokens,
            times=self._times,
            bias=addressof(self._bias),
            count=len(known),
            ends=(c_long * len(ends))(*ends),
            end_count=len(ends),
            first_end=changes.first_end,
            repetition=changes.repetition,
            presence=changes.presence,
            frequency=changes.frequency,
        )

    def write(self, token_ids: Iterable[int]) -> None:
        """Notes tokens that were written."""
        for token_id in token_ids:
            place = self._places.setdefault(token_id, len(self._places))
            self._tokens[place], self._times[place] = token_id, max(0, self._times[place]) + 1
        self.structure.count = len(self._places)
