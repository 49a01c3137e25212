"""Texts of requests in files, with their keys and values, so that later processes begin with them (``cache_dir``)."""

import contextlib
import hashlib
import json
import logging
import os
import struct
import threading
import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from selfspec.decoding.suffixes import SEPARATOR, SuffixAutomaton
from selfspec.errors import InvalidParameterError
from selfspec.files import check_own, replace_file
from selfspec.runtimes.costs.store import profile_key
from selfspec.runtimes.kernel_build import KernelBuildError
from selfspec.runtimes.kernels import find
from selfspec.runtimes.target import Target
from selfspec.runtimes.threads import release_threads

_VERSION = 2
"""Of the files, and of everything that keys and values depend on and ``_key`` does not name."""

_HEAD = struct.Struct("<32sII")
"""SHA-256 of what a file is about and of all after it; tokens; those whose keys and values are in other files."""

_MOST_TOKENS = 2**15
"""Most tokens of earlier texts that are read, the newest; with twice as many in memory they are read anew."""

_MOST_SALTS = 8
_MOST_NAMES = 1024
"""Most pairs of a salt and a rope whose files are known without looking into the folder."""

_MOST_TEXTS = 512
_MOST_FILES = 8192
"""Most files in the folder: clients choose the salts, and each makes files of its own, however small."""

_MOST_WAITING = 16
"""Most requests whose files are still to be written; those of further ones are not."""

PART_BYTES = 2**25
"""About as many bytes of keys and values are read, or copied, while others wait."""

_ABANDONED = 3600 * 10**9
"""Nanoseconds after which a file that is still being written belongs to a process that has ended."""

_CONTEXT = 16
"""Tokens of a prompt's end that are kept with the output, to find its beginning by."""


class Scope(NamedTuple):
    """Whose keys and values a text may share: those of requests with the same salt and the same frequencies of rope."""

    salt: str = ""
    long_rope: bool = False


@dataclass(frozen=True)
class Stretch:
    """Keys and values of the last tokens of a text, ``[layers, 2, key_value_heads, tokens - start, head_dim]``."""

    token_ids: Sequence[int]
    start: int
    content: torch.Tensor

    @property
    def length(self) -> int:
        """Tokens of the text."""
        return len(self.token_ids)

    def rows(self, start: int, count: int) -> torch.Tensor:
        """A copy of keys and values of consecutive tokens."""
        return self.content[:, :, :, start - self.start : start - self.start + count].clone()


class _Entry(NamedTuple):
    """A file of keys and values: the text up to their last token, and how many tokens are before their first."""

    path: Path
    tokens: bytes  # as in the file, four bytes each
    start: int

    def shared(self, tokens: bytes, known: int) -> int:
        """How many tokens it has of a text, if it goes on after the first ``known`` of it; otherwise 0."""
        own, low, high = self.tokens, known, min(len(self.tokens), len(tokens)) // 4
        if self.start > known or high <= known or own[: 4 * known + 4] != tokens[: 4 * known + 4]:
            return 0
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if own[: 4 * middle] == tokens[: 4 * middle] else (low, middle - 1)
        return low


class KeptTexts:
    """Files of a folder in which processes with the same model keep texts of requests, with keys and values.

    What they depend on names their folders: the model and how it runs, in these the salt of the request, so that a salt
    without files costs no look at those of others. A file that is damaged or that others could have written is not
    used, which is logged once, and replaced. Files are written in a thread; at the end of the process, and in
    ``flush``, those that wait are. Together the files of all models take at most
    ``limit`` bytes: those that were used longest ago go first. ``grain`` is that of the prompts' chunks.
    """

    def __init__(self, folder: Path, limit: int, target: Target, grain: int) -> None:
        self._limit, self.target, self._version = limit, target, target.version
        self._key = _key(target, grain)
        try:
            self._root = folder.expanduser()
            self._folder = self._root / f"selfspec-{hashlib.sha256(self._key).hexdigest()[:24]}"
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
            reason = getattr(error, "strerror", None) or error
            raise InvalidParameterError(
                f"cache_dir: '{folder}' cannot be used: {reason}; give a folder of your own"
            ) from error
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, list[_Entry]] = OrderedDict()
        self._earlier: OrderedDict[str, SuffixAutomaton] = OrderedDict()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="selfspec-cache-dir")
        self._waiting = 0
        self._unseen = limit  # bytes written since the folder was last looked through
        self._unusable: set[Path] = set()
        self._warned = False

    def earlier(self, salt: str) -> SuffixAutomaton:
        """The latest texts of requests with a salt, which grow with each further one.

        Reads what ``find`` needs to know of the salt, too, so that the thread that decodes does not wait for it.
        """
        for rope in (False, True):
            self._index(self._name(salt, "keys", rope))
        name = self._name(salt, "text")
        with self._lock:
            found = self._earlier.get(name)
        if found is None:
            found = SuffixAutomaton()
            for text in reversed(list(self._latest_texts(name))):
                found.extend((*text, SEPARATOR))
        with self._lock:
            found = self._earlier.setdefault(name, found)
            self._earlier.move_to_end(name)
            if len(self._earlier) > _MOST_SALTS:
                self._earlier.popitem(last=False)
            return found

    def find(self, token_ids: Sequence[int], known: int, scope: Scope) -> Stretch | None:
        """Keys and values that go on where those of the first ``known`` tokens of a text end; the most there are."""
        if self.target.version != self._version:
            return None
        name, tokens = self._name(scope.salt, "keys", scope.long_rope), array("i", token_ids).tobytes()
        while True:
            best = max(self._index(name), key=lambda entry: entry.shared(tokens, known), default=None)
            if best is None or best.shared(tokens, known) <= known:
                return None
            if (content := self._read(best.path, name)) is not None:
                return self._stretch(content)
            self._forget([best.path])

    def keep(
        self, prompt_ids: Sequence[int], output_ids: Sequence[int], stretches: Sequence[Stretch], scope: Scope
    ) -> None:
        """Keeps a request's text, and keys and values of stretches of it that follow each other from its beginning."""
        text = (*prompt_ids[-_CONTEXT:], *output_ids)
        name = self._name(scope.salt, "text")
        with self._lock:
            if (earlier := self._earlier.get(name)) is not None:
                earlier.extend((*text, SEPARATOR))
                if len(earlier.tokens) > 2 * _MOST_TOKENS:
                    del self._earlier[name]
            if self._waiting >= _MOST_WAITING:
                return
            self._waiting += 1
        used = stretches if self.target.version == self._version else ()
        self._writer.submit(self._write_all, name, text, self._name(scope.salt, "keys", scope.long_rope), used)

    def flush(self) -> None:
        """Waits until all files are written."""
        self._writer.submit(lambda: None).result()

    # Reading

    def _name(self, salt: str, kind: str, *about: object) -> str:
        """The folder of some files in that of the model; it ends with their kind."""
        return f"{hashlib.sha256(repr((self._key, salt, kind, *about)).encode()).hexdigest()[:24]}.{kind}"

    def _paths(self, name: str) -> list[Path]:
        """The files of a folder, the latest first."""
        return [path for _, _, path in sorted(_files((self._folder / name).glob("*")), reverse=True)]

    def _latest_texts(self, name: str) -> Iterator[tuple[int, ...]]:
        left = _MOST_TOKENS
        for path in self._paths(name):
            if (content := self._read(path, name)) is not None:
                text = _tokens(content)
                if len(text) > left:
                    return
                left -= len(text)
                yield text

    def _index(self, name: str) -> list[_Entry]:
        """The files of keys and values of a name; their contents are not checked yet."""
        with self._lock:
            found = self._entries.get(name)
        if found is None:
            heads = ((path, self._read(path, name, head=True)) for path in self._paths(name))
            found = [
                _Entry(path, bytes(head[_HEAD.size :]), _HEAD.unpack_from(head)[2]) for path, head in heads if head
            ]
        with self._lock:
            found = self._entries.setdefault(name, found)
            self._entries.move_to_end(name)
            if len(self._entries) > _MOST_NAMES:
                self._entries.popitem(last=False)
            return list(found)

    def _forget(self, gone: Collection[Path]) -> None:
        """Forgets files that are not there, or not usable."""
        with self._lock:
            for entries in self._entries.values():
                entries[:] = [entry for entry in entries if entry.path not in gone]

    def _read(self, path: Path, name: str, *, head: bool = False) -> bytearray | None:
        """The contents of a file, or with ``head`` what is before keys and values, unchecked; ``None`` if unusable."""
        try:
            check_own(path)
            size = path.stat().st_size
            with path.open("rb", buffering=0) as file:
                first = file.read(_HEAD.size)
                digest, tokens, start = _HEAD.unpack(first)
                slots = self.target.slot_bytes * (tokens - start)
                if start > tokens or size != _HEAD.size + 4 * tokens + slots or size > self._limit:
                    raise ValueError
                content = bytearray(size - slots if head else size)
                content[: len(first)] = first
                file.readinto(memoryview(content)[len(first) :])
            if not head and digest != _digest(name, content):
                raise ValueError
            return content
        except FileNotFoundError:  # another process removed it
            return None
        except (OSError, MemoryError, ValueError, struct.error) as error:
            self._unusable.add(path)
            reason = getattr(error, "strerror", None) or "it is damaged or too large"
            self._warn(f"'{path}' is not used: {reason}")
            return None

    def _stretch(self, content: bytearray) -> Stretch:
        token_ids, start = _tokens(content), _HEAD.unpack_from(content)[2]
        like = self.target.new_cache(1).rows(0, 1)
        rows = torch.frombuffer(content, dtype=like.dtype, offset=_HEAD.size + 4 * len(token_ids))
        shape = *like.shape[:3], len(token_ids) - start, like.shape[4]
        return Stretch(token_ids, start, rows.view(shape).to(self.target.device))

    # Writing, in the thread

    def _write_all(self, text_name: str, text: Sequence[int], name: str, stretches: Sequence[Stretch]) -> None:
        try:
            self._write(text_name, text, len(text), b"")
            for stretch in reversed([*self._parts(stretches)]):  # beginnings last, so that they are the last to go
                if not self._holds(name, stretch):
                    rows = stretch.content.cpu().contiguous().view(torch.uint8).numpy().tobytes()
                    path = self._write(name, stretch.token_ids, stretch.start, rows)
                    entry = _Entry(path, array("i", stretch.token_ids).tobytes(), stretch.start)
                    with self._lock:
                        if name in self._entries:  # otherwise it is found in the folder
                            self._entries[name].append(entry)
        except (OSError, MemoryError, RuntimeError) as error:
            self._warn(f"texts cannot be kept in '{self._folder}': {getattr(error, 'strerror', None) or error}")
        finally:
            release_threads()
            with self._lock:
                self._waiting -= 1

    def _parts(self, stretches: Sequence[Stretch]) -> Iterator[Stretch]:
        """The stretches, long ones in parts, since a file is read as a whole while others wait."""
        size = max(1, PART_BYTES // self.target.slot_bytes)
        for stretch in stretches:
            for start in range(stretch.start, stretch.length, size):
                end = min(stretch.length, start + size)
                rows = stretch.content[:, :, :, start - stretch.start : end - stretch.start]
                yield Stretch(stretch.token_ids[:end], start, rows)

    def _holds(self, name: str, stretch: Stretch) -> bool:
        """Whether one file has all of a stretch, which is then the latest used."""
        text = array("i", stretch.token_ids).tobytes()
        for entry in self._index(name):
            if entry.start <= stretch.start and entry.tokens.startswith(text):
                if _touch(entry.path):
                    return True
                self._forget([entry.path])
        return False

    def _write(self, name: str, token_ids: Sequence[int], start: int, rows: bytes) -> Path:
        content = b"".join((struct.pack("<II", len(token_ids), start), array("i", token_ids).tobytes()))
        path = self._folder / name / hashlib.sha256(content).hexdigest()[:24]
        found = None if path in self._unusable else self._read(path, name, head=True)
        if found is None or found[32:] != content or not _touch(path):
            path.unlink(missing_ok=True)  # its owner and mode may be the reason
            self._unusable.discard(path)
            whole = bytearray(32) + content + rows
            whole[:32] = _digest(name, whole)
            self._make_room(len(whole))
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            replace_file(path, bytes(whole))
            _touch(path)
        return path

    def _make_room(self, size: int) -> None:
        """Removes the files that were used longest ago, of any model, and those that no process is writing any more.

        Looks through the folder at every 256th file, or after a 32nd of the limit; other processes write there too.
        """
        most = self._limit - (self._limit >> 4)
        if size > most:
            raise OSError(f"a text takes {size:,} bytes, and the limit is {self._limit:,}")
        self._unseen += max(size, self._limit >> 13)
        if self._unseen <= self._limit >> 5:
            return
        self._unseen = 0
        left, texts, gone = most - size, Counter[Path](), set[Path]()
        found = sorted(_files(self._root.glob("selfspec-*/*/*")), reverse=True)
        for place, (changed, own, path) in enumerate(found):
            texts[path.parent] += path.parent.suffix == ".text"
            left -= own
            abandoned = path.suffix == ".part" and time.time_ns() - changed > _ABANDONED
            if left < 0 or place >= _MOST_FILES or texts[path.parent] > _MOST_TEXTS or abandoned:
                path.unlink(missing_ok=True)
                gone.add(path)
                left += own
        self._forget(gone)
        for folder in {path.parent for path in gone}:
            with contextlib.suppress(OSError):  # there are other files in it
                folder.rmdir()

    def _warn(self, message: str) -> None:
        """Once: there are many files."""
        if not self._warned:
            logging.getLogger("selfspec").warning("cache folder: %s", message)
        self._warned = True


def _key(target: Target, grain: int) -> bytes:
    """What keys and values depend on: the model and its weights, and what computes them, in which order."""
    key = profile_key(target)
    if target.independent_rows:  # kernels give the same bits with any number of threads
        del key["threads"]
    try:
        kernels = find()
        key["kernels"] = kernels.level, hashlib.sha256(Path(kernels.library._name).read_bytes()).hexdigest()
    except (KernelBuildError, OSError):
        key["kernels"] = None
    config = target.config.to_dict()
    config.pop("_name_or_path", None)
    key |= {
        "kept": _VERSION,
        "format": target.weights,
        "config": repr(sorted(config.items())),
        "sublayers": [type(sublayer).__name__ for sublayer in target.sublayers],
        "slots": [target.decoder.slot_layers, *target.decoder.slot_shape],
        "grain": grain,
    }
    return json.dumps(key, sort_keys=True).encode()


def _digest(name: str, content: bytearray) -> bytes:
    """SHA-256 of what a file is about, and of what it holds after the digest."""
    digest = hashlib.sha256(name.encode())
    digest.update(memoryview(content)[32:])
    return digest.digest()


def _tokens(content: bytearray) -> tuple[int, ...]:
    return tuple(array("i", content[_HEAD.size : _HEAD.size + 4 * _HEAD.unpack_from(content)[1]]))


def _touch(path: Path) -> bool:
    """Makes a file the latest used; false where there is none."""
    try:
        os.utime(path, ns=(time.time_ns(),) * 2)  # finer than the clock of the file system
    except FileNotFoundError:
        return False
    return True


def _files(paths: Iterable[Path]) -> Iterator[tuple[int, int, Path]]:
    """When files were used last, in nanoseconds, and their bytes."""
    for path in paths:
        with contextlib.suppress(OSError):  # another process removed it
            found = path.stat()
            if path.parent.suffix in (".keys", ".text"):
                yield found.st_mtime_ns, found.st_size, path
