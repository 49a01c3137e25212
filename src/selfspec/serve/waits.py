"""How threads that decode wait for each other. Imports no torch: OpenMP reads the environment where that is loaded."""

import os

_SPINS = 2000
"""Looks at a barrier before a thread sleeps: some tens of microseconds."""


def brief_waits() -> dict[str, str]:
    """Environment variables that let threads that wait for another one soon sleep; none if the environment has its own.

    By default they wait awake for milliseconds. On a server the other one has often lost its processor to a client or
    to the event loop, many times in a forward: streams stood still for half a second.
    """
    if {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        return {}
    return {"GOMP_SPINCOUNT": str(_SPINS)}
