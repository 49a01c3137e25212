"""What was measured or chosen on a machine, in a file of the user's cache folder, with what it is valid for."""

import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from selfspec.files import cache_folder, replace_file


class KeptFile:
    """A file of JSON.

    Args:
        folder: of the cache folder; one for each kind of content.
        key: what the content is valid for: numbers, strings, lists and mappings of these.
        *about: what distinguishes files with the same key, by ``repr``.

    Attributes:
        path: where it is; it need not exist.
    """

    def __init__(self, folder: str, key: Mapping[str, Any], *about: object) -> None:
        text = json.dumps(key, sort_keys=True)
        self._key = json.loads(text)
        self.path: Path = (
            cache_folder()
            / folder
            / ".".join((_digest(text)[:24], *(_digest(repr(each))[:8] for each in about), "json"))
        )

    def read(self) -> dict[str, Any] | None:
        """What was written; ``None`` if there is no such file, a damaged one, or one with another key."""
        try:
            found: Any = json.loads(self.path.read_text(encoding="utf-8"))
            return dict(found["kept"]) if found["key"] == self._key else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, kept: Mapping[str, Any]) -> Path | None:
        """Replaces the content; ``None`` where that fails: then it is measured again another time."""
        content = json.dumps({"key": self._key, "kept": kept}, allow_nan=False)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self.path, content)
        except OSError:
            return None
        return self.path

    def remove(self) -> None:
        """Removes the file, if there is one."""
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)


def restored(kind: Any, value: Any) -> Any:
    """A value of a type from what JSON has of it, as ``dataclasses.asdict`` gives it.

    Raises:
        ValueError, TypeError, KeyError: it is of no such type.
    """
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{field.name: restored(hints[field.name], value[field.name]) for field in fields(kind)})  # type: ignore[operator]
    parts, given = get_args(kind), get_origin(kind)
    if type(None) in parts:
        return None if value is None else restored(parts[0], value)
    if given is tuple:
        kinds = parts[:1] * len(value) if parts[-1] is Ellipsis else parts
        return tuple(restored(*each) for each in zip(kinds, value, strict=True))
    if given is Mapping:
        return {restored(parts[0], name): restored(parts[1], each) for name, each in value.items()}
    return kind(value)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
