"""The folder of a run: ``run.json`` describes it, ``results.jsonl`` has a line for each measurement."""

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from selfspec.errors import InvalidParameterError, SelfSpecError
from selfspec.files import replace_file
from selfspec_lab.bench.run.measurement import Measurement

DESCRIPTION, MEASUREMENTS = "run.json", "results.jsonl"
REPORTS = ("summary.json", "report.md", "report.html")
LEAST_FREE_BYTES = 64 * 2**20


class RunFolder:
    """The folder that a run writes to.

    Args:
        path: the folder; made when the run starts.
        resume: continue the run in the folder.
        overwrite: replace the run in the folder.

    Raises:
        InvalidParameterError: the folder holds a run and neither option is set; both are set; the path cannot be a
            folder; less than ``LEAST_FREE_BYTES`` are free.
    """

    def __init__(self, path: Path, *, resume: bool = False, overwrite: bool = False) -> None:
        self.path = path
        self._resume = resume
        if resume and overwrite:
            raise InvalidParameterError("--resume continues a run, --overwrite deletes it; choose one of them")
        _check_place(path)
        if self.has_run and not resume and not overwrite:
            raise InvalidParameterError(
                f"'{path}' already holds a run; continue it with --resume, replace it with --overwrite, "
                "or name another folder"
            )

    @property
    def has_run(self) -> bool:
        """Whether a run was started here."""
        return (self.path / DESCRIPTION).exists() or (self.path / MEASUREMENTS).exists()

    def check_same(self, options: Mapping[str, Any], place: Mapping[str, Any]) -> None:
        """Refuses to resume a run that had other options or another machine.

        Args:
            options: as ``RunOptions.to_dict`` gives them.
            place: the present stamp; its commit, hardware, versions, threads and ``dirty`` are compared.

        Raises:
            InvalidParameterError: they differ; the message names the differences.
        """
        if not (self._resume and self.has_run):
            return
        before = self.describe()
        different = _differences(before.get("options", {}), options)
        stamp = before.get("stamp", {})
        for name in ("commit", "hardware", "versions", "threads", "dirty"):
            different += _differences({name: stamp.get(name)}, {name: place[name]})
        if different:
            raise InvalidParameterError(
                f"the run in '{self.path}' differs: {'; '.join(different)}. Resume with the same options on the same "
                "machine, or name another folder"
            )

    def describe(self) -> dict[str, Any]:
        """The object in ``run.json``.

        Raises:
            InvalidParameterError: it is missing or broken.
        """
        path = self.path / DESCRIPTION
        try:
            described: Any = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InvalidParameterError(f"'{path}' is missing or broken ({error}); use --overwrite") from error
        if not isinstance(described, dict) or not {"options", "stamp", "sublayers"} <= described.keys():
            raise InvalidParameterError(f"'{path}' does not describe a run; use --overwrite")
        return described

    def start(self, description: Mapping[str, Any]) -> set[tuple[str, str, int]]:
        """Prepares the folder: makes it, or reads the measurements of the run to resume.

        Args:
            description: the object for ``run.json``.

        Returns:
            The keys of the measurements that exist.

        Raises:
            InvalidParameterError: the folder cannot be written, or its measurements cannot be read.
        """
        with self._explained():
            self.path.mkdir(parents=True, exist_ok=True)
            if self._resume and self.has_run:
                return self._drop_incomplete_line()
            for name in (DESCRIPTION, MEASUREMENTS, *REPORTS):
                (self.path / name).unlink(missing_ok=True)
            text = json.dumps(description, indent=1, allow_nan=False) + "\n"
            replace_file(self.path / DESCRIPTION, text)
            (self.path / MEASUREMENTS).touch()
        return set()

    def append(self, measurement: Measurement) -> None:
        """Appends a line to ``results.jsonl``.

        Raises:
            InvalidParameterError: it cannot be written; earlier lines are intact.
        """
        with self._explained(), (self.path / MEASUREMENTS).open("a", encoding="utf-8") as file:
            write_line(file, json.dumps(measurement.to_dict(), allow_nan=False))

    def _drop_incomplete_line(self) -> set[tuple[str, str, int]]:
        """Removes an incomplete last line; returns the keys of the measurements."""
        path = self.path / MEASUREMENTS
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            replace_file(path, whole)
        sublayers, measured = self.describe()["sublayers"], set()
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                measurement = Measurement.from_dict(json.loads(line), sublayers)
            except (KeyError, TypeError, ValueError, SelfSpecError) as error:
                raise InvalidParameterError(f"{path}, line {number}: not a measurement ({error})") from error
            measured.add(measurement.key)
        return measured

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InvalidParameterError(
                f"cannot write to '{self.path}': {error.strerror or error}; the measurements so far are kept. Make "
                "room, then continue with --resume"
            ) from error


def write_line(file: TextIO, line: str) -> None:
    """Appends a line to a file; if that fails, removes the part that was written.

    Raises:
        OSError: the line cannot be written.
    """
    start = file.tell()
    try:
        file.write(line + "\n")
        file.flush()
    except OSError:
        with contextlib.suppress(OSError):
            file.truncate(start)
        raise


def _check_place(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise InvalidParameterError(f"--out '{path}' is a file; name a folder")
    parent = path.absolute()
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise InvalidParameterError(f"--out '{path}' is below '{parent}', which is a file; name another folder")
    free = shutil.disk_usage(parent).free
    if free < LEAST_FREE_BYTES:
        raise InvalidParameterError(
            f"there are only {free / 2**20:.0f} MiB free for --out '{path}'; make room, or name a folder elsewhere"
        )


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return [f"{name} was {before.get(name)!r}, is {now.get(name)!r}" for name in names]
