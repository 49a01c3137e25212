"""What the models of all requests have in common."""

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """Takes no unknown fields, converts no types, and no number may be NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
