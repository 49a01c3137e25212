"""Work for other threads that begins while the kernels compute.

The kernels run without Python's lock. Whoever wakes another thread that needs it, such as an event loop, does so best
just before they begin: earlier, both threads would wait for the lock in turns while the processors have nothing to
compute.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_waiting: ContextVar[Callable[[], None] | None] = ContextVar("overlap", default=None)


@contextmanager
def overlapped(task: Callable[[], None]) -> Iterator[None]:
    """Runs a task once, on this thread: before the first native forward inside, or at the end without one.

    Args:
        task: takes microseconds, and raises nothing.
    """
    token = _waiting.set(task)
    try:
        yield
    finally:
        begin()
        _waiting.reset(token)


def begin() -> None:
    """Runs the task that waits on this thread, if there is one; called before a native forward."""
    task = _waiting.get()
    if task is not None:
        _waiting.set(None)
        task()
