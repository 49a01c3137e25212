"""Named checks that a script in a client's environment makes; prints them as JSON. Imports nothing of selfspec."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

Check = Callable[[], Any]


class Checks:
    """Collects what holds and what does not."""

    def __init__(self) -> None:
        self._made: list[dict[str, Any]] = []

    def __call__(self, name: str) -> Callable[[Check], Check]:
        """Runs the decorated function. It raises if the check fails; what it returns is told with the result.

        Args:
            name: what is checked, for the report.
        """

        def run(check: Check) -> Check:
            try:
                self._made.append({"name": name, "holds": True, "detail": check()})
            except Exception as error:
                traceback.print_exc()
                self._made.append({"name": name, "holds": False, "detail": f"{type(error).__name__}: {error}"[:500]})
            return check

        return run

    def print(self) -> None:
        """Prints them to standard output."""
        json.dump(self._made, sys.stdout)
