"""The rooms of the two packages: who may import whom.

The library imports nothing from the laboratory. The laboratory imports the public modules of the library alone. There
is no circle of files. A file imports from its own room and from lower ones. Imports inside of functions and those for
type checkers count. A name of a module or of a public class of the library has one meaning.

``ROOMS`` lists the rooms from low to high. The package itself, ``selfspec``, exports names of ``engine`` and ``hf``, so
it is above them and below ``cli``, which prints its version.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]

ROOMS = (
    ("errors", "control_group"),
    ("limits", "files", "timing", "memory", "constraint", "choices", "ranges", "lazy"),
    ("model",),
    ("runtimes", "gpu"),
    ("params",),
    ("types",),
    ("sampling",),
    ("decoding",),
    ("planning",),
    ("methods",),
    ("loading",),
    ("text_encoder", "control_tokens"),
    ("prompts", "chat_encoder"),
    ("engine_options",),
    ("engine", "hf"),
    ("async_engine", "engine_thread", "request_stream", "engine_stats"),
    ("selfspec",),
    ("serve", "bridges"),
    ("cli",),
    ("__main__",),
)
"""The rooms of the library, low to high; those of one line are equally high."""

PUBLIC = {
    "selfspec",
    "selfspec.async_engine",
    "selfspec.bridges.llama_cpp",
    "selfspec.bridges.vllm",
    "selfspec.cli.api",
    "selfspec.errors",
    "selfspec.files",
    "selfspec.limits",
    "selfspec.loading",
    "selfspec.memory",
    "selfspec.methods",
    "selfspec.timing",
    "selfspec.types",
}
PUBLIC_ROOMS = (
    "selfspec.decoding.",
    "selfspec.gpu.",
    "selfspec.methods.",
    "selfspec.model.",
    "selfspec.planning.",
    "selfspec.runtimes.",
    "selfspec.sampling.",
)
"""What the laboratory may import, as ``docs/interface.md`` says; of these rooms every module."""

Files = Mapping[str, Path]


class Import(NamedTuple):
    """An import of ``target``, a module, in a line of a file."""

    file: Path
    line: int
    target: str

    def __str__(self) -> str:
        place = self.file.relative_to(ROOT) if self.file.is_relative_to(ROOT) else self.file
        return f"{place}:{self.line} imports {self.target}"


def modules(folder: Path) -> dict[str, Path]:
    """The files below a folder by the name of their module; a package is its ``__init__``."""
    named = {path.relative_to(folder).with_suffix("").parts: path for path in sorted(folder.rglob("*.py"))}
    return {".".join(parts[:-1] if parts[-1] == "__init__" else parts): path for parts, path in named.items()}


def imports(name: str, known: Files) -> Iterator[Import]:
    """What a module imports of the known ones; ``from package import module`` is an import of that module."""
    file = known[name]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: a relative import; name the module"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [each if each in known else str(node.module) for each in names]
        else:
            continue
        yield from (Import(file, node.lineno, each) for each in sorted(set(names)) if each.partition(".")[0] in known)


def circle(known: Files) -> list[Import]:
    """The imports of a circle of files; empty if there is none."""
    edges = {name: [each for each in imports(name, known) if each.target in known] for name in known}
    finished: set[str] = set()

    def search(name: str, path: list[Import], entered: list[str]) -> list[Import]:
        if name in entered:
            return path[entered.index(name) :]
        if name in finished:
            return []
        for edge in edges[name]:
            if edge.target != name and (found := search(edge.target, [*path, edge], [*entered, name])):
                return found
        finished.add(name)
        return []

    return next((found for name in known if (found := search(name, [], []))), [])


def level(module: str) -> int:
    """How high the room of a module of the library is."""
    room = module.split(".")[1] if "." in module else module
    found = [index for index, rooms in enumerate(ROOMS) if room in rooms]
    assert found, f"the room of {module} is not in ROOMS"
    return found[0]


def ascending(known: Files) -> list[Import]:
    """The imports of modules in higher rooms."""
    return [each for name in known for each in imports(name, known) if level(each.target) > level(name)]


LIBRARY = modules(ROOT / "src")
LABORATORY = {name: path for name, path in modules(ROOT / "lab").items() if name.startswith("selfspec_lab")}
BOTH = {**LIBRARY, **LABORATORY}


def told(found: list[Import]) -> str:
    return "\n".join(map(str, found))


def test_the_library_does_not_import_the_laboratory() -> None:
    found = [each for name in LIBRARY for each in imports(name, BOTH) if each.target.startswith("selfspec_lab")]
    assert not found, told(found)


def test_the_laboratory_imports_public_modules_alone() -> None:
    of_the_library = [each for name in LABORATORY for each in imports(name, BOTH) if each.target in LIBRARY]
    assert len(of_the_library) > 100
    private = [
        each for each in of_the_library if each.target not in PUBLIC and not each.target.startswith(PUBLIC_ROOMS)
    ]
    assert not private, told(private)


def test_there_is_no_circle_of_files() -> None:
    found = circle(BOTH)
    assert not found, told(found)


def test_no_file_imports_from_a_higher_room() -> None:
    found = ascending(LIBRARY)
    assert not found, told(found)


def named_twice(known: Files) -> set[str]:
    """Names of modules, and of public classes, of which there are several."""
    classes = [
        node.name
        for path in known.values()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    files = [path.stem for path in known.values() if path.stem != "__init__"]
    return {name for name, count in Counter(classes + files).items() if count > 1}


def test_a_name_has_one_meaning() -> None:
    assert named_twice(LIBRARY) == {"api"}  # what commands, and what methods of other packages import


def test_a_name_with_two_meanings_is_found(tmp_path: Path) -> None:
    files = {"types": "class Round: ...", "limits": "", "serve/limits": "class _Own: ...\nclass Round: ..."}
    assert named_twice(write(tmp_path, files)) == {"Round", "limits"}


def test_the_page_names_every_public_module() -> None:
    page = (ROOT / "docs" / "interface.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(selfspec[\w.]*)`", page))
    assert named >= PUBLIC
    assert all(name in LIBRARY for name in PUBLIC)


def test_the_laboratory_requires_the_version_of_the_library() -> None:
    library, laboratory = ((folder / "pyproject.toml").read_text(encoding="utf-8") for folder in (ROOT, ROOT / "lab"))
    version = re.search(r'^version = "(.+)"$', library, re.MULTILINE)
    assert version is not None
    assert f'version = "{version[1]}"' in laboratory
    assert re.search(rf'"selfspec(\[[\w,]+\])?=={re.escape(version[1])}"', laboratory)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"engine": "from selfspec.model import rope", "model/rope": ""}, []),
        ({"model/rope": "import selfspec.engine", "engine": ""}, ["rope.py:1 imports selfspec.engine"]),
        (
            {"types": "def later():\n    from selfspec import engine", "engine": ""},
            ["types.py:2 imports selfspec.engine"],
        ),
        (
            {"sampling/rules": "if TYPE_CHECKING:\n    from selfspec.cli.options import Chat", "cli/options": ""},
            ["rules.py:2 imports selfspec.cli.options"],
        ),
    ],
)
def test_an_arrow_upwards_is_found(files: dict[str, str], expected: list[str], tmp_path: Path) -> None:
    known = write(tmp_path, files)
    assert [str(each).rpartition("/")[2] for each in ascending(known)] == expected


def test_a_circle_is_found(tmp_path: Path) -> None:
    chain = {"engine": "from selfspec.types import x", "types": "import selfspec.batch", "batch": ""}
    assert circle(write(tmp_path, chain)) == []
    closed = write(tmp_path, chain | {"batch": "def later():\n    from selfspec.engine import y"})
    assert {each.target for each in circle(closed)} == {"selfspec.types", "selfspec.batch", "selfspec.engine"}


def write(folder: Path, files: dict[str, str]) -> dict[str, Path]:
    for name, text in {"__init__": "", **files}.items():
        path = folder / "selfspec" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return modules(folder)
