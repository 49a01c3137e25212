"""Files of the cache folder: found again under the same key, and never under another one or damaged."""

import tempfile
from pathlib import Path

import pytest

from selfspec.files import cache_folder
from selfspec.runtimes.kept_file import KeptFile


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_content_is_found_by_key_and_subject() -> None:
    key = {"shapes": ((1, 2),), "processor": "a"}
    assert KeptFile("kind", key).read() is None
    path = KeptFile("kind", key, 4).write({"seconds": [0.5]})
    assert path == KeptFile("kind", key, 4).path
    assert KeptFile("kind", {"processor": "a", "shapes": [[1, 2]]}, 4).read() == {"seconds": [0.5]}
    for other in (KeptFile("kind", key), KeptFile("kind", key, 8), KeptFile("other", key, 4)):
        assert other.read() is None


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", '{"key": {"a": 1}}', '{"key": {"a": 2}, "kept": {}}', '{"kept": {}}']
)
def test_damaged_content_and_that_of_another_key_count_for_nothing(damage: str) -> None:
    file = KeptFile("kind", {"a": 1})
    assert file.write({"b": 2}) == file.path
    assert file.read() == {"b": 2}
    file.path.write_text(damage)
    assert file.read() is None


def test_a_folder_that_cannot_be_written_to_keeps_nothing(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "file"))
    assert KeptFile("kind", {}).write({}) is None


def test_a_user_whose_home_is_not_known_has_a_folder_too(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """As in a container that runs by the number of a user."""

    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", unknown)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    file = KeptFile("kind", {})
    assert file.write({"b": 2}) == file.path
    assert cache_folder().parent == folder
    assert file.read() == {"b": 2}
