"""What bodies would have to do to a process that reads them. Imports no torch, as such a process does not."""

import os
import resource
import signal
import time

from selfspec.serve.reader import RequestReader


def sleep_long(_: RequestReader, __: bytes) -> None:
    """What a body would have to do to keep a process for ever."""
    time.sleep(600)


def take_memory(_: RequestReader, __: bytes) -> None:
    """Takes more memory than there is for reading a body."""
    bytes(64 * 2**30)


def find_limits(_: RequestReader, __: bytes) -> tuple[int, int, int, bool]:
    """The process, and what keeps it from harm to others: niceness, bytes of memory, whether it ignores Ctrl-C."""
    ignores = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    memory, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return os.getpid(), os.nice(0), memory, ignores
