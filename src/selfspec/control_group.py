"""The limits of the control groups that this process is in: those of a container, a pod or a service on Linux.

There are two versions of control groups. The first has a tree of folders for each resource, the second has one for all.
What limits a group limits the groups below it, too. A container mostly sees its own group as the root of the tree.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_TREES, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")

_PROCESSORS = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
"""By version: the files that have the microseconds that a group may take in each period, and those of a period."""

_MEMORY = (
    ("memory.max", "memory.current", ("inactive_file", "active_file")),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
)
"""By version: the files of a group's limit and of its use, and what its statistics call the pages of files."""


def processor_limit(trees: Path = _TREES, own: Path = _OWN) -> float | None:
    """How many processors' time this process may use, such as 1.5; ``None`` without a limit, and on other systems."""
    limits = []
    for group in _groups("cpu", trees, own):
        for names in _PROCESSORS:
            with suppress(OSError, ValueError, ZeroDivisionError):  # no such group, or its limit is "max"
                quota, period = map(int, " ".join(_read(group, name) for name in names).split())
                limits += [quota / period] if quota > 0 else []
    return min(limits, default=None)


def memory_left(trees: Path = _TREES, own: Path = _OWN) -> int | None:
    """What this process may still allocate, in bytes; ``None`` without a limit, and on other systems."""
    left = []
    for group in _groups("memory", trees, own):
        for limit, used, files in _MEMORY:
            with suppress(OSError, ValueError):  # no such group, or its limit is "max"
                counts = dict(line.split() for line in _read(group, "memory.stat").splitlines())
                given_back = sum(int(counts.get(name, 0)) for name in files)  # where memory is needed
                left.append(max(0, int(_read(group, limit)) - int(_read(group, used)) + given_back))
    return min(left, default=None)


def _groups(resource: str, trees: Path, own: Path) -> Iterator[Path]:
    """The folders of the groups whose limits of a resource hold for this process."""
    with suppress(OSError, ValueError):
        for line in own.read_text(encoding="utf-8").splitlines():
            _, resources, path = line.split(":", 2)
            if resource in resources.split(",") or not resources:
                tree = trees / (resource if resources else "")
                parts = Path(path).parts[1:]
                if ".." in parts:  # a group beside the root that this process sees
                    parts = ()
                yield from (tree.joinpath(*parts[:count]) for count in range(len(parts) + 1))


def _read(group: Path, name: str) -> str:
    return (group / name).read_text(encoding="ascii")
