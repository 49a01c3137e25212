"""The demo: its arithmetic, its verdict and its table, on a tiny random model."""

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from checkpoints import make_tokenizer
from models import build
from selfspec import METHODS, Engine, SamplingParams, demo
from selfspec.prompts import PROMPTS
from selfspec.types import Generation, PhaseSeconds, Round

PARAMS = SamplingParams(max_new_tokens=6)


def output(token_ids: tuple[int, ...], *, seconds: float, records: tuple[Round, ...] = ()) -> Generation:
    return Generation("", token_ids, (), 3, "any", {}, "length", seconds + 1.0, 1.0, records, 0)


def played(drafted: int, accepted: int) -> Round:
    return Round(drafted, drafted, accepted, (0,) * (accepted + 1), None, None, PhaseSeconds())


def test_measure_adds_up_all_prompts() -> None:
    plain = [output((1, 2, 3), seconds=2.0), output((4, 5), seconds=1.0)]
    drafted = [
        output((1, 2, 3), seconds=0.5, records=(played(4, 1),)),
        output((4, 5), seconds=0.25, records=(played(2, 0),)),
    ]
    wrong = [plain[0], output((4, 6), seconds=1.0)]
    results = demo.measure("tiny", "math", {"autoregressive": plain, "layerskip": drafted, "wrong": wrong})
    assert [result.tokens_per_second for result in results] == [1.0, 4.0, 1.0]
    assert [result.speedup for result in results] == [1.0, 4.0, 1.0]
    assert [result.acceptance_rate for result in results] == [None, 1 / 6, None]
    assert results[1].mean_generated_length == 1.5
    assert [result.identical for result in results] == [True, True, False]


@pytest.fixture
def console(monkeypatch: pytest.MonkeyPatch) -> Console:
    """A narrow console, with a tiny random model in the place of the bundled ones."""
    monkeypatch.setattr(demo, "load_model", lambda *_, **__: (build("llama"), make_tokenizer()))
    monkeypatch.setattr(demo, "EXIT_LAYER", 2)
    return Console(file=io.StringIO(), width=100)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_demo_shows_every_checkpoint_domain_and_method(console: Console) -> None:
    assert demo.run_demo(console, max_new_tokens=6, device="cpu")
    table = printed(console).splitlines()[-150:]
    rows = [line.split() for line in table if line.split()[-1:] == ["yes"]]
    assert {tuple(row[:3]) for row in rows} == {
        (checkpoint, domain, method) for checkpoint in demo.BUNDLED for domain in PROMPTS for method in METHODS
    }
    for prompts in PROMPTS.values():
        assert prompts[0].split("\n")[0][:60] in printed(console)


def test_demo_says_when_a_method_writes_something_else(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = Engine.generate

    def altered(self: Engine, *arguments: Any, **changes: Any) -> Generation:
        result = generate(self, *arguments, **changes)
        return replace(result, token_ids=(*result.token_ids, 0)) if self.method.name == "uniform" else result

    monkeypatch.setattr(Engine, "generate", altered)
    assert not demo.run_demo(console, max_new_tokens=2, device="cpu")
    assert all(line.split()[-1] == "no" for line in printed(console).splitlines() if "uniform  " in line)


def test_plain_decoding_takes_turns_with_the_methods() -> None:
    order: list[str] = []

    class Recorded(Engine):
        def generate(self, *arguments: Any, **changes: Any) -> Generation:
            order.append(self.method.name)
            return super().generate(*arguments, **changes)

    engines: Any = {name: Recorded(build("llama"), make_tokenizer(), name) for name in ("autoregressive", "uniform")}
    demo.generate_interleaved(engines, ["one", "two"], PARAMS)
    warm_up, first, second = order[:2], order[2:4], order[4:]
    assert sorted(warm_up) == ["autoregressive", "uniform"]
    assert first == second[::-1] == ["autoregressive", "uniform"]


def test_table_fits_100_columns() -> None:
    row = demo.Measurement("tiny-early-exit", "prose", "self-speculative", 12345.6, 12.34, 0.99, 12.34, True)
    console = Console(file=io.StringIO(), width=100)
    console.print(demo.make_table([row, replace(row, domain="math", identical=False)]))
    text = printed(console)
    assert "…" not in text
    assert all(cell in text for cell in ("tiny-early-exit", "self-speculative", "12345.6", "12.34x", "yes", "no"))
    assert max(map(len, text.splitlines())) <= 100
