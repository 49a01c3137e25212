"""``selfspec bench run``: what it measures, keeps, resumes and refuses. Nothing here looks at a time."""

import errno
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from checkpoints import CHAT_TEMPLATE, make_tokenizer, save_checkpoint
from models import LAYERS, SUBLAYERS, build, prompt
from selfspec import METHODS, Engine
from selfspec.cli.app import app
from selfspec.errors import InvalidParameterError, UnsupportedModelError
from selfspec.loading import bundled_models, load_model
from selfspec.runtimes.latency import LatencyProfile
from selfspec.types import SamplingParams
from selfspec_lab.bench import llama_cpp
from selfspec_lab.bench.report import write_report
from selfspec_lab.bench.report.leaderboard import read_summaries
from selfspec_lab.bench.run import folder as run_folder
from selfspec_lab.bench.run.chat import decide_chat, marks_turns
from selfspec_lab.bench.run.folder import RunFolder
from selfspec_lab.bench.run.measurement import Measurement
from selfspec_lab.bench.run.options import RunOptions
from selfspec_lab.bench.run.peers import LLAMA_CPP_PEERS, TRANSFORMERS_PEERS
from selfspec_lab.bench.run.prompts import answer_suite
from selfspec_lab.bench.run.runner import Run
from selfspec_lab.bench.suites.types import Question, Suite
from selfspec_lab.cli.bench_progress import RunningSpeedups

PEERS = tuple(TRANSFORMERS_PEERS)
METHODS_TRIED = ("uniform", "layerskip", "swift")
SUITE = Suite(
    "two",
    (
        Question("a-1", "a", ("def f(x):\n    return x",)),
        Question("b-1", "b", ("Once upon a time there was", "And then?")),
    ),
    ordered=False,
    chat=False,
)
SHORT = SamplingParams(max_new_tokens=4)
PROMPTS = ("a-1", "b-1/1", "b-1/2")
LATENCIES = LatencyProfile("cpu", "float32", LAYERS, 1e-9, 1e-6, 1e-6, 1e-6, 1e-7)


@pytest.fixture(autouse=True)
def _no_measuring_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfspec_lab.bench.memory._CPU_COPY_BYTES", 2**16)
    monkeypatch.setattr("selfspec_lab.bench.run.runner.kept_profile", lambda *_: {"latencies": LATENCIES.to_dict()})


class Watcher:
    """An observer that remembers, and interrupts after some measurements if it is told to."""

    def __init__(self, interrupt_after: int | None = None) -> None:
        self.seen: list[Measurement] = []
        self.total = self.done = 0
        self._interrupt_after = interrupt_after

    def stage(self, text: str) -> None:
        pass

    def begin(self, total: int, done: int) -> None:
        self.total, self.done = total, done

    def measured(self, measurement: Measurement) -> None:
        self.seen.append(measurement)
        if len(self.seen) == self._interrupt_after:
            raise KeyboardInterrupt


def options(**changes: Any) -> RunOptions:
    chosen: dict[str, Any] = {
        "methods": METHODS_TRIED,
        "peers": PEERS,
        "dtype": "float32",
        "device": "cpu",
        "repeats": 2,
        "max_new_tokens": 12,
        "settings": {"layerskip": {"exit_layer": 4, "draft_length": 3}},
    }
    return RunOptions(**{**chosen, **changes})


def measure(
    folder: Path, chosen: RunOptions | None = None, watcher: Watcher | None = None, suite: Suite = SUITE, **how: bool
) -> list[Measurement]:
    """Measures with a random model; the lines that are in the folder then."""
    plain = Engine(build("llama"), make_tokenizer())
    Run(chosen or options(), plain, suite, RunFolder(folder, **how), watcher or Watcher()).measure()
    return lines(folder)


def lines(folder: Path) -> list[Measurement]:
    text = (folder / "results.jsonl").read_text(encoding="utf-8")
    return [Measurement.from_dict(json.loads(line), SUBLAYERS) for line in text.splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("selfspec_lab.bench.memory._CPU_COPY_BYTES", 2**16)
        patch.setattr("selfspec_lab.bench.run.runner.kept_profile", lambda *_: {"latencies": LATENCIES.to_dict()})
        measure(path)
    return path


# What is measured


@pytest.mark.skipif(not llama_cpp.is_installed(), reason="needs llama-cpp-python and gguf")
def test_llama_cpp_writes_every_prompt_too(tmp_path: Path) -> None:
    chosen = options(peers=("all",), methods=("uniform",), settings={}, repeats=1)
    measured = measure(tmp_path / "out", chosen)
    for name in LLAMA_CPP_PEERS:
        mine = [each for each in measured if each.contender == name]
        assert [each.error for each in mine] == [None] * len(PROMPTS)
        assert all(each.identical is True and each.decode_seconds > 0 and each.prefill_seconds > 0 for each in mine)
    described = json.loads((tmp_path / "out" / "run.json").read_text(encoding="utf-8"))
    assert described["options"]["peers"] == [*PEERS, *LLAMA_CPP_PEERS]
    assert described["stamp"]["versions"]["llama-cpp-python"] == described["llama_cpp"]["version"]
    assert described["llama_cpp"]["system_info"]
    write_report(tmp_path / "out")
    summary = json.loads((tmp_path / "out" / "summary.json").read_text(encoding="utf-8"))
    assert summary["contenders"]["llama-cpp"]["kind"] == "peer"
    assert summary["plain_over"]["llama-cpp"]["speedup"] > 0
    assert "a copy of the weights of its own" in (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    watcher = Watcher()
    assert measure(tmp_path / "out", chosen, watcher, resume=True) == measured
    assert watcher.seen == []


def test_every_contender_writes_every_prompt_in_every_repeat(folder: Path) -> None:
    measured = lines(folder)
    contenders = {"autoregressive", *METHODS_TRIED, *PEERS}
    assert {each.key for each in measured} == {(key, name, r) for key in PROMPTS for name in contenders for r in (0, 1)}
    assert len(measured) == len(contenders) * len(PROMPTS) * 2
    assert [each for each in measured if each.error] == []
    assert all(each.identical is True for each in measured)
    assert all(len(each.token_ids) == 12 and each.decode_seconds > 0 and each.prefill_seconds > 0 for each in measured)
    assert all(each.peak_memory_bytes > 0 and each.prompt_token_count > 20 for each in measured)


def test_lines_have_what_happened_round_by_round(folder: Path) -> None:
    for name in METHODS_TRIED:
        rounds = [each.rounds for each in lines(folder) if each.contender == name]
        records = [record for each in rounds if each is not None for record in each]
        assert sum(record.drafted for record in records) > 0
        assert sum(record.accepted for record in records) > 0
        assert any(record.kept is not None for record in records)
    for each in lines(folder):
        if each.contender in PEERS:
            assert each.rounds is None
            assert each.bytes is None
        else:
            assert each.rounds is not None
            assert each.bytes is not None
            assert tuple(t for record in each.rounds for t in record.token_ids) == each.token_ids[1:]
            assert each.bytes.tokens == 11


def test_a_line_comes_back_as_it_was(folder: Path) -> None:
    for each in lines(folder):
        assert Measurement.from_dict(json.loads(json.dumps(each.to_dict())), SUBLAYERS) == each


def test_the_order_is_drawn_anew_for_every_prompt_and_the_same_in_every_run(folder: Path, tmp_path: Path) -> None:
    def orders(measured: list[Measurement]) -> list[list[str]]:
        ordered = sorted(measured, key=lambda each: (each.repeat, each.position, each.turn))
        count = len(METHODS_TRIED) + len(PEERS) + 1
        return [[each.contender for each in ordered[i : i + count]] for i in range(0, len(ordered), count)]

    found = orders(lines(folder))
    assert len({tuple(order) for order in found}) > 3
    assert [each.contender for each in lines(folder)] == [name for order in found for name in order]
    assert orders(measure(tmp_path / "again")) == found


def test_the_folder_says_what_was_measured(folder: Path) -> None:
    described = json.loads((folder / "run.json").read_text(encoding="utf-8"))
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


def test_later_turns_stand_behind_plain_answers() -> None:
    plain = Engine(build("llama"), make_tokenizer())
    prompts, skipped = answer_suite(SUITE, plain, SamplingParams(max_new_tokens=12))  # as texts
    assert skipped == []
    first, second = prompts[1], prompts[2]
    answer = plain.generate("Once upon a time there was", max_new_tokens=12)
    assert first.answer == answer.token_ids
    expected = f"Once upon a time there was\n\n{answer.text}\n\nAnd then?"
    assert list(second.token_ids) == plain.encode(expected)
    assert second.answer == plain.generate(expected, max_new_tokens=12).token_ids


def test_chats_go_through_the_template() -> None:
    plain = Engine(build("llama"), make_tokenizer(chat_template=CHAT_TEMPLATE))
    prompts, _ = answer_suite(replace(SUITE, questions=SUITE.questions[1:]), plain, SHORT, chat=True)
    assert list(prompts[0].token_ids) == plain.encode("user: Once upon a time there was\nassistant:")
    text = plain.generate(list(prompts[0].token_ids), max_new_tokens=4).text
    messages = f"user: Once upon a time there was\nassistant: {text}\nuser: And then?\nassistant:"
    assert list(prompts[1].token_ids) == plain.encode(messages)


def test_in_a_chat_a_question_says_what_it_wants_and_a_passage_stays_as_it_is() -> None:
    plain = Engine(build("llama"), make_tokenizer(chat_template=CHAT_TEMPLATE))
    asked = Question("a-1", "a", ("def f(x):",), messages=("Go on: def f(x):",))
    suite = Suite("two", (asked, Question("t-1", "t", token_ids=(5, 6, 7))), ordered=False, chat=False)
    in_chat, _ = answer_suite(suite, plain, SHORT, chat=True)
    assert list(in_chat[0].token_ids) == plain.encode("user: Go on: def f(x):\nassistant:")
    assert in_chat[1].token_ids == (5, 6, 7)
    as_text, _ = answer_suite(suite, plain, SHORT, chat=False)
    assert list(as_text[0].token_ids) == plain.encode("def f(x):")
    assert as_text[1].token_ids == (5, 6, 7)


MARKED = "{% for message in messages %}<eos>{{ message['role'] }} {{ message['content'] }}{% endfor %}<eos>"


def test_chat_is_the_default_of_chat_models_and_of_suites_of_chats() -> None:
    chats = replace(SUITE, chat=True)
    bare, plain_words, marked = (make_tokenizer(chat_template=each) for each in (None, CHAT_TEMPLATE, MARKED))
    assert not marks_turns(plain_words)
    assert marks_turns(marked)
    assert [decide_chat(None, each, SUITE) for each in (bare, plain_words, marked)] == [False, False, True]
    assert [decide_chat(None, each, chats) for each in (bare, plain_words, marked)] == [False, True, True]
    assert decide_chat(True, plain_words, SUITE)
    assert not decide_chat(False, marked, chats)
    with pytest.raises(InvalidParameterError, match="--chat needs a model whose tokenizer has a chat template"):
        decide_chat(True, bare, SUITE)


def test_a_token_that_begins_every_text_marks_no_turn() -> None:
    tokenizer = make_tokenizer(chat_template="{{ bos_token }}" + CHAT_TEMPLATE)
    tokenizer.bos_token = "<eos>"
    assert not marks_turns(tokenizer)


@pytest.mark.trained
def test_the_bundled_checkpoints_are_no_chat_models() -> None:
    for name in bundled_models():
        _, tokenizer = load_model(name)
        assert tokenizer.chat_template
        assert not decide_chat(None, tokenizer, SUITE)


def test_a_run_says_that_it_was_a_chat(tmp_path: Path) -> None:
    plain = Engine(build("llama"), make_tokenizer(chat_template=CHAT_TEMPLATE))
    chosen = options(peers=("none",), methods=("uniform",), settings={}, repeats=1, chat=True)
    Run(chosen, plain, SUITE, RunFolder(tmp_path / "out"), Watcher()).measure()
    described = json.loads((tmp_path / "out" / "run.json").read_text(encoding="utf-8"))
    assert described["chat"] is described["options"]["chat"] is True
    assert described["prompts"][0]["tokens"] == len(plain.encode("user: def f(x):\n    return x\nassistant:"))
    write_report(tmp_path / "out")
    assert "3 prompts in 2 categories, as chat messages" in (tmp_path / "out" / "report.md").read_text(encoding="utf-8")


def test_prompts_over_the_context_are_left_out_and_counted(tmp_path: Path) -> None:
    suite = Suite("long", (*SUITE.questions, Question("c-1", "c", token_ids=tuple(prompt(1020)))), False, False)
    measured = measure(tmp_path / "out", options(peers=("none",), repeats=1), suite=suite)
    assert {each.prompt for each in measured} == set(PROMPTS)
    described = json.loads((tmp_path / "out" / "run.json").read_text(encoding="utf-8"))
    assert [(each["key"], each["category"]) for each in described["skipped"]] == [("c-1", "c")]
    assert "1020 tokens" in described["skipped"][0]["reason"]


def test_a_suite_that_does_not_fit_at_all_is_refused(tmp_path: Path) -> None:
    suite = Suite("long", (Question("c-1", "c", token_ids=tuple(prompt(1020))),), False, False)
    with pytest.raises(InvalidParameterError, match=r"no prompt of the suite fits the model: .*1020 tokens"):
        measure(tmp_path / "out", suite=suite)
    assert not (tmp_path / "out").exists()


def test_sampling_with_one_seed_gives_every_method_the_plain_text(tmp_path: Path) -> None:
    measured = measure(tmp_path / "out", options(temperature=1.0, repeats=1, seed=5))
    greedy = {each.prompt: each.token_ids for each in measure(tmp_path / "greedy", options(repeats=1))}
    ours = [each for each in measured if each.contender not in PEERS]
    assert all(each.identical is True for each in ours)
    assert any(each.token_ids != greedy[each.prompt] for each in ours)
    for name in METHODS_TRIED:
        rounds = [record for each in ours if each.contender == name for record in each.rounds or ()]
        assert sum(record.drafted for record in rounds) > 0
        assert sum(record.accepted for record in rounds) > 0
    theirs = [each for each in measured if each.contender in PEERS]
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
    assert {each.contender for each in measured if each.identical is False} == {"uniform"}
    assert {each.contender for each in measured if each.identical} == {"autoregressive", "layerskip", "swift"}


# Failures and interruptions


def test_a_crash_of_a_method_is_a_line_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin: Any = METHODS["uniform"].begin

    def broken(method: Any, prefill: Any) -> Any:
        if len(prefill.prompt_ids) < 25:
            raise ValueError("broken")
        return begin(method, prefill)

    monkeypatch.setattr(METHODS["uniform"], "begin", broken)
    chosen = options(peers=("none",), repeats=1, settings={"layerskip": {"exit_layer": 60}})
    measured = measure(tmp_path / "out", chosen)
    assert [(each.prompt, each.contender) for each in measured if each.error] == [("a-1", "uniform")]
    assert next(each.error for each in measured if each.error) == "ValueError: broken"
    assert {each.contender for each in measured} == {"autoregressive", "uniform", "swift"}
    failures = json.loads((tmp_path / "out" / "run.json").read_text(encoding="utf-8"))["failures"]
    assert "exit layer 60 is out of range" in failures["layerskip"]


@pytest.mark.parametrize("cut", [False, True])
def test_an_interrupted_run_goes_on_where_it_was(folder: Path, tmp_path: Path, cut: bool) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        measure(out, watcher=Watcher(interrupt_after=17))
    kept = (out / "results.jsonl").read_bytes()
    assert len(kept.splitlines()) == 17
    if cut:
        with (out / "results.jsonl").open("ab") as file:
            file.write(b'{"prompt": "b-1/1", "categ')
    watcher = Watcher()
    measured = measure(out, watcher=watcher, resume=True)
    assert (out / "results.jsonl").read_bytes().startswith(kept)
    assert (watcher.total, watcher.done, len(watcher.seen)) == (42, 17, 25)
    assert [each.key for each in measured] == [each.key for each in lines(folder)]
    again = {each.key: each for each in measured}
    for each in lines(folder):  # what a method had learned before the interruption, it has learned again
        assert again[each.key].token_ids == each.token_ids
        assert [(r.kept, r.drafted, r.accepted) for r in again[each.key].rounds or ()] == [
            (r.kept, r.drafted, r.accepted) for r in each.rounds or ()
        ]


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    chosen = options(peers=("none",), repeats=1)
    first = measure(tmp_path / "out", chosen)
    watcher = Watcher()
    assert measure(tmp_path / "out", chosen, watcher, resume=True) == first
    assert watcher.seen == []


def test_no_space_ends_the_run_and_keeps_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, write = tmp_path / "out", run_folder._write_line
    written: list[str] = []

    def full(file: Any, line: str) -> None:
        if len(written) == 5:
            file.write(line[:40])
            file.flush()
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(line)
        write(file, line)

    monkeypatch.setattr(run_folder, "_write_line", full)
    with pytest.raises(InvalidParameterError, match=r"No space left on device; what was measured .* --resume"):
        measure(out, options(peers=("none",), repeats=1))
    monkeypatch.undo()
    monkeypatch.setattr("selfspec_lab.bench.run.runner.kept_profile", lambda *_: {"latencies": LATENCIES.to_dict()})
    assert len(measure(out, options(peers=("none",), repeats=1), resume=True)) == 12


def test_a_peer_that_cannot_be_made_is_reported_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise UnsupportedModelError("no words for it")

    monkeypatch.setattr("selfspec_lab.bench.run.peers.WeightsFile", refuse)
    monkeypatch.setattr("selfspec_lab.bench.run.options.obstacle", lambda *_: None)
    monkeypatch.setattr(RunOptions, "packages", ("torch",))
    measured = measure(tmp_path / "out", options(peers=("transformers", "llama-cpp"), repeats=1))
    assert {each.contender for each in measured} == {"autoregressive", *METHODS_TRIED, "transformers"}
    described = json.loads((tmp_path / "out" / "run.json").read_text(encoding="utf-8"))
    assert described["failures"] == {"llama-cpp": "UnsupportedModelError: no words for it"}
    assert described["llama_cpp"] is None
    write_report(tmp_path / "out")
    report = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "llama-cpp could not be made: UnsupportedModelError: no words for it" in report


def test_all_peers_are_those_that_are_there_and_the_run_says_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfspec_lab.bench.run.options.obstacle", lambda *_: "llama-cpp-python is not installed")
    chosen = options(peers=("all",))
    assert chosen.peer_names == list(TRANSFORMERS_PEERS)
    assert chosen.left_out == "llama-cpp, llama-cpp-prompt-lookup left out: llama-cpp-python is not installed"
    assert options(peers=("all",), temperature=1.0).peer_names == list(TRANSFORMERS_PEERS)
    assert options(peers=("transformers",)).left_out is None
    with pytest.raises(InvalidParameterError, match="llama-cpp cannot be measured: llama-cpp-python is not installed"):
        options(peers=("llama-cpp",))


# The folder


def test_a_folder_with_a_run_is_not_touched_unless_asked(folder: Path, tmp_path: Path) -> None:
    before = (folder / "results.jsonl").read_bytes()
    with pytest.raises(InvalidParameterError, match=r"holds the results of a run already.*--resume.*--overwrite"):
        RunFolder(folder)
    with pytest.raises(InvalidParameterError, match="choose one"):
        RunFolder(folder, resume=True, overwrite=True)
    assert (folder / "results.jsonl").read_bytes() == before


def test_overwrite_replaces_the_run_and_leaves_other_files(tmp_path: Path) -> None:
    out = tmp_path / "out"
    measure(out, options(peers=("none",), repeats=1))
    (out / "notes.txt").write_text("mine")
    (out / "report.md").write_text("old")
    measured = measure(out, options(peers=("none",), repeats=1, methods=("uniform",), settings={}), overwrite=True)
    assert {each.contender for each in measured} == {"autoregressive", "uniform"}
    assert (out / "notes.txt").read_text() == "mine"
    assert not (out / "report.md").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 13}, "max_new_tokens was 12 and is 13"),
        ({"methods": ("uniform",), "settings": {}}, "methods was"),
        ({"temperature": 0.5}, "temperature was 0.0 and is 0.5"),
        ({"chat": True}, "chat was None and is True"),
    ],
)
def test_another_run_is_not_resumed(folder: Path, changes: dict[str, Any], message: str) -> None:
    stamp = json.loads((folder / "run.json").read_text(encoding="utf-8"))["stamp"]
    RunFolder(folder, resume=True).check_same(options().to_dict(), stamp)
    with pytest.raises(InvalidParameterError, match=message):
        RunFolder(folder, resume=True).check_same(options(**changes).to_dict(), stamp)


def test_a_run_of_another_machine_is_not_resumed(folder: Path) -> None:
    stamp = json.loads((folder / "run.json").read_text(encoding="utf-8"))["stamp"]
    other = {**stamp, "threads": 99}
    with pytest.raises(InvalidParameterError, match=r"threads was .* and is 99"):
        RunFolder(folder, resume=True).check_same(options().to_dict(), other)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"options": {}}'])
def test_a_broken_description_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(InvalidParameterError, match=r"run\.json.*use --overwrite"):
        RunFolder(tmp_path, resume=True).describe()


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    out, chosen = tmp_path / "out", options(peers=("none",), repeats=1)
    measure(out, chosen)
    path = out / "results.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"prompt"', b'"promt"', 1))
    with pytest.raises(InvalidParameterError, match=r"results\.jsonl, line 1: not a measurement"):
        measure(out, chosen, resume=True)


def test_a_full_disk_is_noticed_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "LEAST_FREE_BYTES", 2**70)
    with pytest.raises(InvalidParameterError, match="MiB free for --out"):
        RunFolder(tmp_path / "out")


# The command and its progress


def line(contender: str, seconds: float, key: str = "a", tokens: int = 11, error: str | None = None) -> Measurement:
    return Measurement(key, "a", contender, 0, 0, 0, error, 5, tuple(range(tokens)), True, 0.1, seconds)


def test_running_speedups_pair_prompts() -> None:
    running = RunningSpeedups()
    running.add(line("x", 1.0))
    assert running.speedups == {}
    running.add(line("autoregressive", 2.0))
    assert running.speedups == {"x": 2.0}
    running.add(line("y", 4.0))
    running.add(line("x", 1.0, key="b"))
    running.add(line("autoregressive", 1.0, key="b"))
    running.add(line("z", 1.0, error="broken"))
    assert running.speedups == pytest.approx({"x": 1.5, "y": 0.5})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--methods", "layerskp"), "did you mean 'layerskip'?"),
        (("--peers", "vllm"), "there is no peer 'vllm'"),
        (("--suite", "minni"), "did you mean 'mini'?"),
        (("--suite", "gsm8k:nowhere.jsonl"), "nowhere.jsonl"),
        (("--limit", "0"), "limit"),
        (("--peers", "llama-cpp", "--temperature", "0.5"), "the peer llama-cpp cannot be measured: "),
        (("--temperature", "-1"), "temperature must be a finite number of at least 0"),
        (("--temperature", "nan"), "temperature must be"),
        (("--context", "0"), "context must be at least 1 token"),
        (("--repeats", "0"), "repeats must be at least 1"),
        (("--set", "layerskip.exit_layr=3"), "did you mean 'exit_layer'?"),
        (("--resume", "--overwrite"), "choose one"),
        (("--out", "file.txt"), "is a file; name a folder"),
        (("--out", "file.txt/below"), "which is a file; name another folder"),
    ],
)
def test_mistakes_are_found_before_the_model_is_loaded(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def load(*_: Any, **__: Any) -> Any:
        raise AssertionError("loaded a model")

    monkeypatch.setattr("selfspec_lab.bench.run.runner.load_model", load)
    monkeypatch.chdir(tmp_path)
    Path("file.txt").write_text("x")
    out = () if "--out" in arguments else ("--out", "out")
    result: Any = CliRunner().invoke(app, ["bench", "run", *out, *arguments])
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert result.output.count("\n") == 1


def test_the_command_measures_writes_a_report_and_compares(tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path / "model")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def f(x):\nOnce upon a time\n")

    def run(out: str, *more: str) -> Any:
        command = ["bench", "run", "--model", str(model), "--suite", f"prompts:{prompts}", "--methods", "uniform"]
        rest = ["--max-new-tokens", "8", "--repeats", "1", "--out", str(tmp_path / out), "--device", "cpu"]
        return CliRunner().invoke(app, [*command, *rest, *more])

    first: Any = run("first", "--peers", "none")
    assert first.exit_code == 0, first.output
    for name in ("run.json", "results.jsonl", "summary.json", "report.md", "report.html"):
        assert (tmp_path / "first" / name).stat().st_size > 0
    summary = json.loads((tmp_path / "first" / "summary.json").read_text(encoding="utf-8"))
    assert summary["contenders"]["uniform"]["overall"]["speedup"] > 0
    assert summary["contenders"]["uniform"]["overall"]["acceptance_rate"] > 0
    assert run("first", "--peers", "none").exit_code == 2
    assert run("second").exit_code == 0
    compared: Any = CliRunner().invoke(app, ["bench", "report", str(tmp_path / "first"), str(tmp_path / "second")])
    assert compared.exit_code == 0, compared.output
    assert "uniform" in compared.output
    (tmp_path / "first" / "report.md").unlink()
    again: Any = CliRunner().invoke(app, ["bench", "report", str(tmp_path / "first")])
    assert again.exit_code == 0, again.output
    assert (tmp_path / "first" / "report.md").is_file()


# The leaderboard


def test_the_leaderboard_is_made_of_the_summaries_of_runs(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "runs" / "one")
    write_report(tmp_path / "runs" / "one")
    page = tmp_path / "docs" / "leaderboard.md"
    page.parent.mkdir()
    result: Any = CliRunner().invoke(app, ["bench", "leaderboard", str(tmp_path / "runs"), str(page)])
    assert result.exit_code == 0, result.output
    text = page.read_text(encoding="utf-8")
    assert "## tiny, float32: mini" in text
    assert "(../runs/one/report.md)" in text
    assert "`layerskip.exit_layer=4`" in text
    for name in (*METHODS_TRIED, *PEERS, "autoregressive"):
        assert text.count(f"| `{name}`") == 1
    assert "| 6/6 |" in text


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"options": {}}'])
def test_what_is_no_summary_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(InvalidParameterError, match="there are no runs"):
        read_summaries(tmp_path)
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "summary.json").write_text(content)
    with pytest.raises(InvalidParameterError, match=r"summary\.json' is not the summary of a run"):
        read_summaries(tmp_path)
