"""What the models of all requests have in common."""

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


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
