"""The frame of the experiments: verdicts, results in a folder, the page made of them, the command."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from typer.testing import CliRunner

from helpers.checkpoints import save_checkpoint
from selfspec.cli.command_line import app
from selfspec.errors import InvalidParameterError
from selfspec_lab.checks import Check, shown
from selfspec_lab.experiments import EXPERIMENTS, base, find_experiment
from selfspec_lab.experiments.base import Data, Experiment
from selfspec_lab.experiments.document import render_document
from selfspec_lab.experiments.lab import Lab
from selfspec_lab.experiments.store import find_kept, read_folders, run_experiment, save_result

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Growth(Experiment):
    """Numbers grow."""

    number, name, claim, source, method = 1, "growth", "Numbers | grow.", "A Paper (fig. 1)", "Three of them."
    unfit: ClassVar[dict[str, str]] = {"another": "it counts backwards"}

    def measure(self, lab: Lab) -> Data:
        return {"numbers": [1, 2, 5 if lab.quick else 7]}

    def judge(self, data: Data) -> Sequence[Check]:
        numbers = data["numbers"]
        return [
            Check("the last is above the first", "holds", f"{numbers[-1]} against {numbers[0]}"),
            Check("it is above six", "holds" if numbers[-1] > 6 else "undecided", str(numbers[-1])),
            shown("two is two", True, "2"),
        ]

    def draw(self, data: Data) -> "Figure":
        from matplotlib.figure import Figure

        figure = Figure(figsize=(3, 2))
        figure.subplots().plot(data["numbers"])
        return figure


class Broken(Growth):
    """Fails."""

    number, name = 2, "broken"

    def measure(self, lab: Lab) -> Data:
        raise RuntimeError("no luck")


@pytest.fixture
def only_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (
        base,
        "selfspec_lab.experiments.store",
        "selfspec_lab.experiments.document",
        "selfspec_lab.experiments",
    ):
        found = {"growth": Growth, "broken": Broken}
        if isinstance(module, str):
            monkeypatch.setattr(f"{module}.EXPERIMENTS", found)
        else:
            monkeypatch.setattr(module, "EXPERIMENTS", found)


@pytest.mark.usefixtures("only_ours")
def test_results_are_kept_judged_anew_and_documented(tmp_path: Path) -> None:
    growth = Growth()
    result = run_experiment(growth, Lab(quick=True))
    assert result["status"] == "undecided"
    assert [check["status"] for check in result["checks"]] == ["holds", "undecided", "holds"]
    path, picture = save_result(growth, result, tmp_path / "new")
    assert picture.read_bytes().startswith(b"\x89PNG")
    stored = json.loads(path.read_text(encoding="utf-8"))
    assert stored == result
    assert 0 <= stored["seconds"] < 60
    stored["data"]["numbers"], stored["seconds"] = [1, 2, 9], 540
    path.write_text(json.dumps(stored), encoding="utf-8")
    folders = read_folders(tmp_path / "new")
    assert folders[tmp_path / "new"]["growth"]["status"] == "holds"
    page = render_document(folders, tmp_path / "docs" / "page.md")
    assert "| 1 | [growth](#1-growth) | A Paper (fig. 1) | **holds** (2 holds) |" in page
    assert "| the last is above the first | holds | 9 against 1 |" in page
    assert "| two is two | holds, not counted | 2 |" in page
    assert "(../new/growth.png)" in page
    assert "quick, seed 0" in page
    assert page.count(", 9 minutes.*") == 1, "how long it took"
    assert "| | time of all | | 0.1 hours |" in page
    path.write_text(json.dumps({**stored, "model": "another"}), encoding="utf-8")
    unfit = read_folders(tmp_path / "new")
    assert unfit[tmp_path / "new"]["growth"]["status"] == "not applicable"
    assert "it counts backwards" in render_document(unfit, tmp_path / "docs" / "page.md")


def test_rounds_are_a_line_each_in_a_result(tmp_path: Path) -> None:
    """A result has ten thousands of them; what is in a text stays as it is."""
    data = {"numbers": [1, 2, 3], "rounds": [[0.5, None, 2], [0.25, 1, 3], []], "texts": ["[\n 1,\n 2 ]", "[ a,  b ]"]}
    path, _ = save_result(Growth(), {"data": data}, tmp_path)
    text = path.read_text(encoding="utf-8")
    assert json.loads(text) == {"data": data}
    assert "   [ 0.5, null, 2 ],\n   [ 0.25, 1, 3 ],\n" in text


@pytest.mark.usefixtures("only_ours")
def test_a_page_has_a_column_for_each_folder_of_results(tmp_path: Path) -> None:
    growth = Growth()
    result = run_experiment(growth, Lab(quick=True))
    untimed = {name: value for name, value in result.items() if name != "seconds"}
    for model, measured in (("one", untimed), ("folder/other.gguf", {**result, "seconds": 7200})):
        save_result(growth, {**measured, "model": model}, tmp_path / "results" / Path(model).stem)
    (tmp_path / "results" / "empty").mkdir()
    page = render_document(read_folders(tmp_path / "results"), tmp_path / "page.md")
    assert "| | claim | source | one | other.gguf |" in page
    assert "| | time of all | | – | 2.0 hours |" in page
    assert page.count("## 1. growth") == 1, "the claim once"
    assert "**one: undecided.**" in page
    assert "(results/other/growth.png)" in page


@pytest.mark.usefixtures("only_ours")
def test_a_run_goes_on_after_what_it_has_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab, growth = Lab(quick=True), Growth()
    assert find_kept(growth, lab, tmp_path) is None
    result = run_experiment(growth, lab)
    clean = {**result, "stamp": {**result["stamp"], "dirty": False}}
    monkeypatch.setattr("selfspec_lab.experiments.store.make_stamp", lambda _: clean["stamp"])
    save_result(growth, clean, tmp_path)
    kept = find_kept(growth, lab, tmp_path)
    assert kept is not None
    assert kept["data"] == clean["data"]
    for other in (Lab(), Lab(quick=True, seed=1), Lab("another", quick=True)):
        assert find_kept(growth, other, tmp_path) is None
    ran: list[str] = []
    monkeypatch.setattr(Growth, "measure", lambda *_: ran.append("growth"))
    arguments = ["experiments", "run", "growth", "--quick", "--dirty", "--out", str(tmp_path)]
    again: Any = CliRunner().invoke(app, arguments)
    assert again.exit_code == 0, again.output
    assert not ran
    assert "measured already" in again.output
    save_result(growth, {**clean, "stamp": {**clean["stamp"], "dirty": True}}, tmp_path)
    assert find_kept(growth, lab, tmp_path) is None, "it was measured with changes"
    (tmp_path / "growth.json").write_text(json.dumps({**clean, "stamp": {"commit": "older"}, "data": {}}))
    assert find_kept(growth, lab, tmp_path) is None, "data of another form are measured again"
    save_result(growth, clean, tmp_path)
    for change in ({"dirty": True}, {"commit": "another"}, {"threads": 99}):
        monkeypatch.setattr(
            "selfspec_lab.experiments.store.make_stamp", lambda _, now=change: {**clean["stamp"], **now}
        )
        assert find_kept(growth, lab, tmp_path) is None


@pytest.mark.usefixtures("only_ours")
@pytest.mark.parametrize("content", ["", "[1]", "{}", '{"data": {}}'])
def test_what_is_no_result_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(InvalidParameterError, match="there are no results of experiments"):
        read_folders(tmp_path)
    (tmp_path / "growth.json").write_text(content)
    with pytest.raises(InvalidParameterError, match=r"growth\.json' is not the result"):
        read_folders(tmp_path)


@pytest.mark.usefixtures("only_ours")
def test_the_command_prints_verdicts_and_goes_on_after_a_failure(tmp_path: Path) -> None:
    result: Any = CliRunner().invoke(app, ["experiments", "run", "broken,growth", "--out", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert "2. broken: FAILED, RuntimeError: no luck" in result.output
    assert "1. growth: HOLDS" in result.output
    assert "holds: the last is above the first: 7 against 1" in result.output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["growth.json", "growth.png"]
    page = tmp_path / "page.md"
    written: Any = CliRunner().invoke(app, ["experiments", "document", str(tmp_path / "out"), str(page)])
    assert written.exit_code == 0, written.output
    assert page.read_text(encoding="utf-8").startswith("# The papers' claims")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "swift-machness"), "did you mean 'swift-matchness'?"),
        (("run", "all", "--device", "gpu"), "device 'gpu' cannot be used"),
        (("run", "all", "--model", "./nowhere"), "there is no model './nowhere'"),
        (("run", "all", "--out", "file.txt"), "is a file; name a folder"),
        (("document", ".", "page.md"), "there are no results of experiments"),
    ],
)
def test_mistakes_are_found_before_anything_is_measured(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def load(*_: Any, **__: Any) -> Any:
        raise AssertionError("loaded a model")

    monkeypatch.setattr("selfspec_lab.experiments.lab.load_model", load)
    monkeypatch.chdir(tmp_path)
    Path("file.txt").write_text("x")
    result: Any = CliRunner().invoke(app, ["experiments", *arguments])
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert result.output.count("\n") == 1


def test_there_is_one_experiment_for_each_of_the_nine_claims() -> None:
    assert {experiment.number: name for name, experiment in EXPERIMENTS.items()} == {
        1: "swift-matchness",
        2: "adaptation",
        3: "swift-ablation",
        4: "clasp-program",
        5: "clasp-interval",
        6: "del-static",
        7: "knapspec-context",
        8: "cosine-bound",
        9: "del-untrained",
    }
    assert [experiment.number for experiment in EXPERIMENTS.values()] == list(range(1, 10)), "in this order"
    for name, experiment in EXPERIMENTS.items():
        assert find_experiment(name) is experiment
        assert experiment.claim.endswith(".")
        assert experiment.source
        assert experiment.method.endswith(".")
    listed: Any = CliRunner().invoke(app, ["experiments", "list"])
    assert all(name in listed.output for name in EXPERIMENTS)


def test_speeds_are_taken_side_by_side(tmp_path: Path) -> None:
    lab = Lab(str(save_checkpoint(tmp_path)), device="cpu")
    engines = lab.engines("tiny", {"plain": ("autoregressive", {}), "uniform": ("uniform", {})})
    assert engines["plain"].target is engines["uniform"].target
    before: list[int] = []
    speeds = lab.measure_speeds(
        engines, ["def f(x):", "Once upon"], max_new_tokens=8, repeats=3, before_repeat=lambda: before.append(1)
    )
    assert len(before) == 3
    for speed in speeds.values():
        assert len(speed.samples) == 3
        assert [len(each.token_ids) for each in speed.generations] == [8, 8]
    assert speeds["plain"].over(speeds["plain"]) == 1.0
    described = speeds["uniform"].to_dict(speeds["plain"])
    assert described["acceptance_rate"] > 0
    assert described["mean_generated_length"] > 1
    assert described["speedup"] == speeds["uniform"].over(speeds["plain"])
    assert speeds["plain"].to_dict()["acceptance_rate"] == 0.0


def test_only_bundled_checkpoints_are_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[tuple[str, int]] = []

    def load(name: str, *, widen: int, **_: object) -> tuple[str, str]:
        loaded.append((name, widen))
        return name, "tokenizer"

    monkeypatch.setattr("selfspec_lab.experiments.lab.load_model", load)
    Lab().load("tiny", widen=4)
    Lab(model="another").load("tiny", widen=4)
    assert loaded == [("tiny", 4), ("another", 1)]
