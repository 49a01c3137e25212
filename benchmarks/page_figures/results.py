"""Results files of clean commits, by name, and what their stamps say."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from selfspec_lab.bench.stamp import commit_text

FOLDER = Path(__file__).parents[1] / "results"


@cache
def read(name: str) -> Any:
    """A results file.

    Args:
        name: its path in ``benchmarks/results`` without the ending ``.json``.

    Raises:
        OSError: there is no such file.
        ValueError: it was measured with uncommitted changes, or has no stamp.
    """
    result = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    stamps = [*stamps_of(result)]
    if not stamps or any(stamp["dirty"] for stamp in stamps):
        raise ValueError(f"{name}.json is not of a clean commit; measure it again")
    return result


def present(names: Iterable[str]) -> dict[str, Any]:
    """Those of some results files that exist and are of a clean commit."""
    found = {}
    for name in names:
        try:
            found[name] = read(name)
        except (OSError, ValueError):
            continue
    return found


def stamps_of(result: Any) -> Iterator[Mapping[str, Any]]:
    """The stamps of a result, wherever they stand."""
    if isinstance(result, Mapping) and "commit" in result and "dirty" in result:
        yield result
        return
    parts = result.values() if isinstance(result, Mapping) else result if isinstance(result, list) else ()
    for part in parts:
        yield from stamps_of(part)


def find_stamp(result: Any) -> Mapping[str, Any] | None:
    """The last stamp of a result; ``None`` if there is none."""
    return next(iter([*stamps_of(result)][::-1]), None)


def machine(stamp: Mapping[str, Any]) -> str:
    """The processor and the threads, after an accelerator where there is one."""
    hardware = stamp["hardware"]
    device = "" if hardware["device"] == "cpu" else f"{hardware['device']}, beside "
    return f"{device}{hardware['processor']}, {stamp['threads']} threads on {hardware['cores']} cores"


def origin(results: Mapping[str, Any], link: str) -> str:
    """Machine, commits, dates, commands and files of the results in a table.

    Args:
        results: by name.
        link: path from the page to the folder of results.

    Raises:
        ValueError: they are of different machines.
    """
    stamps = {name: find_stamp(result) or {} for name, result in results.items()}
    machines = {machine(stamp) for stamp in stamps.values()}
    if len(machines) > 1:
        raise ValueError(f"one table, several machines: {', '.join(sorted(machines))} ({', '.join(results)})")
    levels = ", ".join(sorted({level for stamp in stamps.values() if (level := stamp["hardware"].get("kernels"))}))
    each: dict[str, list[str]] = {}
    for name, stamp in stamps.items():
        command = f", `{stamp['command']}`" if stamp.get("command") else ""
        when = f"commit {commit_text(stamp, 9)}, {stamp['date'][:10]}{command}"
        each.setdefault(when, []).append(f"{link}/{name}.json")
    of = "; ".join(f"{when} ({', '.join(f'[data]({path})' for path in paths)})" for when, paths in each.items())
    return f"{machines.pop()}{f' ({levels})' if levels else ''}; {of}."
