"""The papers' tables as typed: whole, and about methods, models, devices and suites that exist."""

import math
import re
from pathlib import Path

import pytest

from selfspec.errors import InvalidParameterError
from selfspec.methods import find_method
from selfspec_lab.bench.suites import SUITES
from selfspec_lab.papers.claims import PLAIN, Order, claimed_order
from selfspec_lab.papers.columns import choose_columns
from selfspec_lab.papers.tables import FIGURES, Table, find_table, read_tables
from selfspec_lab.roofline import find_device, find_shape

TABLES = read_tables()
ASKED = {"swift-2", "swift-10", "clasp-1", "clasp-1-sampled", "clasp-5", "del-1", "del-3", "knapspec-2", "knapspec-3"}


def test_every_table_of_the_list_is_here() -> None:
    assert set(TABLES) == ASKED
    with pytest.raises(InvalidParameterError, match="did you mean 'clasp-1'"):
        find_table("clasp-11")


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_a_table_is_whole(table: Table) -> None:
    find_device(table.device)
    assert set(table.figures) <= set(FIGURES)
    assert "speedup" in table.figures
    for label, row in table.methods.items():
        find_method(row.method).Settings.parse(label, row.settings)
    for task in table.tasks:
        for suite in task.suites:
            assert set(re.findall(r"(?:^|:)([a-z-]+)(?=:)", suite)) & set(SUITES), suite
    for model in table.models:
        assert len(model.shapes) in (1, len(table.tasks))
        for column in range(len(table.tasks)):
            find_shape(model.shape(column))
        if model.device:
            find_device(model.device)
        for label, cells in model.rows.items():
            assert label in table.methods
            assert len(cells) == len(table.tasks) + 1
            assert all(len(cell) == len(table.figures) for cell in cells[:-1])
            for column in range(len(table.tasks)):
                speedup = table.reported(model, label, column, "speedup")
                assert speedup is not None
                assert 0.5 < speedup < 3
        overall = [table.reported(model, label, -1, "speedup") for label in model.rows]
        means = [
            sum(table.reported(model, label, column, "speedup") or 0 for column in range(len(table.tasks)))
            / len(table.tasks)
            for label in model.rows
        ]
        for reported, mean in zip(overall, means, strict=True):
            assert reported is None or reported == pytest.approx(mean, abs=0.09), "a figure is mistyped"


def test_figures_of_the_papers_are_found() -> None:
    swift = find_table("swift-2")
    assert swift.reported(swift.models[0], "SWIFT", 0, "M") == 4.34
    assert swift.reported(swift.models[2], "SWIFT", -1, "speedup") == 1.48
    assert swift.reported(swift.models[0], "SWIFT", -1, "M") is None
    knapspec = find_table("knapspec-2")
    assert knapspec.reported(knapspec.models[0], "KnapSpec", 3, "acceptance") == 0.944
    assert knapspec.models[0].shape(0) == "Qwen3-32B"
    assert knapspec.models[0].shape(-1) == "Llama-3.1-70B"
    assert swift.nearest(16).name == "LLaMA-2-13B"
    assert swift.nearest(80).name == "LLaMA-2-70B"
    assert find_table("del-1").nearest(36).name in ("LLaMA-2-7B", "LLaMA-3-8B"), "of 32 and 40 layers the smaller one"


def test_the_order_that_a_paper_claims_is_that_on_all_of_its_models() -> None:
    table = find_table("knapspec-2")
    pairs = {(order.first, order.second) for order in claimed_order(table, table.models[0])}
    assert ("KnapSpec", "CLaSp") in pairs
    assert ("KnapSpec", PLAIN) in pairs
    assert (PLAIN, "DEL") in pairs
    assert not {("SWIFT", PLAIN), (PLAIN, "SWIFT")} & pairs, "SWIFT is faster on some models and slower on others"
    table = find_table("swift-2")
    for model, speedup in zip(table.models, (1.41, 1.34, 1.48), strict=True):
        effects = {(order.first, order.second): order.effect for order in claimed_order(table, model)}
        assert effects["SWIFT", PLAIN] == pytest.approx(math.log(speedup)), "the power is that of the figures beside it"
    picture, without = find_table("del-3"), find_table("knapspec-3")
    assert Order("DEL", "DEL-E", None) in claimed_order(picture, picture.models[0])
    assert claimed_order(without, without.models[0]) == [], "a picture without numbers"


def test_texts_come_from_the_folder_the_hub_or_the_user(tmp_path: Path) -> None:
    table = find_table("swift-2")
    with pytest.raises(InvalidParameterError, match="no text of swift-2 is at hand"):
        choose_columns(table, suite=None, data=tmp_path, hub=False)
    (tmp_path / "gsm8k_test.jsonl").write_text("")
    columns, left_out = choose_columns(table, suite=None, data=tmp_path, hub=False)
    assert [(each.task.key, each.index, each.stand_in) for each in columns] == [("gsm8k", 1, False)]
    assert set(left_out) == {"CNN/DM", "TinyStories"}
    columns, left_out = choose_columns(table, suite=None, data=None, hub=True)
    assert all("hub:" in each.spec and not each.stand_in for each in columns)
    assert not left_out
    columns, _ = choose_columns(table, suite="mini", data=None, hub=False)
    assert [each.spec for each in columns] == ["mini"]
    with pytest.raises(InvalidParameterError, match="there is no data folder"):
        choose_columns(table, suite=None, data=tmp_path / "nowhere", hub=False)
