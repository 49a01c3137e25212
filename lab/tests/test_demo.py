"""The demonstration: its scenes, its arithmetic, its verdict and its table, on tiny random models."""

import copy
import io
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console

from helpers.checkpoints import CHAT_TEMPLATE, make_tokenizer
from helpers.models import build
from selfspec import Engine
from selfspec.errors import ModelLoadError
from selfspec.types import Generation, PhaseSeconds, Round
from selfspec_lab import demo
from selfspec_lab.bench.benchmark import Outcome, Sample
from selfspec_lab.demo import PLAIN, TRANSFORMERS
from selfspec_lab.prompts import CHAT_PROMPTS


def sample(token_ids: tuple[int, ...], seconds: float, records: tuple[Round, ...] = ()) -> Sample:
    generation = Generation("", token_ids, (), 3, "any", {}, "length", seconds + 1.0, 1.0, records, 0)
    return Sample(token_ids, seconds, 0, generation)


def played(drafted: int, accepted: int) -> Round:
    return Round(drafted, drafted, accepted, (0,) * (accepted + 1), None, None, PhaseSeconds())


def test_results_are_medians_over_prompts_and_repeats() -> None:
    plain = [[sample((1, 2, 3), 2.0), sample((4, 5), 1.0)], [sample((1, 2, 3), 1.0), sample((4, 5), 1.0)]]
    drafted = [
        [sample((1, 2, 3), 0.5, (played(4, 1),)), sample((4, 5), 0.25, (played(2, 0),))],
        [sample((1, 2, 3), 0.5, (played(4, 1),)), sample((4, 5), 0.5, (played(2, 0),))],
    ]
    wrong = [[plain[0][0], sample((4, 6), 1.0)], plain[1]]
    first, second, third = demo.summarise("tiny", Outcome({PLAIN: plain, "drafted": drafted, "wrong": wrong}))
    assert (first.tokens_per_second, first.speedup, first.acceptance_rate) == (1.0, 1.0, None)
    assert (second.tokens_per_second, second.speedup, second.spread) == (4.0, 3.0, (2.0, 4.0))
    assert second.acceptance_rate == 2 / 12
    assert [(result.identical, result.outputs) for result in (first, second, third)] == [(4, 4), (4, 4), (3, 4)]


def test_a_failure_is_no_result() -> None:
    with pytest.raises(ModelLoadError, match="drafted failed on tiny: out of luck"):
        demo.summarise("tiny", Outcome({PLAIN: []}, {"drafted": "out of luck"}))


@pytest.fixture
def console(monkeypatch: pytest.MonkeyPatch) -> Console:
    """A narrow console, with a tiny random model in the place of the real ones."""
    tokenizer = make_tokenizer(chat_template=CHAT_TEMPLATE)
    monkeypatch.setattr(demo, "load_model", lambda *_, **__: (build("llama"), tokenizer))
    monkeypatch.setattr(demo, "EXIT_LAYER", 2)
    monkeypatch.setattr(demo, "REPEATS", 1)
    monkeypatch.setattr(demo, "BUNDLED", tuple(replace(scene, methods=_shallow(scene)) for scene in demo.BUNDLED))
    monkeypatch.setattr(demo, "find_installed", lambda _: "somewhere")
    return Console(file=io.StringIO(), width=100)


def _shallow(scene: demo.Scene) -> dict[str, Any]:
    return {name: {"exit_layer": 2} if "exit_layer" in values else values for name, values in scene.methods.items()}


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_every_scene_is_shown_and_every_method_is_in_the_table(
    console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "REPEATS", 2)
    assert demo.run_demo(console, max_new_tokens=8, device="cpu")
    scenes = (demo.REAL, *demo.BUNDLED)
    cells = [line.split() for line in printed(console).splitlines() if " of " in line and "x " in line]
    rows = {(row[0], row[1]): row for row in cells}
    for scene in scenes:
        for name in (PLAIN, *scene.methods):
            outputs = demo.REPEATS * len(scene.prompts)
            assert rows[scene.model, name][-3:] == [str(outputs), "of", str(outputs)]
        assert (scene.model, TRANSFORMERS) in rows
        assert all(text.split("\n")[0][:60] in printed(console) for text in scene.prompts.values())
    assert rows["smollm2", "suffix"][-4] != "-"


def test_the_real_model_is_asked_as_a_chat(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    stream = Engine.stream
    monkeypatch.setattr(
        Engine,
        "stream",
        lambda self, prompt, *rest, **more: asked.append(prompt) or stream(self, prompt, *rest, **more),
    )
    demo.play(console, demo.REAL, 4, "cpu")
    questions = ("question", "code", "summary")
    assert [messages for messages in asked if isinstance(messages[0], dict)] == [
        [{"role": "user", "content": CHAT_PROMPTS[name]}] for name in questions
    ]


def test_without_the_real_model_it_says_so_and_goes_on(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "find_installed", lambda _: None)
    assert demo.run_demo(console, max_new_tokens=4, device="cpu")
    assert "selfspec models install smollm2" in printed(console)
    assert "smollm2, question" not in printed(console)
    assert "tiny-early-exit, math" in printed(console)


def test_it_says_when_a_method_writes_something_else(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = Engine.generate

    def altered(self: Engine, *arguments: Any, **changes: Any) -> Any:
        result: Any = generate(self, *arguments, **changes)
        return replace(result, token_ids=(*result.token_ids, 0)) if self.method.name == "uniform" else result

    monkeypatch.setattr(Engine, "generate", altered)
    assert not demo.run_demo(console, max_new_tokens=2, device="cpu")
    assert "0 of 3" in next(line for line in printed(console).splitlines() if " uniform " in line)


def test_transformers_may_differ(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    timed = demo.generate_timed

    def altered(*arguments: Any, **options: Any) -> Any:
        output = timed(*arguments, **options)
        return replace(output, token_ids=(*output.token_ids, 0))

    monkeypatch.setattr(demo, "generate_timed", altered)
    assert demo.run_demo(console, max_new_tokens=2, device="cpu")


def test_bfloat16_is_kept_only_where_it_is_exact(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    for exact, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        model = copy.deepcopy(build("llama")).to(torch.bfloat16)
        monkeypatch.setattr(demo, "load_model", lambda *_, model=model, **__: (model, make_tokenizer()))
        monkeypatch.setattr(demo, "verifies_exactly", lambda _, exact=exact: exact)
        plain, engines = demo.make_engines(demo.BUNDLED[1], "cpu")
        assert {engine.target.dtype for engine in (plain, *engines.values())} == {dtype}


def test_table_fits_100_columns() -> None:
    row = demo.Result("tiny-early-exit", TRANSFORMERS, 12345.6, 12.34, (10.01, 14.99), 0.99, 6, 6)
    console = Console(file=io.StringIO(), width=100)
    console.print(demo.make_table([row, replace(row, model="tiny", candidate="prompt-lookup", identical=5)]))
    text = printed(console)
    assert "…" not in text
    assert all(cell in text for cell in ("tiny-early-exit", TRANSFORMERS, "12345.6", "12.34x", "6 of 6", "5 of 6"))
    assert max(map(len, text.splitlines())) <= 100
