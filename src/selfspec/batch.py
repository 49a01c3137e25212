"""Several requests to one engine: checked together, generated in order, one after the other."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from selfspec.errors import SelfSpecError
from selfspec.prompt_forms import Prompt
from selfspec.types import Generation, SamplingParams, TextPiece

if TYPE_CHECKING:
    from selfspec.engine import Engine, Stream


class Batch:
    """The requests of one call. ``Engine.generate`` with a list and ``custom_generate`` both go through here.

    All requests are checked before the first one runs. Each output is what its request gives alone.

    Args:
        engine: generates.
        requests: prompts and their parameters.
        name: what an error calls a request, before its index: ``"prompt"``, ``"row"``.

    Raises:
        SelfSpecError: a prompt or its parameters do not fit; where there are several, the message names the request.
    """

    def __init__(
        self, engine: "Engine", requests: Sequence[tuple[Prompt, SamplingParams]], name: str = "prompt"
    ) -> None:
        self._name = name
        self._single = len(requests) == 1
        self._streams: list[Stream] = []
        for index, (prompt, params) in enumerate(requests):
            with self._named(index):
                self._streams.append(engine.stream(prompt, params))

    def pieces(self) -> Iterator[tuple[int, TextPiece]]:
        """Generates the outputs.

        Yields:
            The index of a request and the next piece of its output.

        Raises:
            SelfSpecError: the model failed on a request; where there are several, the message names it.
        """
        for index, stream in enumerate(self._streams):
            with self._named(index):
                for piece in stream:
                    yield index, piece

    def results(self) -> list[Generation]:
        """The finished outputs in the order of the requests; generates what is not generated yet.

        Raises:
            SelfSpecError: as ``pieces``.
        """
        for _ in self.pieces():
            pass
        return [stream.result for stream in self._streams]

    @contextlib.contextmanager
    def _named(self, index: int) -> Iterator[None]:
        try:
            yield
        except SelfSpecError as error:
            if self._single:
                raise
            raise type(error)(f"{self._name} {index}: {error}") from error
