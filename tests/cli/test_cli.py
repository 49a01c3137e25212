"""The command line: what goes to which stream, what equals the Python result, and how it ends."""

import inspect
import json
import os
import shlex
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import Result

from helpers.checkpoints import save_checkpoint
from helpers.commands import run
from selfspec import METHODS, Engine, SamplingParams, __version__
from selfspec.cli import options
from selfspec.cli.command_line import app
from selfspec.cli.generate import generate as generate_command
from selfspec.cli.inputs import read_prompt
from selfspec.cli.models import row_text
from selfspec.cli.terminal import TextWriter, replace_closed_streams, takes_colour
from selfspec.decoding.output import Output
from selfspec.errors import InvalidPromptError, SelfSpecWarning, UnsupportedModelError
from selfspec.methods import COMPOSITIONS
from selfspec.methods.registry import DEFAULT_METHOD
from selfspec.runtimes import kernels, runner
from selfspec.runtimes.candidates import CANDIDATES
from selfspec.runtimes.kernel_build import LEVELS
from selfspec.types import TextPiece

PROMPT = "def double(number):\n"
PLAIN = ("--method", "autoregressive")
LAYERSKIP = ("--method", "layerskip", "--set", "exit_layer=2", "--set", "draft_length=4")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    template = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
    return str(save_checkpoint(tmp_path_factory.mktemp("checkpoint"), chat_template=template))


def generate(model: str, *arguments: str, **options: Any) -> Result:
    return run("generate", "--model", model, "--max-new-tokens", "24", "--ignore-eos", *arguments, **options)


def start(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment, **options}
    # A run in the background of a shell ignores Ctrl-C, and its children would inherit that.
    interruptible = None if sys.platform == "win32" else lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen([sys.executable, "-m", "selfspec", *arguments], preexec_fn=interruptible, **pipes)


def expected(model: str, method: str = "autoregressive", prompt: Any = PROMPT, **changes: Any) -> Any:
    settings = {"exit_layer": 2, "draft_length": 4} if method == "layerskip" else {}
    engine = Engine.from_pretrained(model, method, settings=settings)
    return engine.generate(prompt, SamplingParams(max_new_tokens=24, ignore_eos=True), **changes)


# Generating


def test_text_alone_goes_to_stdout(checkpoint: str) -> None:
    result = generate(checkpoint, PROMPT)
    assert result.exit_code == 0
    assert result.stdout == expected(checkpoint).text
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "method", "changes"),
    [
        (PLAIN, "autoregressive", {}),
        (LAYERSKIP, "layerskip", {}),
        ((*LAYERSKIP, "--temperature", "0.8", "--seed", "7"), "layerskip", {"temperature": 0.8, "seed": 7}),
        (
            (*PLAIN, "--temperature", "1.5", "--seed", "3", "--top-p", "0.9", "--top-k", "20", "--min-p", "0.01"),
            "autoregressive",
            {"temperature": 1.5, "seed": 3, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
        ),
        ((*PLAIN, "--repetition-penalty", "1.3"), "autoregressive", {"repetition_penalty": 1.3}),
        (
            (*LAYERSKIP, "--presence-penalty", "0.5", "--frequency-penalty", "1.5", "--min-tokens", "3"),
            "layerskip",
            {"presence_penalty": 0.5, "frequency_penalty": 1.5, "min_tokens": 3},
        ),
        ((*PLAIN, "--logprobs", "2"), "autoregressive", {"logprobs": 2}),
    ],
)
def test_json_is_the_python_result(
    checkpoint: str, arguments: tuple[str, ...], method: str, changes: dict[str, Any]
) -> None:
    result = generate(checkpoint, PROMPT, "--json", *arguments)
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    printed = json.loads(result.stdout)
    wanted = expected(checkpoint, method, **changes).to_dict()
    measured = {"seconds", "tokens_per_second", "peak_memory_bytes"}
    assert printed.keys() == wanted.keys()
    assert all(printed[key] == wanted[key] for key in wanted.keys() - measured)
    assert all(printed[key] > 0 for key in measured)


def test_without_a_method_it_is_auto(checkpoint: str) -> None:
    printed = json.loads(generate(checkpoint, PROMPT, "--json").stdout)
    assert (printed["method"], printed["text"]) == ("auto", expected(checkpoint).text)
    assert options.DEFAULT_METHOD == DEFAULT_METHOD == "auto"


def test_prompt_sources_are_taken_as_they_are(checkpoint: str, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(PROMPT.encode())
    by_file = generate(checkpoint, "--prompt-file", str(file))
    by_stdin = generate(checkpoint, input=PROMPT)
    assert by_file.stdout == by_stdin.stdout == generate(checkpoint, PROMPT).stdout
    assert by_file.exit_code == by_stdin.exit_code == 0


def test_chat_sends_a_user_message(checkpoint: str) -> None:
    result = generate(checkpoint, "hello", "--chat")
    assert result.stdout == expected(checkpoint, prompt=[{"role": "user", "content": "hello"}]).text
    assert result.stdout == expected(checkpoint, prompt="<user>hello").text


@pytest.mark.parametrize("method", ["suffix", "auto"])
def test_a_folder_remembers_prompts_and_answers(checkpoint: str, method: str, tmp_path: Path) -> None:
    arguments = ("--method", method, "--cache-dir", str(tmp_path / "new"), "--cache-dir-limit", "0.1", "--json")
    results = [generate(checkpoint, PROMPT, *arguments) for _ in range(2)]
    assert [each.stderr for each in results] == ["", ""]
    first, again = (json.loads(each.stdout) for each in results)
    assert first["text"] == again["text"] == expected(checkpoint).text
    assert first["cached_prompt_tokens"] == 0 < again["cached_prompt_tokens"]
    (tmp_path / "file").write_text("")
    refused = generate(checkpoint, PROMPT, "--cache-dir", str(tmp_path / "file"))
    assert refused.exit_code == 2
    assert "--cache-dir" in refused.stderr


def test_a_json_schema_comes_from_a_file(checkpoint: str, tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"enum": ["ab", "abc"]}')
    result = run("generate", PROMPT, "--model", checkpoint, "--json-schema", str(file))
    assert (result.exit_code, json.loads(result.stdout) in ("ab", "abc")) == (0, True), result.stderr
    file.write_text('{"type": "frog"}')
    assert "frog" in generate(checkpoint, PROMPT, "--json-schema", str(file)).stderr
    file.write_bytes(b"\xff")
    assert "is not UTF-8" in generate(checkpoint, PROMPT, "--json-schema", str(file)).stderr
    assert "No such file" in generate(checkpoint, PROMPT, "--json-schema", str(tmp_path / "none")).stderr


def test_logprobs_are_written_as_json_only(checkpoint: str) -> None:
    result = generate(checkpoint, PROMPT, "--logprobs", "2")
    assert (result.exit_code, "add --json" in result.stderr) == (2, True)


def test_stop_strings(checkpoint: str) -> None:
    first, second = expected(checkpoint).text[4], expected(checkpoint).text[7]
    result = generate(checkpoint, PROMPT, "--stop", first, "--stop", second, "--json")
    printed = json.loads(result.stdout)
    assert printed["finish_reason"] == "stop_string"
    assert printed["token_ids"] == list(expected(checkpoint, stop=[first, second]).token_ids)


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_stats_go_to_stderr(checkpoint: str, form: tuple[str, ...]) -> None:
    result = generate(checkpoint, PROMPT, "--stats", *LAYERSKIP, *form)
    assert result.stderr.startswith("layerskip: 24 tokens, ")
    assert "draft tokens accepted" in result.stderr
    assert [line.split(": ")[0] for line in result.stderr.splitlines()] == ["layerskip", "drafts", "verification"]
    written = json.loads(result.stdout)["text"] if form else result.stdout
    assert written == expected(checkpoint).text


def test_dtype_and_device(checkpoint: str) -> None:
    result = generate(checkpoint, PROMPT, "--dtype", "bfloat16", "--device", "cpu", "--json")
    engine = Engine.from_pretrained(checkpoint, dtype="bfloat16", device="cpu")
    wanted = engine.generate(PROMPT, max_new_tokens=24, ignore_eos=True)
    assert json.loads(result.stdout)["token_ids"] == list(wanted.token_ids)


# Colours and terminals


def test_drafts_are_coloured_when_asked_for(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = generate(checkpoint, PROMPT, *LAYERSKIP, "--show-drafts")
    assert "\x1b" not in plain.stdout
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = generate(checkpoint, PROMPT, *LAYERSKIP, "--show-drafts").stdout
    assert coloured.count("\x1b[32m") > 0
    assert coloured.replace("\x1b[32m", "").replace("\x1b[0m", "") == plain.stdout
    assert "\x1b" not in generate(checkpoint, PROMPT, *LAYERSKIP).stdout
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in generate(checkpoint, PROMPT, *LAYERSKIP, "--show-drafts").stdout


class Screen:
    """A stream that remembers what was flushed, and when."""

    encoding = "utf-8"

    def __init__(self, *, terminal: bool) -> None:
        self.terminal = terminal
        self.waiting = ""
        self.flushed: list[str] = []

    def isatty(self) -> bool:
        return self.terminal

    def fileno(self) -> int:
        raise OSError("no file")

    def write(self, text: str) -> None:
        self.waiting += text

    def flush(self) -> None:
        self.flushed.append(self.waiting)
        self.waiting = ""


@pytest.mark.parametrize(("terminal", "last"), [(True, ["\n"]), (False, [])])
def test_every_piece_is_flushed_and_a_terminal_gets_a_last_newline(terminal: bool, last: list[str]) -> None:
    screen: Any = Screen(terminal=terminal)
    writer = TextWriter(screen)
    for text in ("one", "", " two"):
        writer.write(TextPiece(text, 0, "draft"))
    writer.end()
    assert screen.flushed == ["one", " two", *last]


@pytest.mark.parametrize(("text", "shown"), [("one", "one\nstats"), ("one\n", "one\nstats"), ("", "stats")])
def test_stats_in_the_same_pipe_start_on_a_line_of_their_own(tmp_path: Path, text: str, shown: str) -> None:
    def written(output: Path, errors: Path) -> tuple[str, str]:
        with output.open("a") as stdout, errors.open("a") as stderr:
            writer = TextWriter(stdout)
            writer.write(TextPiece(text, 0, "draft"))
            writer.end()
            writer.end_line_on(stderr)
            stderr.write("stats")
        return output.read_text(), errors.read_text()

    together = tmp_path / "together"
    assert written(together, together)[0] == shown
    assert written(tmp_path / "text", tmp_path / "stats") == (text, "stats")


@pytest.mark.parametrize("terminal", [True, False])
def test_stats_on_a_terminal_start_on_a_line_of_their_own(terminal: bool) -> None:
    screens: list[Any] = [Screen(terminal=False), Screen(terminal=terminal)]
    writer = TextWriter(screens[0])
    writer.write(TextPiece("one", 0, "draft"))
    writer.end_line_on(screens[1])
    assert screens[1].flushed == (["\n"] if terminal else [])


@pytest.mark.parametrize(
    ("environment", "terminal", "colour"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"TERM": "dumb"}, True, False),
        ({"NO_COLOR": "1"}, True, False),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, True, False),
    ],
)
def test_who_gets_colour(
    environment: dict[str, str], terminal: bool, colour: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    screen: Any = Screen(terminal=terminal)
    assert takes_colour(screen) == colour


# Errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("x", "--method", "layerskp"), "did you mean 'layerskip'?"),
        (("x", "--method", "uniform", "--set", "skip_ration=0.4"), "did you mean 'skip_ratio'?"),
        (("x", "--method", "uniform", "--set", "skip_ratio=2"), "skip_ratio must be at least 0 and at most 1, not 2"),
        (("x", "--method", "layerskip", "--set", "exit_layer=6"), "exit layer 6 is out of range"),
        (("x", "--set", "exit_layer"), "--set takes KEY=VALUE, not 'exit_layer'"),
        (("x", "--set", "a=1", "--set", "a=2"), "--set gives 'a' twice"),
        (("x", "--temperature", "-1"), "temperature must be at least 0"),
        (("x", "--temperature", "nan"), "temperature must be a finite number"),
        (("x", "--top-p", "0"), "top_p must be above 0 and at most 1"),
        (("x", "--max-new-tokens", "0"), "max_new_tokens must be at least 1"),
        (("x", "--max-new-tokens", "1024"), "a prompt of 1 tokens and 1024 new tokens do not fit"),
        (("x", "--stop", ""), "stop strings must be non-empty"),
        (("x", "--dtype", "float63"), "unknown dtype 'float63'"),
        (("x", "--cache-dir-limit", "2"), "--cache-dir-limit needs --cache-dir"),
        (("x", "--cache-bits", "4"), "cache_bits must be 8, or not given, not 4"),
        (("x", "--device", "gpu"), "device 'gpu' cannot be used"),
        (("x", "--model", "./nowhere"), "there is no model './nowhere'"),
        (("",), "the prompt is empty and there is no BOS"),
        (("x", "--json", "--show-drafts"), "--show-drafts colours the streamed text"),
        (("x", "--prompt-file", "y"), "not both"),
        (("--prompt-file", "nowhere.txt"), "cannot read prompt file 'nowhere.txt': No such file"),
        (("--prompt-file", "."), "cannot read prompt file '.': Is a directory"),
    ],
)
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_mistakes_are_one_line_and_exit_code_2(
    checkpoint: str, arguments: tuple[str, ...], message: str, form: tuple[str, ...]
) -> None:
    result = generate(checkpoint, *arguments, *form)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_what_reads_and_writes_closed_streams_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those who start daemons close them, and ``>&-`` does."""
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    replace_closed_streams()
    with sys.stdin as stdin, sys.stdout as stdout, sys.stderr as stderr:
        assert stdin.buffer.read() == b""
        for stream in (stdout, stderr):
            TextWriter(stream).write(TextPiece("one", 0, "target"))


@pytest.mark.parametrize("arguments", [("generate", "--temperature", "hot"), ("generate", "--nonsense"), ("nonsense",)])
def test_usage_errors_exit_with_2_too(arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("more", [(), ("--ray",)])
def test_seconds_between_savings_of_no_state(more: tuple[str, ...]) -> None:
    result = run("serve", "--model", "./nowhere", "--state-seconds", "5", *more)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "error: --state-seconds needs --state; give it, or leave this out\n"


def warn_and_refuse(*_: Any, **__: Any) -> None:
    warnings.warn("layers are unpacked", SelfSpecWarning, stacklevel=1)
    raise UnsupportedModelError("it has no layers")


def test_warnings_of_a_load_are_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfspec.loading.load_model", warn_and_refuse)
    assert run("info").stderr == "warning: layers are unpacked\nerror: it has no layers\n"


def test_warnings_of_a_server_that_loads_are_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfspec.cli.serve.brief_waits", dict)
    monkeypatch.setattr("selfspec.serve.logs.set_up_logs", dict)
    monkeypatch.setattr("selfspec.serve.serving.ServeOptions.load", warn_and_refuse)
    monkeypatch.setattr("selfspec.serve.server.run_server", lambda app, service, *_, **__: service.engine._load())
    assert run("serve", "--port", "0").stderr == "warning: layers are unpacked\nerror: it has no layers\n"


def test_prompt_that_is_not_utf8(checkpoint: str, tmp_path: Path) -> None:
    file = tmp_path / "latin1.txt"
    file.write_bytes("na\u00efve".encode("latin-1"))
    by_file = generate(checkpoint, "--prompt-file", str(file))
    assert by_file.exit_code == 2
    assert f"prompt file '{file}' is not UTF-8: byte 0xef at offset 2" in by_file.stderr
    by_stdin = generate(checkpoint, input=b"abc\xff")
    assert by_stdin.exit_code == 2
    assert "the prompt on standard input is not UTF-8: byte 0xff at offset 3" in by_stdin.stderr


def test_no_prompt_at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfspec.cli.inputs.sys.stdin", Screen(terminal=True))
    with pytest.raises(InvalidPromptError, match="there is no prompt; give PROMPT, --prompt-file"):
        read_prompt(None, None)


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_interrupt_keeps_what_was_written(
    checkpoint: str, form: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    append = Output.append

    def interrupted(self: Output, *arguments: Any) -> bool:
        if len(self.token_ids) == 10:
            raise KeyboardInterrupt
        return append(self, *arguments)

    whole = generate(checkpoint, PROMPT).stdout
    monkeypatch.setattr(Output, "append", interrupted)
    result = generate(checkpoint, PROMPT, *form)
    assert result.exit_code == 130
    assert result.stderr == "interrupted\n"
    assert whole.startswith(result.stdout)
    assert bool(result.stdout) == (not form)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_for_real(checkpoint: str) -> None:
    process = start("generate", PROMPT, "--model", checkpoint, "--max-new-tokens", "1000", "--ignore-eos")
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stderr == b"interrupted\n"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="pipes")
def test_a_reader_that_goes_away_ends_it_quietly(checkpoint: str) -> None:
    process = start("generate", PROMPT, "--model", checkpoint, "--max-new-tokens", "1000", "--ignore-eos")
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 141


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no disk that is full")
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_full_disk_is_one_line(checkpoint: str, form: tuple[str, ...]) -> None:
    with Path("/dev/full").open("wb") as full:
        process = start("generate", PROMPT, "--model", checkpoint, "--ignore-eos", *form, stdout=full)
        _, stderr = process.communicate(timeout=60)
    assert stderr == b"error: the output cannot be written: No space left on device\n"
    assert process.returncode == 2


def test_without_a_compiler_it_says_so(checkpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    kernels.find.cache_clear()
    runner._warn_once.cache_clear()
    try:
        result = generate(checkpoint, PROMPT)
    finally:
        kernels.find.cache_clear()
    assert result.exit_code == 0
    assert "warning: there are no compiled kernels, so decoding is much slower" in result.stderr


# Listings


def test_version() -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout == f"selfspec {__version__}\n"


def test_help_needs_no_torch() -> None:
    code = "import sys; from selfspec.cli import main; sys.argv = ['selfspec', '--help']\n"
    code += "try: main()\nexcept SystemExit: assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_defaults_are_those_of_python() -> None:
    defaults = SamplingParams()
    options = inspect.signature(generate_command).parameters
    shared = options.keys() & {field.name for field in fields(defaults)} - {"stop"}
    assert len(shared) == 14
    for name in shared:
        assert options[name].default == getattr(defaults, name)
    assert options["method"].default == inspect.signature(Engine).parameters["method"].default


def test_methods_lists_every_setting() -> None:
    listed = json.loads(run("methods", "--json").stdout)
    assert listed.keys() >= {*METHODS, *COMPOSITIONS}
    text = run("methods").stdout
    for name, method in listed.items():
        assert f"{name}: {method['summary']}\n    source: {method['source']}" in text
        for setting in method["settings"]:
            assert f"--set {setting['name']}=" in text
            assert setting["help"] in text
    assert "--set exit_layer=none  (int or none, at least 1)" in text


def test_info(checkpoint: str) -> None:
    facts = json.loads(run("info", "--model", checkpoint, "--json").stdout)
    assert facts["kernels"].startswith(("none (", *(level.name for level in LEVELS)))
    assert facts["family"] == "Llama"
    assert (facts["layers"], facts["sublayers"], facts["hidden_size"]) == (6, 12, 64)
    assert (facts["vocabulary"], facts["context"], facts["dtype"]) == (128, 1024, "float32")
    assert facts["bytes"]["embedding"] == facts["bytes"]["head"] == 128 * 64 * 4
    assert facts["bytes"]["mlp"] == 6 * (3 * 64 * 96 + 64) * 4
    assert facts["bytes"]["total"] == 4 * facts["parameters"] == sum(facts["bytes"].values()) - facts["bytes"]["total"]
    assert facts["windows"] == [None] * 6
    assert facts["tree_verification"] is True
    assert facts["native"]["model"] == "native" or facts["native"]["model"].startswith("Python: ")
    assert facts["chat_template"] is True
    assert set(facts["row_seconds"]) >= {"1", "2", "4"}
    assert all(0 < seconds < 60 for seconds in facts["row_seconds"].values())


def test_info_has_the_trial_of_an_accelerator(checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("selfspec.runtimes.target.is_accelerator", lambda device: True)
    monkeypatch.setattr("selfspec.runtimes.trial_store.CANDIDATES", CANDIDATES[:2] + CANDIDATES[3:4])
    facts = json.loads(run("info", "--model", checkpoint, "--json").stdout)
    assert facts["device"]["name"] == "cpu"
    assert set(facts["trial"]) == {"eager", "fused", "graphs", "8 bits", "4 bits"}
    assert facts["trial"][facts["runtime"]].endswith("(chosen)")
    assert "kernels" not in facts
    text = run("info", "--model", checkpoint).stdout
    assert "\n  graphs                  out: it runs on cuda alone\n" in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        ({1: 0.02}, "1 row 20.0 ms"),
        (
            {1: 0.01, 2: 0.0105, 4: 0.011, 8: 0.012, 16: 0.018},
            "1 row 10.0 ms; relative to it 2 rows 1.05, 4 rows 1.10, 8 rows 1.20, 16 rows 1.80. 8 rows cost 1.20 of "
            "one here: drafts of up to 7 known tokens, such as those of prompt lookup, are nearly free",
        ),
        (
            {1: 0.01, 2: 0.018, 4: 0.03},
            "1 row 10.0 ms; relative to it 2 rows 1.80, 4 rows 3.00. 2 rows cost 1.80 of one here: a draft of one "
            "known token pays where it is accepted more often than in 80% of rounds",
        ),
        (
            {1: 0.01, 2: 0.021},
            "1 row 10.0 ms; relative to it 2 rows 2.10. 2 rows cost 2.10 of one here: a draft of one known token does "
            "not pay",
        ),
        (
            {1: 0.08, 2: 0.081, 4: 0.02},
            "1 row 80.0 ms; relative to it 2 rows 1.01, 4 rows 0.25. One row took longer than several: other programs "
            "were computing; ask again when they are not",
        ),
    ],
)
def test_what_follows_from_the_costs_of_rows(seconds: dict[int, float], text: str) -> None:
    assert row_text(seconds) == text


@pytest.mark.parametrize(
    ("variant", "windows", "tied"),
    [("mistral-window", "16 positions in 6 of 6 layers", False), ("gemma3", "16 positions in 4 of 6 layers", True)],
)
def test_info_as_text(variant: str, windows: str, tied: bool, tmp_path: Path) -> None:
    text = run("info", "--model", str(save_checkpoint(tmp_path, variant))).stdout
    lines = dict(line.split("  ", 1) for line in text.splitlines())
    assert lines["windows"].strip() == windows
    assert lines["row seconds"].strip().startswith("1 row ")
    assert lines["tied embedding"].strip() == ("yes" if tied else "no")
    assert ("head 0" in lines["bytes"]) == tied


def test_info_of_what_is_not_supported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "of_tomorrow"}')
    result = run("info", "--model", str(tmp_path))
    assert result.exit_code == 2
    assert result.stderr.startswith("error: model family 'of_tomorrow' is not supported")


def test_info_takes_the_model_as_an_option_only() -> None:
    result = run("info", "smollm2")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "error: give the model with --model: selfspec info --model smollm2\n"
    assert "BARE" not in run("info", "--help").stdout


def commands_of(group: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The commands of a group and of the groups in it, each with its path; not those of other packages."""
    for name, command in group.commands.items():
        yield from commands_of(command, *path, name) if hasattr(command, "commands") else [((*path, name), command)]


def test_every_help_text_ends_with_an_example_that_is_understood() -> None:
    found = dict(commands_of(get_command(app)))
    assert {("generate",), ("chat",), ("info",), ("models", "install")} <= found.keys()
    for path, command in found.items():
        example = (command.epilog or "").partition("Example: selfspec ")[2]
        words = shlex.split(example)
        assert words[: len(path)] == list(path), f"selfspec {' '.join(path)} --help has no example"
        command.make_context(path[-1], words[len(path) :])
        assert " ".join(run(*path, "--help").stdout.split()).endswith(" ".join(example.split())), path


# The bundled checkpoint


@pytest.mark.trained
def test_defaults_write_with_the_bundled_checkpoint() -> None:
    result = run("generate", "Question: Tom has 3 bags with 5 apples each.", "--max-new-tokens", "16")
    assert result.exit_code == 0, result.stderr
    assert result.stdout


@pytest.mark.trained
def test_layerskip_on_the_early_exit_checkpoint_writes_the_same_tokens(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("Question: Tom has 3 bags with 5 apples each. How many apples does he have?\nAnswer:")
    options = ("--model", "tiny-early-exit", "--dtype", "float32", "--prompt-file", str(file), "--json")
    settings = ("--set", "exit_layer=6", "--set", "draft_length=5")
    plain = json.loads(run("generate", *options).stdout)
    drafted = json.loads(run("generate", *options, "--method", "layerskip", *settings).stdout)
    assert drafted["token_ids"] == plain["token_ids"]
    assert (drafted["settings"]["exit_layer"], drafted["settings"]["draft_length"]) == (6, 5)
    assert drafted["accepted"] > 0
