"""Requests to ``/infill``, as llama.cpp's server has it, for editors that complete code."""

from typing import Annotated, Any, ClassVar

from pydantic import Field

from selfspec.serve.requests import MOST_STOPS, CompletionRequest, Stop, Text, TextRequest
from selfspec.serve.strict import Strict


class ExtraFile(Strict):
    """A file that the model should know."""

    filename: Text = ""
    text: Text


class InfillRequest(TextRequest):
    """A request to ``/infill``: what is between ``input_prefix`` with ``prompt`` and ``input_suffix``."""

    fields: ClassVar[dict[str, str]] = {"prompt": "input_prefix", "max_tokens": "n_predict"}

    input_prefix: Text = ""
    input_suffix: Text = ""
    prompt: Text = Field(default="", description="The beginning of what is written.")
    input_extra: Annotated[list[ExtraFile], Field(max_length=256, fail_fast=True)] | None = None
    n_predict: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="Default: at most 128; 0 writes one token."
    )
    seed: Annotated[int, Field(ge=-1, le=2**63 - 1)] | None = Field(default=None, description="-1 is none.")
    stop: Annotated[list[Stop], Field(max_length=MOST_STOPS, fail_fast=True)] | None = None
    cache_prompt: Any = Field(default=None, description="Has no effect: every prompt is looked up.")
    id_slot: Any = Field(default=None, description="Has no effect.")
    samplers: Any = Field(default=None, description="Has no effect: the order of samplers is fixed.")
    t_max_prompt_ms: Any = Field(default=None, description="Has no effect.")
    t_max_predict_ms: Any = Field(default=None, description="Has no effect.")
    n_indent: Any = Field(default=None, description="Has no effect.")
    response_fields: Any = Field(default=None, description="Has no effect: all fields are in the answer.")

    def as_completion(self) -> CompletionRequest:
        """The completion that this request is."""
        names = ("model", "temperature", "top_k", "top_p", "min_p", "stop", "stream")
        return CompletionRequest(
            **{name: getattr(self, name) for name in names},
            prompt=self.input_prefix + self.prompt,
            suffix=self.input_suffix,
            max_tokens=None if self.n_predict is None else max(1, self.n_predict),
            seed=None if self.seed == -1 else self.seed,
        )

    @property
    def files(self) -> list[tuple[str, str]]:
        """Names and texts of the files that the model should know."""
        return [(file.filename, file.text) for file in self.input_extra or ()]
