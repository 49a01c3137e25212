"""The wheel: what its build hook puts into it, by a compiler that does not optimise, and without one."""

import ctypes
import os
import platform
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder

from helpers import caching_compiler
from helpers.kernels import found_again, needs_kernels
from selfspec import __version__
from selfspec.runtimes import kernels
from selfspec.runtimes.kernel_build import find_compiler, levels_of, machine, processor_features, usable_levels

ROOT = Path(__file__).parents[1]


def build_wheel(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    every = {**os.environ, "CXXFLAGS": "-O0", **environment}
    return subprocess.run(command, cwd=ROOT, env=every, capture_output=True, text=True, check=False)


def cached_compiler() -> str:
    """``CXX`` of a compiler that compiles the same only once."""
    return shlex.join([sys.executable, caching_compiler.__file__, *find_compiler()])


def wheel_of(folder: Path) -> Path:
    (wheel,) = folder.glob("*.whl")
    return wheel


def libraries(wheel: Path) -> set[str]:
    return {Path(name).name for name in zipfile.ZipFile(wheel).namelist() if "/built/" in name}


@pytest.mark.slow
@needs_kernels
@pytest.mark.skipif(platform.system() != "Linux", reason="wheels with kernels are built on Linux")
def test_it_carries_kernels_for_every_level(tmp_path: Path) -> None:
    built = build_wheel(tmp_path, SELFSPEC_WHEEL_KERNELS="always", CXX=cached_compiler())
    assert built.returncode == 0, built.stderr
    wheel = wheel_of(tmp_path)
    assert wheel.name.endswith(f"-py3-none-linux_{platform.machine()}.whl")
    assert libraries(wheel) == {f"kernels-{level.name}.so" for level in levels_of(machine())}
    with zipfile.ZipFile(wheel) as opened:
        assert "Root-Is-Purelib: false" in opened.read(f"selfspec-{__version__}.dist-info/WHEEL").decode()
        opened.extractall(tmp_path / "unpacked")
    for level in usable_levels(machine(), processor_features()):
        library = ctypes.CDLL(str(tmp_path / f"unpacked/selfspec/runtimes/built/kernels-{level.name}.so"))
        library.most_rows_bfloat16.restype = ctypes.c_long
        assert library.most_rows_bfloat16() > 0


def test_without_a_compiler_it_is_pure(tmp_path: Path) -> None:
    built = build_wheel(tmp_path, CXX=str(tmp_path / "no-compiler"))
    assert built.returncode == 0, built.stderr
    assert wheel_of(tmp_path).name.endswith("-py3-none-any.whl")
    assert not libraries(wheel_of(tmp_path))
    assert "the wheel carries no kernels: the kernels could not be built with" in built.stdout + built.stderr


@pytest.mark.parametrize(
    ("choice", "succeeds", "says"),
    [("never", True, ""), ("always", False, "the kernels could not be built with"), ("sometimes", False, "choose one")],
)
def test_the_choice_of_the_environment(choice: str, succeeds: bool, says: str, tmp_path: Path) -> None:
    built = build_wheel(tmp_path, SELFSPEC_WHEEL_KERNELS=choice, CXX=str(tmp_path / "no-compiler"))
    assert (built.returncode == 0) == succeeds
    assert says in built.stdout + built.stderr
    assert len(list(tmp_path.glob("*-py3-none-any.whl"))) == succeeds


def test_the_source_distribution_holds_no_links() -> None:
    """pip refuses to unpack those that lead out of it."""
    files = [Path(each.path) for each in SdistBuilder(str(ROOT)).recurse_included_files()]
    assert ROOT / "pyproject.toml" in files
    assert not [file for file in files if file.is_symlink()]


@needs_kernels
def test_the_libraries_of_a_wheel_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is built, and ``selfspec info`` says where they come from."""
    loaded = kernels.find()
    carried = tmp_path / f"kernels-{loaded.level}.so"
    carried.write_bytes(Path(loaded.library._name).read_bytes())
    monkeypatch.setattr(kernels, "BUILT_FOLDER", tmp_path)
    monkeypatch.setattr(kernels, "build", None)
    with found_again():
        assert kernels.describe() == f"{loaded.level}, from the wheel"
        assert kernels.load()._name == str(carried)
