"""State files: what comes back, what is refused, and what an accident leaves behind."""

import errno
import json
import os
import random
import sys
import threading
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

from helpers.checkpoints import save_checkpoint
from helpers.counting import Counting, CountingSettings
from helpers.models import build, plain_text, prompt
from helpers.runs import DEFAULT_RUNS, RUNS
from selfspec import METHODS, Engine
from selfspec.cli.command_line import app
from selfspec.decoding.output import Output
from selfspec.errors import StateError
from selfspec.methods import state as state_module
from selfspec.methods.registry import LAB_METHODS
from selfspec.methods.state import LearnedState, read_state, write_state
from selfspec.runtimes.target import Target, fingerprint

MODEL = {"family": "llama", "layers": 6, "dtype": "float32", "weights": "0123456789abcdef"}


def counting(name: str = "llama", **settings: Any) -> Engine:
    target = Target(build(name))
    return Engine(build(name), method=Counting(target, CountingSettings(**settings)))


def assert_equal(left: LearnedState, right: LearnedState) -> None:
    assert json.loads(json.dumps(left.values)) == json.loads(json.dumps(right.values))
    assert left.tensors.keys() == right.tensors.keys()
    for name, tensor in left.tensors.items():
        assert tensor.dtype == right.tensors[name].dtype
        assert torch.equal(tensor.cpu(), right.tensors[name].cpu()), name


def write(path: Path, values: Any = None, tensors: Any = None) -> LearnedState:
    state = LearnedState(values or {}, tensors or {})
    write_state(path, state, "counting", MODEL)
    return state


def read(path: Path) -> LearnedState:
    return read_state(path, "counting", MODEL)


def only_file(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


# What comes back


def test_an_engine_takes_up_what_another_one_has_learned(tmp_path: Path) -> None:
    engine = counting()
    for length in (17, 64):
        result = engine.generate(prompt(length), max_new_tokens=24)
        assert result.drafted > 0
        assert result.accepted > 0
    engine.save_state(tmp_path / "state")
    other = counting()
    other.load_state(str(tmp_path / "state"))
    assert other.method.state().values == {"requests": 2}
    # Rounds may look past the end of the output, so that a few more tokens than 23 are counted.
    assert 46 <= int(other.method.state().tensors["counts"].sum()) <= 52
    assert_equal(other.method.state(), engine.method.state())
    assert other.generate(prompt(17), max_new_tokens=24).token_ids == plain_text("llama", prompt(17), 24)
    assert_equal(read_state(tmp_path / "state", "counting", fingerprint(other.target)), engine.method.state())


LEARNERS = [name for name, method in METHODS.items() if method.learns]
SAVING = {"carry_over": True, "keep_pool": True}
"""Settings without which some methods keep nothing."""


@pytest.mark.parametrize("name", LEARNERS)
def test_every_method_that_learns_keeps_its_state_in_a_file(name: str, tmp_path: Path) -> None:
    run = RUNS.get(name, DEFAULT_RUNS)[-1]
    known = METHODS[name].Settings.__dataclass_fields__
    settings = {**{key: value for key, value in SAVING.items() if key in known}, **run.settings}
    first = Engine(build("llama"), method=name, settings=settings)
    untouched = deepcopy(first.method.state())
    for length in (run.length, run.length + 1):
        first.generate(prompt(length), max_new_tokens=run.new_tokens)
    first.save_state(tmp_path / "state")
    second = Engine(build("llama"), method=name, settings=settings)
    second.load_state(tmp_path / "state")
    assert_equal(second.method.state(), first.method.state())
    with pytest.raises(AssertionError):
        assert_equal(second.method.state(), untouched)
    wanted = plain_text("llama", prompt(run.length), run.new_tokens)
    assert second.generate(prompt(run.length), max_new_tokens=run.new_tokens).token_ids == wanted


def test_values_and_tensors_come_back_as_they_were(tmp_path: Path) -> None:
    values = {"none": None, "yes": True, "n": -3, "x": 1e-300, "name": "ä\n", "list": [1, [2.5, {"a": []}]], "map": {}}
    tensors = {
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(3),
        "bool": torch.tensor([True, False]),
        "half": torch.randn(3, 5).to(torch.bfloat16),
        "strided": torch.arange(12).reshape(3, 4).T,
        "nan": torch.tensor([torch.inf, -0.0]),
    }
    assert_equal(read_after(tmp_path, values, tensors), LearnedState(values, tensors))
    assert_equal(read_after(tmp_path, values, {}), LearnedState(values))
    assert_equal(read_after(tmp_path, {}, {}), LearnedState())


def read_after(folder: Path, values: Any, tensors: Any) -> LearnedState:
    write(folder / "state", values, tensors)
    return read(only_file(folder))


def test_tuples_and_numpy_numbers_become_what_json_has(tmp_path: Path) -> None:
    values = {"pair": (1, 2), "index": np.int64(7), "score": np.float32(0.5)}
    read_values = read_after(tmp_path, values, {}).values
    assert read_values == {"pair": [1, 2], "index": 7, "score": 0.5}
    assert type(read_values["index"]) is int


def test_tensors_that_share_memory(tmp_path: Path) -> None:
    base = torch.arange(6)
    tensors = {"whole": base, "same": base, "part": base[2:4]}
    assert_equal(read_after(tmp_path, {}, tensors), LearnedState({}, tensors))


def test_what_was_read_does_not_change_with_its_file(tmp_path: Path) -> None:
    state = read_after(tmp_path, {}, {"counts": torch.ones(1000)})
    size = (tmp_path / "state").stat().st_size
    with (tmp_path / "state").open("r+b") as file:
        file.write(bytes(size))
    assert torch.equal(state.tensors["counts"], torch.ones(1000))


# What is refused


@pytest.mark.parametrize(
    ("values", "where"),
    [
        ({"score": float("nan")}, "values.score is nan"),
        ({"best": [1.0, -float("inf")]}, r"values.best\[1\] is -inf"),
        ({"by_layer": {3: 1}}, r"values.by_layer is {3: 1}"),
        ({"set": {1}}, r"values.set is {1}"),
        ({"tensor": torch.zeros(1)}, "values.tensor is tensor"),
    ],
)
def test_values_that_json_has_no_word_for(values: Any, where: str, tmp_path: Path) -> None:
    kept = write(tmp_path / "state", {"old": 1})
    with pytest.raises(StateError, match=where):
        write(tmp_path / "state", values)
    assert_equal(read(only_file(tmp_path)), kept)


@pytest.mark.parametrize("change", [{"family": "qwen2"}, {"layers": 8}, {"dtype": "bfloat16"}, {"weights": "f"}])
def test_a_state_of_another_model(change: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path / "state")
    (key,) = change
    with pytest.raises(StateError, match=rf"another model \({key} {MODEL[key]}, here {change[key]}\)"):
        read_state(tmp_path / "state", "counting", {**MODEL, **change})


def test_a_state_of_another_method(tmp_path: Path) -> None:
    write(tmp_path / "state")
    with pytest.raises(StateError, match="learned by the method counting, not by swift; choose that"):
        read_state(tmp_path / "state", "swift", MODEL)


def test_a_state_of_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "VERSION", 2)
    write(tmp_path / "state")
    monkeypatch.undo()
    with pytest.raises(StateError, match="version 2 of the state format, this selfspec reads version 1"):
        read(tmp_path / "state")


def test_a_state_of_another_dtype_or_checkpoint_is_refused_by_the_engine(tmp_path: Path) -> None:
    engine = counting()
    engine.generate(prompt(17), max_new_tokens=8)
    engine.save_state(tmp_path / "state")
    other = deepcopy(build("llama"))
    for model, word in (
        (deepcopy(build("llama")).to(torch.bfloat16), "dtype float32, here bfloat16"),
        (other, "weights"),
    ):
        with torch.no_grad():
            other.lm_head.weight[:, 3] += 0.01
        refusing = Engine(model, method=Counting(Target(model), CountingSettings()))
        with pytest.raises(StateError, match=word):
            refusing.load_state(tmp_path / "state")
        assert refusing.method.state().values == {"requests": 0}


def test_what_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    engine = counting()
    engine.generate(prompt(17), max_new_tokens=8)
    before = engine.method.state()
    write_state(tmp_path / "state", LearnedState({"requests": 9}), "counting", fingerprint(engine.target))
    with pytest.raises(StateError, match="there are no counts in it"):
        engine.load_state(tmp_path / "state")
    assert_equal(engine.method.state(), before)


def test_a_method_that_learns_nothing_has_no_state(tmp_path: Path) -> None:
    engine = Engine(build("llama"), method="uniform")
    for use in (engine.save_state, engine.load_state):
        with pytest.raises(StateError, match="uniform learns nothing from one request to the next"):
            use(tmp_path / "state")
    assert not list(tmp_path.iterdir())


def test_any_flipped_bit_is_noticed(tmp_path: Path) -> None:
    write(tmp_path / "state", {"requests": 2, "list": [0.25, None]}, {"counts": torch.arange(20), "m": torch.ones(3)})
    content = (tmp_path / "state").read_bytes()
    bits = random.Random(0)
    for position in bits.sample(range(len(content)), 300):
        damaged = bytearray(content)
        damaged[position] ^= 1 << bits.randrange(8)
        (tmp_path / "state").write_bytes(damaged)
        with pytest.raises(StateError):
            read(tmp_path / "state")


def test_a_truncated_file(tmp_path: Path) -> None:
    write(tmp_path / "state", {"requests": 2}, {"counts": torch.arange(20)})
    content = (tmp_path / "state").read_bytes()
    for length in [0, 1, 7, 8, 9, *range(10, len(content), 50), len(content) - 1]:
        (tmp_path / "state").write_bytes(content[:length])
        with pytest.raises(StateError, match="is not a state file of selfspec, or it is damaged"):
            read(tmp_path / "state")
    (tmp_path / "state").write_bytes(content + b"\0")
    with pytest.raises(StateError, match="damaged"):
        read(tmp_path / "state")


def test_files_that_are_something_else(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(3)}, tmp_path / "checkpoint", {"format": "pt"})
    save_file({"weight": torch.zeros(3)}, tmp_path / "bare")
    save_file({"weight": torch.zeros(3)}, tmp_path / "half", {"format": "selfspec-state"})
    (tmp_path / "text").write_text("layers: 1, 2, 3\n" * 20)
    (tmp_path / "list").write_bytes((2).to_bytes(8, "little") + b"[]")
    for name in ("checkpoint", "bare", "half", "text", "list"):
        with pytest.raises(StateError, match="is not a state file of selfspec"):
            read(tmp_path / name)
    for name in ("nowhere", "."):
        with pytest.raises(StateError, match="there is no state file"):
            read(tmp_path / name)


@pytest.mark.skipif(sys.platform == "win32", reason="named pipes")
def test_a_nested_file(tmp_path: Path) -> None:
    path, header = tmp_path / "state", b"[" * 100_000
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(StateError, match="is not a state file"):
        read_state(path, "swift", {})


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StateError, match="there is no state file"):
        read(tmp_path / "pipe")
    with pytest.raises(StateError, match="it is no file"):
        write(tmp_path / "pipe")


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "state")

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(StateError, match="cannot be read: Permission denied"):
        read(tmp_path / "state")


# What an accident leaves behind


def test_folders_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for path, reason in (
        ("nowhere/state", "there is no folder"),
        ("file/state", "no folder|Not a directory"),
        (".", "it is no file"),
    ):
        with pytest.raises(StateError, match=f"cannot be written to .*{reason}"):
            write(tmp_path / path)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(StateError, match="write-protected"):
        write(tmp_path / "state")
    assert only_file(tmp_path).name == "file"


@pytest.mark.parametrize(
    ("accident", "raised"),
    [(OSError(errno.ENOSPC, "No space left on device"), StateError), (KeyboardInterrupt(), KeyboardInterrupt)],
)
def test_a_write_that_fails_half_way_leaves_the_old_file(
    accident: BaseException, raised: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = write(tmp_path / "state", {"requests": 1})

    def fail(_: int) -> None:
        assert len(list(tmp_path.iterdir())) == 2, "nothing has been written beside the old file"
        raise accident

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(raised, match="No space left" if raised is StateError else None):
        write(tmp_path / "state", {"requests": 2})
    assert_equal(read(only_file(tmp_path)), kept)


@pytest.mark.skipif(sys.platform == "win32", reason="permissions")
def test_permissions_and_links_stay(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        write(tmp_path / "state")
    finally:
        os.umask(old)
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o640
    (tmp_path / "state").chmod(0o604)
    (tmp_path / "link").symlink_to("state")
    write(tmp_path / "link", {"requests": 2})
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o604
    assert read(tmp_path / "state").values == {"requests": 2}


def test_writers_and_readers_at_once(tmp_path: Path) -> None:
    """A reader gets one whole state, never a mixture."""
    path = tmp_path / "state"
    write(path, {"writer": 0}, {"rows": torch.zeros(5000)})
    failures: list[BaseException] = []
    seen: set[int] = set()

    def work(writer: int) -> None:
        try:
            for _ in range(15):
                write(path, {"writer": writer}, {"rows": torch.full((5000,), float(writer))})
                state = read(path)
                seen.add(state.values["writer"])
                assert torch.equal(state.tensors["rows"], torch.full((5000,), float(state.values["writer"])))
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(writer,)) for writer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(seen) > 1
    assert only_file(tmp_path) == path


def test_saving_while_requests_run(tmp_path: Path) -> None:
    engine = counting()
    results = []
    threads = [
        threading.Thread(
            target=lambda length=length: results.append(engine.generate(prompt(length), max_new_tokens=24))
        )
        for length in (17, 64, 2)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        engine.save_state(tmp_path / "state")
        counting().load_state(tmp_path / "state")
    assert len(results) == 3
    engine.save_state(tmp_path / "state")
    assert read_state(tmp_path / "state", "counting", fingerprint(engine.target)).values == {"requests": 3}


# What a state is bound to


def test_a_fingerprint_tells_checkpoints_apart() -> None:
    model = build("llama")
    same = fingerprint(Target(model))
    assert fingerprint(Target(deepcopy(model))) == same
    changes = {
        "model.embed_tokens.weight": (5, 7),
        "model.layers.2.self_attn.q_proj.weight": (slice(None), 7),
        "model.layers.5.mlp.down_proj.weight": (9, slice(None)),
        "model.norm.weight": (63,),
        "lm_head.weight": (slice(None), 1),
    }
    digests = {same["weights"]}
    for name, place in changes.items():
        changed = deepcopy(model)
        with torch.no_grad():
            weight = changed.get_parameter(name)
            if name.startswith("model.embed"):
                weight += 1e-3 * torch.randn(weight.shape)
            else:
                weight[place] += 1e-3
        digests.add(fingerprint(Target(changed))["weights"])
    assert len(digests) == 1 + len(changes)


def test_a_fingerprint_does_not_depend_on_the_layout_in_memory() -> None:
    model = deepcopy(build("llama"))
    before = fingerprint(Target(model))
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data = weight.data.T.contiguous().T
    assert not weight.is_contiguous()
    assert fingerprint(Target(model)) == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_fingerprint_does_not_depend_on_the_device() -> None:
    model = deepcopy(build("llama"))
    assert fingerprint(Target(deepcopy(model).to("cuda"))) == fingerprint(Target(model))


# The command line


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_checkpoint(tmp_path_factory.mktemp("checkpoint")))


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "counting", Counting)


def generate(model: str, *arguments: str) -> Result:
    options = ("--model", model, "--max-new-tokens", "16", "--ignore-eos")
    result: Any = CliRunner().invoke(app, ["generate", "def double", *options, *arguments])
    return result


def with_state(path: Path) -> tuple[str, ...]:
    return "--method", "counting", "--state", str(path)


def requests(path: Path, model: str) -> int:
    engine = Engine.from_pretrained(model, "counting")
    engine.load_state(path)
    return int(engine.method.state().values["requests"])


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_generate_goes_on_from_a_state(form: tuple[str, ...], checkpoint: str, tmp_path: Path) -> None:
    plain = generate(checkpoint)
    for count in (1, 2):
        result = generate(checkpoint, *with_state(tmp_path / "state"), *form)
        assert result.exit_code == 0, result.stderr
        assert result.stderr == ""
        assert (json.loads(result.stdout)["text"] if form else result.stdout) == plain.stdout
        assert requests(only_file(tmp_path), checkpoint) == count


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_an_interrupted_output_keeps_what_was_learned(
    form: tuple[str, ...], checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = Output.append

    def interrupted(self: Output, *arguments: Any) -> bool:
        if len(self.token_ids) == 10:
            raise KeyboardInterrupt
        return append(self, *arguments)

    monkeypatch.setattr(Output, "append", interrupted)
    result = generate(checkpoint, *with_state(tmp_path / "state"), *form)
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")
    monkeypatch.undo()
    monkeypatch.setitem(METHODS, "counting", Counting)
    engine = Engine.from_pretrained(checkpoint, "counting")
    engine.load_state(tmp_path / "state")
    assert 1 <= int(engine.method.state().tensors["counts"].sum()) <= 9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--method", "layerskip", "--state", "s"), "layerskip learns nothing"),
        (("--method", "suffix", "--state", "s"), "leave --state out, or choose a method that learns: "),
        (("--method", "countin", "--state", "s"), "did you mean 'counting'?"),
        (("--method", "counting", "--state", "nowhere/s"), "there is no folder"),
        (("--method", "counting", "--state", "."), "it is no file"),
    ],
)
def test_a_state_that_cannot_be_is_refused_before_the_model_is_loaded(arguments: tuple[str, ...], message: str) -> None:
    result = generate("./no-such-model", *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_mistakes_about_the_state_write_nothing(checkpoint: str, tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(b"no state")
    damaged = generate(checkpoint, *with_state(path))
    path.unlink()
    settings = generate(checkpoint, *with_state(path), "--set", "keeps=false")
    too_long = generate(checkpoint, *with_state(path), "--max-new-tokens", "1024")
    messages = ("is not a state file", "counting keeps nothing; set keeps=true", "do not fit the model's context")
    for result, message in zip((damaged, settings, too_long), messages, strict=True):
        assert (result.exit_code, result.stdout) == (2, "")
        assert message in result.stderr
    assert not list(tmp_path.iterdir())


def test_methods_says_which_keep_a_state() -> None:
    listed = json.loads(CliRunner().invoke(app, ["methods", "--json"]).stdout)
    learners = {name for name, method in listed.items() if method["learns"]}
    assert learners - set(LAB_METHODS) == {*LEARNERS, "counting"}
    text = CliRunner().invoke(app, ["methods"]).stdout
    assert text.count("--state FILE saves what it has learned") == len(learners)
    assert "\ncounting: counts tokens\n    source: tests\n    learns from request to request; --state FILE" in text
