"""What ``selfspec bench run`` measures. No test looks at a time."""

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.models import SUBLAYERS
from measured_runs import LATENCIES, METHODS_TRIED, PEERS, PROMPTS, Watcher, lines, measure, options
from selfspec import METHODS, Engine
from selfspec.errors import InvalidParameterError
from selfspec.runtimes.costs.parts import LatencyProfile
from selfspec_lab.bench import llama_cpp
from selfspec_lab.bench.report.markdown import to_markdown
from selfspec_lab.bench.report.read import read_run
from selfspec_lab.bench.report.summary import summarise
from selfspec_lab.bench.run.measurement import Measurement
from selfspec_lab.bench.run.peers import LLAMA_CPP_PEERS


@pytest.mark.skipif(not llama_cpp.is_installed(), reason="needs llama-cpp-python and gguf")
def test_llama_cpp_writes_every_prompt_too(tmp_path: Path) -> None:
    chosen = options(peers=("all",), methods=("uniform",), settings={}, repeats=1)
    measured = measure(tmp_path / "out", chosen)
    for name in LLAMA_CPP_PEERS:
        mine = [each for each in measured if each.candidate == name]
        assert [each.error for each in mine] == [None] * len(PROMPTS)
        assert all(each.identical is True and each.decode_seconds > 0 and each.prefill_seconds > 0 for each in mine)
    described = json.loads((tmp_path / "out" / "run.json").read_text(encoding="utf-8"))
    assert described["options"]["peers"] == [*PEERS, *LLAMA_CPP_PEERS]
    assert described["stamp"]["versions"]["llama-cpp-python"] == described["llama_cpp"]["version"]
    assert described["llama_cpp"]["system_info"]
    summary = summarise(read_run(tmp_path / "out"))
    assert summary["candidates"]["llama-cpp"]["kind"] == "peer"
    assert summary["plain_over"]["llama-cpp"]["speedup"] > 0
    assert "its own copy of the weights" in to_markdown(summary)
    watcher = Watcher()
    assert measure(tmp_path / "out", chosen, watcher, resume=True) == measured
    assert watcher.seen == []


def test_every_candidate_writes_every_prompt_in_every_repeat(run_folder: Path) -> None:
    measured = lines(run_folder)
    candidates = {"autoregressive", *METHODS_TRIED, *PEERS}
    assert {each.key for each in measured} == {(key, name, r) for key in PROMPTS for name in candidates for r in (0, 1)}
    assert len(measured) == len(candidates) * len(PROMPTS) * 2
    assert [each for each in measured if each.error] == []
    assert all(each.identical is True for each in measured)
    assert all(len(each.token_ids) == 8 and each.decode_seconds > 0 and each.prefill_seconds > 0 for each in measured)
    assert all(each.peak_memory_bytes > 0 and each.prompt_token_count > 20 for each in measured)


def test_lines_have_what_happened_round_by_round(run_folder: Path) -> None:
    for name in METHODS_TRIED:
        rounds = [each.rounds for each in lines(run_folder) if each.candidate == name]
        records = [record for each in rounds if each is not None for record in each]
        assert sum(record.drafted for record in records) > 0
        assert sum(record.accepted for record in records) > 0
        assert any(record.kept is not None for record in records)
    for each in lines(run_folder):
        if each.candidate in PEERS:
            assert each.rounds is None
            assert each.bytes is None
        else:
            assert each.rounds is not None
            assert each.bytes is not None
            assert tuple(t for record in each.rounds for t in record.token_ids) == each.token_ids[1:]
            assert each.bytes.tokens == 7


def test_a_line_comes_back_as_it_was(run_folder: Path) -> None:
    for each in lines(run_folder):
        assert Measurement.from_dict(json.loads(json.dumps(each.to_dict())), SUBLAYERS) == each


def test_the_order_is_drawn_anew_for_every_prompt_and_the_same_in_every_run(run_folder: Path, tmp_path: Path) -> None:
    def orders(measured: list[Measurement]) -> list[list[str]]:
        ordered = sorted(measured, key=lambda each: (each.repeat, each.position, each.turn))
        count = len(METHODS_TRIED) + len(PEERS) + 1
        return [[each.candidate for each in ordered[i : i + count]] for i in range(0, len(ordered), count)]

    found = orders(lines(run_folder))
    assert len({tuple(order) for order in found}) > 3
    assert [each.candidate for each in lines(run_folder)] == [name for order in found for name in order]
    assert orders(measure(tmp_path / "again", options(max_new_tokens=2))) == found


def test_the_folder_says_what_was_measured(run_folder: Path) -> None:
    described = json.loads((run_folder / "run.json").read_text(encoding="utf-8"))
    assert described["options"]["methods"] == list(METHODS_TRIED)
    assert described["options"]["peers"] == list(PEERS)
    assert described["settings"]["layerskip"]["exit_layer"] == 4
    assert described["sublayers"] == SUBLAYERS
    assert described["chat"] is False
    assert described["llama_cpp"] is None
    assert [each["key"] for each in described["prompts"]] == list(PROMPTS)
    assert described["stamp"]["versions"]["torch"]
    assert LatencyProfile.from_dict(described["latencies"]) == LATENCIES


def test_every_repeat_starts_with_methods_that_have_learned_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    begin: Any = METHODS["swift"].begin

    def noted(method: Any, prefill: Any) -> Any:
        begun.append(id(method))
        keep.append(method)
        return begin(method, prefill)

    keep: list[Any] = []
    monkeypatch.setattr(METHODS["swift"], "begin", noted)
    measure(tmp_path / "out", options(peers=("none",), methods=("swift",), settings={}))
    warm_up, *rest = begun
    assert rest == [rest[0]] * 3 + [rest[3]] * 3
    assert len({warm_up, rest[0], rest[3]}) == 3


def test_sampling_with_one_seed_gives_every_method_the_plain_text(run_folder: Path, tmp_path: Path) -> None:
    measured = measure(tmp_path / "out", options(temperature=1.0, repeats=1, seed=5))
    greedy = {each.prompt: each.token_ids for each in lines(run_folder)}
    ours = [each for each in measured if each.candidate not in PEERS]
    assert all(each.identical is True for each in ours)
    assert any(each.token_ids != greedy[each.prompt] for each in ours)
    for name in METHODS_TRIED:
        rounds = [record for each in ours if each.candidate == name for record in each.rounds or ()]
        assert sum(record.drafted for record in rounds) > 0
        assert sum(record.accepted for record in rounds) > 0
    theirs = [each for each in measured if each.candidate in PEERS]
    assert all(each.identical is None and each.error is None for each in theirs)


def test_a_method_that_writes_other_tokens_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Engine.generate

    def wrong(engine: Engine, *arguments: Any, **changes: Any) -> Any:
        result = original(engine, *arguments, **changes)
        if engine.method.name == "uniform":
            object.__setattr__(result, "token_ids", (*result.token_ids[:-1], result.token_ids[-1] ^ 1))
        return result

    monkeypatch.setattr(Engine, "generate", wrong)
    measured = measure(tmp_path / "out", options(peers=("none",), repeats=1))
    assert {each.candidate for each in measured if each.identical is False} == {"uniform"}
    assert {each.candidate for each in measured if each.identical} == {"autoregressive", "layerskip", "swift"}


def test_speculative_sampling_writes_another_text_in_each_repeat(tmp_path: Path) -> None:
    chosen = options(peers=("transformers",), temperature=1.0, top_p=0.95, sampling="speculative", seed=5)
    measured = measure(tmp_path / "out", chosen)
    assert [each.error for each in measured] == [None] * len(measured)
    assert all(each.identical is None for each in measured)
    described = json.loads((tmp_path / "out" / "run.json").read_text(encoding="utf-8"))
    assert (described["options"]["top_p"], described["options"]["sampling"]) == (0.95, "speculative")
    for name in METHODS_TRIED:
        own = [each for each in measured if each.candidate == name]
        records = [record for each in own for record in each.rounds or ()]
        assert sum(record.drafted for record in records) > 0
        assert sum(record.accepted for record in records) > 0
        texts = {repeat: [each.token_ids for each in own if each.repeat == repeat] for repeat in (0, 1)}
        assert texts[0] != texts[1]
    assert "temperature 1, top-p 0.95, speculative, seed 5" in to_markdown(summarise(read_run(tmp_path / "out")))


def test_presets_are_measured_beside_their_methods(tmp_path: Path) -> None:
    names = ("del", "paper(del)", "paper(del, authors)")
    measured = measure(tmp_path / "out", options(methods=names, settings={}, peers=("none",), repeats=1))
    assert {each.candidate for each in measured} == {"autoregressive", *names}
    assert all(each.error is None and each.identical for each in measured)
    described = json.loads((tmp_path / "out" / "run.json").read_text(encoding="utf-8"))
    assert described["settings"]["paper(del)"]["drop_unsure"] is True
    assert described["settings"]["paper(del, authors)"]["keep_prompt"] is True
    rounds = [record for each in measured if each.candidate == "paper(del)" for record in each.rounds or ()]
    assert sum(record.accepted for record in rounds) > 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sampling": "speculative"}, "temperature above 0"),
        ({"top_p": 0.9}, "temperature above 0"),
        ({"top_p": 0.0, "temperature": 1.0}, "top_p must be above 0"),
        ({"sampling": "greedy", "temperature": 1.0}, "sampling is coupled or speculative"),
    ],
)
def test_sampling_that_does_not_fit_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidParameterError, match=said):
        options(**changes)
