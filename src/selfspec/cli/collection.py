"""Python's garbage collector while a command starts.

Imports and loading make millions of objects that all stay. The collector would look through them again and again, and
once more at the end of the process: about 2 of the 7 s in which a process imports ``selfspec.engine`` and ends.
"""

import atexit
import gc
import sys


def pause() -> None:
    """Turns the collector off until ``resume``, and leaves what exists at the end of the process to the system."""
    gc.disable()
    atexit.register(_leave)


def resume() -> None:
    """Turns the collector on, for objects that are made from now on; nothing if it is not off."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def _leave() -> None:
    """Spares the process the last collection; not where Triton is loaded, which calls what is not collected leaks."""
    if "triton._C.libtriton" in sys.modules:
        gc.unfreeze()
    else:
        gc.freeze()
