"""Methods from outside the package: by class, by ``module:Class``, by an entry point; and what is wrong with others."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from helpers.checkpoints import save_checkpoint
from helpers.models import build, plain_text, prompt
from helpers.recording import record
from selfspec import METHODS, Engine
from selfspec.cli.command_line import app
from selfspec.errors import InvalidSettingError, MethodLoadError, UnknownMethodError
from selfspec.hf.custom_generate import custom_generate
from selfspec.methods import COMPOSITIONS, find_method, make_method
from selfspec.methods.registry import LAB_METHODS, MethodPool
from selfspec.runtimes.target import Target
from selfspec.types import Generation

EXAMPLES = Path(__file__).parents[2] / "examples"
MODULES = {
    "fine": "from my_method import *\nclass Other(EveryNth): name = 'other'\n",
    "broken": "1 / 0\n",
    "incomplete": (
        "from selfspec.methods.api import Drafter, Method\n"
        "class NoBegin(Method): name = summary = source = 'x'\n"
        "class NoName(Method):\n    def begin(self, prefill): ...\n"
        "class BadSettings(NoName): name = summary = source = 'x'; Settings = dict\n"
        "number = 3\n"
    ),
    "inheriting": "from selfspec.methods import find_method\nclass Mine(find_method('suffix')): pass\n",
    "needy": "import a_package_that_is_not_there\n",
}


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Modules with methods, on the path beside the example, and forgotten afterwards."""
    folder = tmp_path / "modules"
    folder.mkdir()
    for name, text in MODULES.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.syspath_prepend(str(folder))
    for name in ("my_method", *MODULES):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return folder


@pytest.fixture
def install(modules: Path) -> Callable[..., None]:
    """Makes an installed package with entry points of a group, ``selfspec.methods`` where none is named."""

    def make(package: str, group: str = "selfspec.methods", **entries: str) -> None:
        info = modules / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"{name.replace('_', '-')} = {value}" for name, value in entries.items()]
        (info / "entry_points.txt").write_text(f"[{group}]\n" + "\n".join(lines) + "\n")

    return make


def check(result: Generation, ids: list[int]) -> None:
    """It drafted with the example method, and wrote the plain text."""
    assert result.method == "every-nth"
    assert result.settings == {"every": 3, "longest": 8}
    assert result.token_ids == plain_text("llama", ids, 40)
    assert result.accepted > 0
    assert {played.kept.skipped for played in result.rounds if played.kept} == {(4, 5)}
    accepted = [played.accepted for played in result.rounds]
    assert [played.drafted for played in result.rounds[1:-2]] == [min(8, count + 1) for count in accepted[:-3]]


# The three ways


@pytest.mark.parametrize("way", ["class", "module:Class", "entry point"])
def test_an_engine_drafts_with_the_example(way: str, install: Callable[..., None]) -> None:
    import my_method

    install("every-nth-package", every_nth="my_method:EveryNth")
    method: Any = {"class": my_method.EveryNth, "module:Class": "my_method:EveryNth", "entry point": "every-nth"}[way]
    assert find_method(method) is my_method.EveryNth
    engine = Engine(build("llama"), method=method)
    check(engine.generate(prompt(17), max_new_tokens=40), prompt(17))
    prompts = [prompt(17), prompt(5)]
    for ids, result in zip(prompts, engine.generate(prompts, max_new_tokens=40), strict=True):
        check(result, ids)
    with pytest.raises(InvalidSettingError, match=r"every-nth has no setting 'evry'; did you mean 'every'\?"):
        Engine(build("llama"), method=method, settings={"evry": 4})
    assert "every-nth" not in METHODS, "an outside method became one of the package"


@pytest.mark.parametrize("way", ["class", "module:Class"])
def test_transformers_generate_drafts_with_the_example(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import my_method

    feedbacks = record(my_method.EveryNth, monkeypatch)
    method: Any = my_method.EveryNth if way == "class" else "my_method:EveryNth"
    loop = custom_generate(method, {"every": 2})
    written = build("llama").generate(
        torch.tensor([prompt(17)]), max_new_tokens=24, do_sample=False, pad_token_id=0, custom_generate=loop
    )
    assert tuple(written[0, 17:].tolist()) == plain_text("llama", prompt(17), 24)
    assert sum(feedback.accepted for feedback in feedbacks) > 0


def test_a_class_that_inherits_its_name_is_a_method_of_its_own() -> None:
    pool = MethodPool(make_method("suffix", Target(build("llama"))))
    mine = pool.get("inheriting:Mine")
    assert type(mine).__name__ == "Mine"
    assert mine.name == "suffix"
    assert pool.get("inheriting:Mine") is mine
    assert pool.get("suffix") is pool.get()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_checkpoint(tmp_path_factory.mktemp("checkpoint")))


def run(*arguments: str) -> Result:
    result: Any = CliRunner().invoke(app, list(arguments))
    return result


@pytest.mark.parametrize("method", ["my_method:EveryNth", "every-nth"])
def test_the_command_line_drafts_with_the_example(method: str, checkpoint: str, install: Callable[..., None]) -> None:
    install("every-nth-package", every_nth="my_method:EveryNth")
    options = ("--model", checkpoint, "--max-new-tokens", "24", "--ignore-eos", "--json")
    result = run("generate", *options, "--method", method, "--set", "every=2", "Once")
    assert result.exit_code == 0, result.stderr
    generation = json.loads(result.stdout)
    assert (generation["method"], generation["settings"]["every"]) == ("every-nth", 2)
    assert generation["accepted"] > 0
    plain = run("generate", *options, "--method", "autoregressive", "Once")
    assert generation["token_ids"] == json.loads(plain.stdout)["token_ids"]


def test_a_file_in_the_current_folder_is_enough(modules: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "nearby.py").write_text("from my_method import EveryNth\n")
    with pytest.raises(MethodLoadError, match="there is no module 'nearby'"):
        find_method("nearby:EveryNth")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    assert find_method("nearby:EveryNth").name == "every-nth"
    assert sys.path == before
    monkeypatch.delitem(sys.modules, "nearby")


# The listing


def test_methods_of_entry_points_are_listed(install: Callable[..., None]) -> None:
    install("every-nth-package", every_nth="my_method:EveryNth")
    listed = json.loads(run("methods", "--json").stdout)
    assert listed.keys() - LAB_METHODS == {*METHODS, *COMPOSITIONS, "every-nth"}
    assert [setting["name"] for setting in listed["every-nth"]["settings"]] == ["every", "longest"]
    assert "every-nth: skips every n-th layer" in run("methods").stdout


def test_entry_points_make_methods_of_names(install: Callable[..., None], modules: Path) -> None:
    (modules / "wrapping.py").write_text(
        "from selfspec.methods import find_method\n"
        "from selfspec.methods.api import FixedDrafter, Method, NoDraft\n"
        "class First(Method):\n"
        "    name, summary, source = 'first-of', 'the first of some', 'tests'\n"
        "    def begin(self, prefill): return FixedDrafter(NoDraft())\n"
        "    @classmethod\n"
        "    def named(cls, names): return find_method(names[0])\n"
    )
    install("wrapping-package", "selfspec.compositions", first_of="wrapping:First", cracked="broken:Method")
    assert find_method("first-of(suffix, auto)") is METHODS["suffix"]
    with pytest.raises(UnknownMethodError, match="write its stages in parentheses"):
        find_method("first-of")
    with pytest.raises(UnknownMethodError, match="'first-off' takes no stages; did you mean 'first-of'"):
        find_method("first-off(suffix)")
    with pytest.raises(MethodLoadError, match="importing the method 'broken:Method' failed"):
        find_method("cracked(suffix)")
    result = run("methods", "--json")
    assert json.loads(result.stdout)["first-of"]["summary"] == "the first of some"
    assert (
        result.stderr == "warning: importing the method 'broken:Method' failed: ZeroDivisionError: division by zero\n"
    )


def test_entry_points_that_do_not_load_are_told_beside_the_list(install: Callable[..., None]) -> None:
    install("broken-package", cracked="broken:Method", suffix="fine:Other")
    result = run("methods", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout).keys() - LAB_METHODS == {*METHODS, *COMPOSITIONS}
    cracked, suffix = result.stderr.splitlines()
    assert cracked == ("warning: importing the method 'broken:Method' failed: ZeroDivisionError: division by zero")
    assert suffix == "warning: 'suffix' is a method of selfspec, not fine:Other; give that another name"


# What is wrong


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("nowhere:Method", "there is no module 'nowhere' for the method 'nowhere:Method'; install its package"),
        ("my_method.part:Method", "there is no module 'my_method.part'"),
        ("needy:Method", "importing the method 'needy:Method' failed: .*a_package_that_is_not_there"),
        ("broken:Method", "importing the method 'broken:Method' failed: ZeroDivisionError: division by zero"),
        ("my_method:EvryNth", "the module 'my_method' has no 'EvryNth'"),
        ("incomplete:number", "'incomplete:number' is not a method; give a subclass of"),
        ("incomplete:Drafter", "'incomplete:Drafter' is not a method; give a subclass of"),
        ("incomplete:NoBegin", "is not complete; it does not define begin"),
        ("incomplete:NoName", "does not describe itself; give the class the strings name, summary, source"),
        ("incomplete:BadSettings", "Settings of the method 'incomplete:BadSettings' must be a subclass"),
        (":Method", "does not name a method; write module:Class"),
        ("my_method:", "does not name a method; write module:Class"),
        (".my_method:EveryNth", "does not name a method; write module:Class"),
        (int, "<class 'int'> is not a method"),
        (3, "3 is not a method"),
    ],
)
def test_what_is_no_method_is_refused(method: Any, message: str) -> None:
    with pytest.raises(MethodLoadError, match=message):
        find_method(method)
    with pytest.raises(MethodLoadError, match=message):
        Engine(build("llama"), method=method)


def test_the_command_line_says_it_in_one_line() -> None:
    result = run("generate", "--model", "./no-such-model", "--method", "broken:Method", "Once")
    assert result.exit_code == 2
    assert result.stderr == (
        "error: importing the method 'broken:Method' failed: ZeroDivisionError: division by zero\n"
    )


def test_a_name_of_two_packages_is_refused(install: Callable[..., None]) -> None:
    install("one", every_nth="my_method:EveryNth")
    assert find_method("every-nth").name == "every-nth"
    install("two", every_nth="fine:EveryNth")
    with pytest.raises(
        MethodLoadError, match="fine:EveryNth and my_method:EveryNth are both called 'every-nth'; choose"
    ):
        find_method("every-nth")


def test_an_entry_point_with_another_name_than_its_method_is_refused(install: Callable[..., None]) -> None:
    install("one", mine="my_method:EveryNth")
    with pytest.raises(MethodLoadError, match="'mine' is my_method:EveryNth, whose name is 'every-nth'; give both one"):
        find_method("mine")


def test_a_name_of_this_package_means_its_own_method(install: Callable[..., None]) -> None:
    install("one", suffix="fine:Other")
    assert find_method("suffix") is METHODS["suffix"]


def test_an_unknown_name_suggests_entry_points_too(install: Callable[..., None]) -> None:
    install("one", every_nth="my_method:EveryNth")
    with pytest.raises(UnknownMethodError, match=r"there is no method 'every-nht'; did you mean 'every-nth'\?"):
        find_method("every-nht")


def test_the_example_is_short() -> None:
    assert len((EXAMPLES / "my_method.py").read_text().splitlines()) < 50
