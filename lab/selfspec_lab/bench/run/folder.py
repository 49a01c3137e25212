"""The folder of a run: what it is, and one line for every measurement, written as soon as it is there."""

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from selfspec.errors import InvalidParameterError, SelfSpecError
from selfspec_lab.bench.run.measurement import Measurement

DESCRIPTION, MEASUREMENTS = "run.json", "results.jsonl"
REPORTS = ("summary.json", "report.md", "report.html")
LEAST_FREE_BYTES = 64 * 2**20


class RunFolder:
    """Where a run keeps what it measured.

    Args:
        path: the folder; made when the run starts.
        resume: go on with the run that is there.
        overwrite: replace the run that is there.

    Raises:
        InvalidParameterError: there is another run and neither was asked for, or both were; the place cannot hold a
            folder; there is hardly any space left.
    """

    def __init__(self, path: Path, *, resume: bool = False, overwrite: bool = False) -> None:
        self.path = path
        self._resume = resume
        if resume and overwrite:
            raise InvalidParameterError("--resume goes on with a run, --overwrite drops it; choose one of them")
        _check_place(path)
        if self.has_run and not resume and not overwrite:
            raise InvalidParameterError(
                f"'{path}' holds the results of a run already; go on with it by --resume, replace it by --overwrite, "
                "or name another folder"
            )

    @property
    def has_run(self) -> bool:
        """Whether a run was started here."""
        return (self.path / DESCRIPTION).exists() or (self.path / MEASUREMENTS).exists()

    def check_same(self, options: Mapping[str, Any], place: Mapping[str, Any]) -> None:
        """Refuses to go on with a run that was told something else, or measured elsewhere.

        Args:
            options: of the run to come, as ``RunOptions.to_dict`` gives them.
            place: its stamp, of which hardware, versions and threads have to be the same.

        Raises:
            InvalidParameterError: they differ; the message says in what.
        """
        if not (self._resume and self.has_run):
            return
        before = self.describe()
        different = _differences(before.get("options", {}), options)
        stamp = before.get("stamp", {})
        for name in ("hardware", "versions", "threads"):
            different += _differences({name: stamp.get(name)}, {name: place[name]})
        if different:
            raise InvalidParameterError(
                f"the run in '{self.path}' was another one: {'; '.join(different)}. Resume with the same options on "
                "the same machine, or name another folder"
            )

    def describe(self) -> dict[str, Any]:
        """What ``run.json`` says.

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
        """Makes the folder ready.

        Args:
            description: what ``run.json`` is to say.

        Returns:
            The keys of what is measured already.

        Raises:
            InvalidParameterError: it cannot be written, or what is there cannot be read.
        """
        with self._explained():
            self.path.mkdir(parents=True, exist_ok=True)
            if self._resume and self.has_run:
                return self._drop_cut_line()
            for name in (DESCRIPTION, MEASUREMENTS, *REPORTS):
                (self.path / name).unlink(missing_ok=True)
            text = json.dumps(description, indent=1, allow_nan=False) + "\n"
            (self.path / DESCRIPTION).write_text(text, encoding="utf-8")
            (self.path / MEASUREMENTS).touch()
        return set()

    def append(self, measurement: Measurement) -> None:
        """Writes a line.

        Raises:
            InvalidParameterError: there is no space; what was written before is whole.
        """
        with self._explained(), (self.path / MEASUREMENTS).open("a", encoding="utf-8") as file:
            _write_line(file, json.dumps(measurement.to_dict(), allow_nan=False))

    def _drop_cut_line(self) -> set[tuple[str, str, int]]:
        """Removes a last line that a crash cut off; returns the keys of the others that are measurements."""
        path = self.path / MEASUREMENTS
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            path.write_bytes(whole)
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
                f"cannot write to '{self.path}': {error.strerror or error}; what was measured so far is kept. Make "
                "room, then go on by --resume"
            ) from error


def _write_line(file: TextIO, line: str) -> None:
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
        raise InvalidParameterError(f"--out '{path}' lies below '{parent}', which is a file; name another folder")
    free = shutil.disk_usage(parent).free
    if free < LEAST_FREE_BYTES:
        raise InvalidParameterError(
            f"there are only {free / 2**20:.0f} MiB free for --out '{path}'; make room, or name a folder elsewhere"
        )


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return [f"{name} was {before.get(name)!r} and is {now.get(name)!r}" for name in names]
