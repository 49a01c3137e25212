"""Low-bit weights of a layer draft: made at load if that is quick, else in a request once they promise to pay."""

import math
import threading
import warnings

import torch

from selfspec.errors import NoCopiesWarning, OutOfMemoryError, UnsupportedModelError
from selfspec.runtimes.precision import AnyPrecision
from selfspec.runtimes.target import Target

_WEIGHTS_A_SECOND = 7e8
"""Of which a thread makes low-bit copies, about."""

_NO_TIME = 0.2
"""Seconds up to which they are made when the model is loaded."""


class LateCopies:
    """The low-bit weights of a layer draft, which are made when they promise to save the time that they take.

    They do where one answer may save it, or where answers so far would have saved it with them. May be used by several
    threads. Without a target there is nothing to make; nor if they are ``made``.
    """

    def __init__(
        self, target: Target | None = None, precision: AnyPrecision | None = None, *, made: bool = False
    ) -> None:
        self._target, self._precision = target, precision
        self.ready = made or target is None or precision is None
        self.failed = False
        self._lock = threading.Lock()
        self._missed = 0.0
        self._takes = math.inf  # seconds, about
        if not self.ready and target is not None:
            self._takes = target.parameter_count / (_WEIGHTS_A_SECOND * torch.get_num_threads())

    def make_if_it_takes_no_time(self) -> None:
        """Makes them where that hardly takes longer than loading the model: then no request has to."""
        with self._lock:
            if not self.ready and not self.failed and self._takes <= _NO_TIME:
                self._make()

    def make_if_it_pays(self, saving: float, tokens: int) -> bool:
        """Whether they are made, maybe just now.

        Args:
            saving: seconds of a token that drafts from them are expected to save.
            tokens: that the answer may still have.
        """
        with self._lock:
            if not self.ready and not self.failed:
                self._missed += saving
                if max(saving * tokens, self._missed) >= self._takes:
                    self._make()
            return self.ready

    def _make(self) -> None:
        assert self._target is not None
        try:
            with torch.inference_mode():
                self._target.at(self._precision)
            self.ready = True
        except (OutOfMemoryError, UnsupportedModelError) as error:
            self.failed = True
            if isinstance(error, OutOfMemoryError):
                warnings.warn(f"auto drafts without low-bit weights: {error}", NoCopiesWarning, stacklevel=3)
