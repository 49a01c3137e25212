"""The tables of ``benchmarks/pages.py``, by small results: each cell is the number of its key."""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
STEP = {"ratio": 0.5, "lowest": 0.4, "highest": 0.6, "milliseconds": 2.5}
DRAFT = {"acceptance": 0.8, "tokens_per_round": 3.4, "speedup": 1.5, "speedup_spread": [1.2, 2.1]}
OVERALL = {"speedup": 1.5, "speedup_interval": [1.25, 1.75], "acceptance_rate": 0.5, "mean_generated_length": 2.5}
OPTIONS = {"options": {"model": "tiny", "widen": 8}}


@pytest.fixture
def tables(benchmarks: Callable[[str], ModuleType]) -> ModuleType:
    return benchmarks("page_figures.tables")


def cells(table: str) -> list[list[str]]:
    """The rows below the head."""
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in table.splitlines() if line[:1] == "|"][2:]


@pytest.mark.parametrize(
    ("name", "result", "rows"),
    [
        ("llama_bits", {"model": "tiny", "steps": {"4 bits": STEP}}, [["4 bits", "0.50 (0.40 to 0.60), 2.5 ms"]]),
        ("draft_precisions", {**OPTIONS, "drafts": {"mixed": DRAFT}}, [["mixed", "0.80, 3.40, 1.50 (1.20 to 2.10)"]]),
        (
            "overhead",
            {
                **OPTIONS,
                "plain": {"tokens_per_second": 158.7, "bandwidth_fraction": 0.95},
                "llama_cpp": None,
                "transformers": {"plain_speedup": 3.65},
            },
            [
                ["tokens/s", "159"],
                ["÷ llama.cpp", ""],
                ["÷ transformers' `generate`", "3.65"],
                ["÷ copy bandwidth", "0.95"],
            ],
        ),
        (
            "batches",
            {
                "batches": {
                    "suffix": {
                        "1": {"tokens_per_second": 74.1, "tokens_per_second_spread": [70.2, 80.4]},
                        "4": {"tokens_per_second": 130.2, "tokens_per_second_spread": [99.8, 131.0]},
                    }
                }
            },
            [["`suffix`", "74 (70 to 80)", "130 (100 to 131)"]],
        ),
        (
            "adversaries",
            {"adversaries": {"never right": {"ratios": [0.99, 1.2], "median": 1.1, "drafted": 1400, "accepted": 7}}},
            [["never right", "7 of 1,400", "1.10 (0.99 to 1.20)"]],
        ),
        (
            "host_time",
            {"host": {"suffix": {"verify-verify": {"median_ms": 0.28}, "forward": {"median_ms": 0.3}}}},
            [["`suffix`", "verify-verify 0.280", "0.30"]],
        ),
        (
            "categories",
            {
                "candidates": {
                    "autoregressive": {"kind": "baseline", "categories": {"qa": {"speedup": 1.0}}},
                    "auto": {"kind": "method", "categories": {"qa": {"speedup": 1.53}}},
                }
            },
            [["`auto`", "1.53"]],
        ),
        (
            "candidates",
            {"candidates": {"auto": {"overall": OVERALL}}},
            [["`auto`", "1.50 (1.25 to 1.75)", "0.50", "2.50"]],
        ),
        (
            "load",
            {
                "draft_bits": "4",
                "table": {"known": {"0.8": [{"load": 1, "speedup": 3.6}, {"load": 4, "speedup": 2.0}]}},
                "points": [{"load": 4, "speedup": 0.9}],
            },
            [["known tokens", "3.6", "2.0"], ["measured", "", "0.9"]],
        ),
    ],
)
def test_a_table(name: str, result: Any, rows: list[list[str]], tables: ModuleType) -> None:
    assert cells(getattr(tables, name)({"a": result})) == rows


def test_the_soak_counts_what_went_wrong(tables: ModuleType) -> None:
    statuses = {"200": 1000, "429": 3, "500": 1, "503": 2}
    result = {
        "requests": 2000,
        "statuses": statuses,
        "wrong": {"mixed": 4},
        "memory_growth": 0.0069,
        "left": {"a": 1.0},
    }
    assert [row[1] for row in cells(tables.soak({"a": result}))] == [
        "2,000, of which 1,000 were answered by status 200",
        "4",
        "3",
        "3",
        "+0.69 %",
        "1",
    ]


def test_the_attack_that_delays_others_longest_is_named(tables: ModuleType) -> None:
    samples = [{"attack": "one", "health": 0.05, "gap": 0.3}, {"attack": "two", "health": 0.06, "gap": 0.1}]
    assert cells(tables.attacks({"a": {"samples": samples}})) == [
        ["`/health` answers", "55", "60 (two)"],
        ["a stream waits for a piece", "200", "300 (one)"],
    ]


def test_a_replica_is_expected_to_gain_by_its_share_of_the_clients(
    tables: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, auto = {"selfspec": 100.0, "selfspec-ray-2": 80.0}, {"selfspec": 150.0, "selfspec-ray-2": 100.0}
    speeds = {f"{name}:autoregressive": speed for name, speed in plain.items()}
    speeds |= {f"{name}:auto": speed for name, speed in auto.items()} | {"selfspec-ray:auto": 120.0}
    samples = [
        {"server": server, "clients": clients, "tokens_per_second": speed * clients * factor}
        for server, speed in speeds.items()
        for clients in (1, 8)
        for factor in (0.9, 1.0, 1.5)
    ]
    plot = [{"load": load, "speedup": speedup} for load, speedup in ((1, 1.4), (2, 1.3), (4, 1.1), (8, 1.0))]
    monkeypatch.setattr(tables, "read", lambda _: {"table": {"low-bit": {"0.8": plot}}})
    assert cells(tables.load_of_replicas({"a": {"samples": samples}})) == [
        ["tokens/s: one process, plain", "100", "800"],
        ["tokens/s: one process, `auto`", "150", "1200"],
        ["tokens/s: Ray, one replica, `auto`", "120", "960"],
        ["tokens/s: Ray, two replicas, plain", "80", "640"],
        ["tokens/s: Ray, two replicas, `auto`", "100", "800"],
        ["`auto` ÷ plain: one process", "1.50", "1.50"],
        ["expected", "1.40", "1.00"],
        ["`auto` ÷ plain: two replicas", "1.25", "1.25"],
        ["expected", "1.40", "1.10"],
    ]


def test_exported_drafts_have_the_speedup_of_their_bytes(tables: ModuleType) -> None:
    exports = [{"command": "--method clasp", "kept_layers": [0, 1], "layers": 4, "acceptance": 0.5, "read": 0.25}]
    table = importlib.import_module("exported_drafts").table({"exports": exports})
    assert cells(table) == [["`--method clasp`", "2 of 4", "0.50", "0.25", "1.20 (`k` = 1)"]]


def test_a_block_without_results_names_the_command(tables: ModuleType) -> None:
    blocks = importlib.import_module("page_figures.blocks")
    block = blocks.Block(("no-such-file",), "python benchmarks/rows.py", tables.batches)
    assert block.render("results") == "*Not measured with this version: `python benchmarks/rows.py`.*"
    page = "<!-- benchmarks/pages.py writes this: no such block -->\n<!-- up to here -->"
    with pytest.raises(KeyError, match="no such block"):
        blocks.write_blocks(page, "results")
