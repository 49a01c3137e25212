"""What the models of all requests have in common."""

import json
import math
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from typing_extensions import Self

from selfspec.serve.api_errors import ApiError, as_invalid


class Strict(BaseModel):
    """Takes no unknown fields, converts no types, and no number may be NaN.

    A field that may be left out is not given where it is null, and so is an unknown one: clients send nulls for what
    their users did not set.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict) or all(value is not None for value in given.values()):
            return given
        needed = {field.alias or name for name, field in cls.model_fields.items() if field.is_required()}
        return {name: value for name, value in given.items() if value is not None or name in needed}

    @classmethod
    def from_body(cls, body: bytes) -> Self:
        """The request of a body; refuses by ``ApiError``."""
        try:
            parsed = json.loads(body, parse_float=_number, parse_constant=_number)
        except UnicodeDecodeError as error:
            raise ApiError(400, "the body cannot be read: it must be JSON in UTF-8") from error
        except json.JSONDecodeError as error:
            raise ApiError(400, f"the body is not valid JSON: {error.msg}", code="invalid_json") from error
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the body is not JSON that can be read: {error}") from error
        try:
            return cls.model_validate(parsed)
        except ValidationError as error:
            raise as_invalid(error.errors(include_url=False, include_input=False), parsed) from error


def _number(text: str) -> float:
    """A number of a body; none that is infinite or no number, which could not be repeated as JSON."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text:.32} is no number")
    return number
