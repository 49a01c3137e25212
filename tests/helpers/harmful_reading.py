"""What bodies would have to do to a process that reads them. Imports no torch, as such a process does not."""

import time

from selfspec.serve.reader import RequestReader


def sleep_long(_: RequestReader, __: bytes) -> None:
    """What a body would have to do to keep a process for ever."""
    time.sleep(600)


def take_memory(_: RequestReader, __: bytes) -> None:
    """Takes more memory than there is for reading a body."""
    bytes(64 * 2**30)
