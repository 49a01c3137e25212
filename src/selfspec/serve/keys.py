"""The keys that requests need."""

import os
from collections.abc import Sequence

from selfspec.errors import InvalidParameterError

API_KEY = "SELFSPEC_API_KEY"
"""The environment variable with the key that requests need."""


def api_keys(given: Sequence[str] | None) -> list[str]:
    """The keys of the command line and of the environment; none may be empty, or not fit into a header."""
    keys = list(given or ())
    if API_KEY in os.environ:
        keys.append(os.environ[API_KEY])
    for key in keys:
        if not key or not key.isascii() or any(character.isspace() for character in key):
            raise InvalidParameterError(
                f"a key of --api-key or {API_KEY} is empty, or has spaces or characters that are not ASCII; give "
                "a longer one, or unset it"
            )
    return keys
