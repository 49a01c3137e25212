"""The chat: what the model reads turn by turn, what its commands do, and what stops it or does not."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from prompt_toolkit.application import create_app_session
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput
from typer.testing import Result

from helpers import commands
from helpers.checkpoints import CHAT_TEMPLATE, EOS, make_tokenizer, save_checkpoint
from helpers.gguf_files import save_gguf
from helpers.models import ROPE_SWITCH, build, plain_text, prompt
from selfspec import METHODS, Engine, SamplingParams
from selfspec.cli.chat_repl import HISTORY_FILE, ChatCommands, CommandCompleter, open_history, talk
from selfspec.cli.chat_session import ChatSession, Conversation, Message
from selfspec.cli.terminal import TextWriter
from selfspec.errors import ContextLengthError, InvalidPromptError, SelfSpecError, SelfSpecWarning
from selfspec.runtimes.runner import Runner
from selfspec.types import TextPiece

TOKENS = 24
LAYERSKIP = "layerskip exit_layer=2 draft_length=4"
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system prompts') }}{% endif %}"


@pytest.fixture(autouse=True)
def _cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_checkpoint(tmp_path_factory.mktemp("checkpoint"), chat_template=CHAT_TEMPLATE))


def new_engine(method: str = "autoregressive", template: str = CHAT_TEMPLATE, **settings: Any) -> Engine:
    return Engine(build("llama"), make_tokenizer(chat_template=template), method, settings=settings)


def new_chat(engine: Engine | None = None, max_new_tokens: int = TOKENS, **options: Any) -> ChatCommands:
    params = SamplingParams(max_new_tokens=max_new_tokens)
    return ChatCommands(ChatSession(engine or new_engine(), params, **options))


def said(*contents: str, system: str | None = None) -> list[Message]:
    """Messages that alternate between user and assistant."""
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": content} for index, content in enumerate(contents)]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def answer(*contents: str, system: str | None = None, tokens: int = TOKENS) -> str:
    """What plain decoding answers to a conversation."""
    return new_engine().generate(said(*contents, system=system), max_new_tokens=tokens).text


def line(text: str) -> str:
    return text if text.endswith("\n") else f"{text}\n"


def run(model: str, *arguments: str, lines: Sequence[str] = (), raw: bytes | None = None) -> Result:
    """The command, with a pipe for its standard input."""
    options = ("--model", model, "--max-new-tokens", str(TOKENS))
    given = raw if raw is not None else "".join(f"{text}\n" for text in lines)
    return commands.run("chat", *options, *arguments, input=given)


# The conversation


def words(messages: list[Message]) -> list[int]:
    """A token for every word, and one for every message."""
    return [0] * sum(1 + len(message["content"].split()) for message in messages)


def conversation(limit: int, max_new_tokens: int = 4, system: str | None = None) -> Conversation:
    return Conversation(words, lambda length: limit - length, max_new_tokens=max_new_tokens, system=system)


def test_a_turn_reads_all_that_was_said() -> None:
    talked = conversation(100, system="be brief")
    talked.keep(talked.begin("one"), "first")
    turn = talked.begin("two")
    assert list(turn.messages) == said("one", "first", "two", system="be brief")
    assert (len(turn.token_ids), turn.max_new_tokens, turn.left_out) == (9, 4, 0)


def test_control_tokens_in_a_message_are_text() -> None:
    session = new_chat().session
    tokenizer = session.engine.tokenizer
    assert tokenizer is not None
    turn, plain = (session.conversation.begin(text) for text in (f"one{EOS}two", "one two"))
    assert turn.token_ids.count(tokenizer.eos_token_id) == plain.token_ids.count(tokenizer.eos_token_id)
    assert f"one{EOS}two" in tokenizer.decode(turn.token_ids)


def test_the_oldest_exchanges_leave_first_and_whole() -> None:
    talked = conversation(24, system="be brief")
    for number in ("one", "two", "three"):
        talked.keep(talked.begin(number), f"answer {number}")
    turn = talked.begin("four words are this")  # 3 + 3 * 5 + 5 tokens, and room for 4 to come
    assert turn.left_out == 1
    assert list(turn.messages) == said("two", "answer two", "three", "answer three", turn.user, system="be brief")
    assert turn.max_new_tokens == 4
    assert len(talked.exchanges) == 3
    talked.keep(turn, "yes")
    assert [exchange.user for exchange in talked.exchanges] == ["two", "three", turn.user]


def test_a_message_that_could_not_be_answered_leaves_no_trace() -> None:
    talked = conversation(24)
    talked.keep(talked.begin("one"), "first")
    before = talked.exchanges
    assert talked.begin("word " * 17).left_out == 1
    with pytest.raises(ContextLengthError, match=r"has 25 tokens .* context of 24 leaves no room .* shorten it"):
        talked.begin("word " * 24)
    assert talked.exchanges == before


def test_an_answer_gets_what_the_context_leaves() -> None:
    assert conversation(40, max_new_tokens=1000).begin("word " * 29).max_new_tokens == 10
    assert conversation(40, max_new_tokens=1000).begin("word " * 38).max_new_tokens == 1


def test_old_exchanges_leave_for_a_quarter_of_the_context_at_most() -> None:
    talked = conversation(40, max_new_tokens=1000)
    talked.keep(talked.begin("one"), "word " * 20)
    assert talked.begin("word " * 6).left_out == 0
    assert talked.begin("word " * 7).left_out == 1


def test_another_system_prompt_resets() -> None:
    talked = conversation(40, system="be brief")
    talked.keep(talked.begin("one"), "first")
    talked.set_system("be long")
    assert list(talked.begin("two").messages) == said("two", system="be long")


def test_room_ends_at_the_rope_switch_of_short_prompts() -> None:
    engine = Engine(build("phi3-longrope"), method="autoregressive")
    short = engine.target.room(90)
    assert short == ROPE_SWITCH - 90 + 1
    assert engine.generate(prompt(90), max_new_tokens=short, ignore_eos=True).new_token_count == short
    with pytest.raises(ContextLengthError):
        engine.generate(prompt(90), max_new_tokens=short + 1)
    assert engine.target.room(ROPE_SWITCH + 1) == engine.target.context_limit - ROPE_SWITCH - 1


# Through a pipe


def test_a_pipe_gets_the_answers_alone(checkpoint: str) -> None:
    first = answer("hello", system="be kind")
    second = answer("hello", first, "and you?", system="be kind")
    result = run(checkpoint, "--system", "be kind", lines=["hello", "", "and you?"])
    assert result.exit_code == 0, result.stderr
    assert result.stdout == line(first) + line(second)
    assert "cut off after 24 tokens: --max-new-tokens" in result.stderr


def test_options_reach_the_answers(checkpoint: str) -> None:
    options = ("--temperature", "1.2", "--seed", "3", "--top-p", "0.9", "--top-k", "30", "--min-p", "0.01")
    params = SamplingParams(
        max_new_tokens=TOKENS, temperature=1.2, seed=3, top_p=0.9, top_k=30, min_p=0.01, repetition_penalty=1.2
    )
    wanted = new_engine().generate(said("hello"), params).text
    for method in ("suffix", "layerskip"):
        result = run(checkpoint, *options, "--repetition-penalty", "1.2", "--method", method, lines=["hello"])
        assert result.stdout == line(wanted)


def test_a_failed_line_is_one_line_of_error_and_the_chat_goes_on(checkpoint: str) -> None:
    result = run(checkpoint, raw=b"x" * 1100 + b"\nna\xefve\n/nope\nhello\n/exit\nnobody reads this\n")
    assert result.exit_code == 2
    assert result.stdout == line(answer("hello"))
    errors = [text for text in result.stderr.splitlines() if text.startswith("error: ")]
    assert ["shorten it" in errors[0], "not UTF-8: byte 0xef" in errors[1], "'/nope'" in errors[2]] == [True] * 3
    assert len(errors) == 3


def test_state_is_kept_over_an_end_of_input(checkpoint: str, tmp_path: Path) -> None:
    file = tmp_path / "state"
    for _ in range(2):
        result = run(checkpoint, "--method", "token-recycling", "--state", str(file), lines=["hello"])
        assert (result.exit_code, result.stdout) == (0, line(answer("hello")))
        assert file.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--method", "sufix"), "did you mean 'suffix'?"),
        (("--method", "suffix", "--set", "max_draft_length=0"), "max_draft_length must be at least 1"),
        (("--max-new-tokens", "0"), "max_new_tokens must be at least 1"),
        (("--method", "suffix", "--state", "s"), "suffix learns nothing"),
        (("--model", "./nowhere"), "'./nowhere'"),
    ],
)
def test_mistakes_end_it_before_the_first_message(checkpoint: str, arguments: tuple[str, ...], message: str) -> None:
    result = run(checkpoint, *arguments, lines=["hello"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_folder_without_a_template_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "model")
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    result = run(str(folder), lines=["hello"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: '{folder}' has no chat template, so it cannot chat; choose")


def test_a_gguf_file_without_a_template_is_refused(tmp_path: Path) -> None:
    """Its tokenizer is in the same file as its weights, so it is refused after they are loaded."""
    file = save_gguf(build("llama"), tmp_path / "model.gguf", chat_template=None)
    result = run(str(file), lines=["hello"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "has no chat template, so it cannot chat; choose" in result.stderr


def test_a_template_without_system_prompts() -> None:
    with pytest.raises(InvalidPromptError, match="no system prompts"):
        new_chat(new_engine(template=NO_SYSTEM + CHAT_TEMPLATE), system="be kind")


# Commands


def test_an_unknown_command_is_answered_with_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    chat = new_chat()
    chat.handle("/halp me")
    output = capsys.readouterr()
    assert output.out == ""
    assert "there is no command '/halp'; to send a message that begins with a slash, begin it with two" in output.err
    assert all(f"\n{name}" in output.err for name in chat.commands)
    assert chat.failed
    assert not chat.session.conversation.exchanges


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    chat = new_chat()
    chat.handle("/help")
    assert [text.split()[0] for text in capsys.readouterr().err.splitlines()] == list(chat.commands)
    assert not chat.failed


def test_two_slashes_send_one(capsys: pytest.CaptureFixture[str]) -> None:
    new_chat().handle("//usr is a folder")
    assert capsys.readouterr().out == line(answer("/usr is a folder"))


def test_method_switches_what_drafts_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    chat = new_chat()
    target = chat.session.engine.target
    chat.handle("hello")
    chat.handle(f"/method {LAYERSKIP}")
    assert "method: layerskip exit_layer=2 draft_length=4" in capsys.readouterr().err
    chat.handle("and you?")
    assert chat.session.last is not None
    method, counts = chat.session.last
    assert method == "layerskip"
    assert counts.drafted > counts.accepted > 0
    assert capsys.readouterr().out == line(answer("hello", answer("hello"), "and you?"))
    assert chat.session.engine.target is target


def test_method_alone_says_which_and_lists_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    new_chat().handle("/method")
    assert capsys.readouterr().err == f"method: autoregressive\nmethods: {', '.join(METHODS)}\n"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("/method sufix", "did you mean 'suffix'?"),
        ("/method uniform skip_ration=1", "did you mean 'skip_ratio'?"),
        ("/method uniform skip_ratio", "/method takes KEY=VALUE, not 'skip_ratio'"),
        ("/method layerskip exit_layer=6", "exit layer 6 is out of range"),
    ],
)
def test_a_mistaken_method_changes_nothing(command: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    chat = new_chat()
    engine = chat.session.engine
    chat.handle(command)
    output = capsys.readouterr().err
    assert output.startswith("error: ")
    assert message in output
    assert output.count("\n") == 1
    assert chat.session.engine is engine


def test_warnings_of_a_switch_are_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def warn(*_: Any) -> None:
        warnings.warn("it drafts nothing", SelfSpecWarning, stacklevel=1)

    chat = new_chat()
    monkeypatch.setattr(ChatSession, "switch", warn)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chat.handle("/method suffix")
    assert capsys.readouterr().err == "warning: it drafts nothing\nmethod: autoregressive\n"


def test_a_method_keeps_learning_over_turns_and_switches() -> None:
    chat = new_chat(new_engine("token-recycling"))
    learner = chat.session.engine
    chat.handle("hello")
    learned = learner.method.state().tensors
    chat.handle("/method suffix")
    chat.handle("/method paper(del, authors) d_max=7")
    assert chat.session.engine.method.name == "paper(del, authors)"
    assert chat.session.engine.method.settings.d_max == 7
    chat.handle("/method token-recycling")
    assert chat.session.engine is learner
    chat.handle("something else")
    assert any(not torch.equal(learned[name], tensor) for name, tensor in learner.method.state().tensors.items())


def test_reset_forgets_the_conversation_but_not_the_system_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    chat = new_chat(system="be kind")
    for text in ("hello", "/reset", "hello"):
        chat.handle(text)
    assert capsys.readouterr().out == 2 * line(answer("hello", system="be kind"))


def test_system_changes_the_prompt_and_resets(capsys: pytest.CaptureFixture[str]) -> None:
    chat = new_chat()
    for text in ("hello", "/system be kind", "hello", "/system"):
        chat.handle(text)
    output = capsys.readouterr()
    assert output.out == line(answer("hello")) + line(answer("hello", system="be kind"))
    assert output.err.endswith("system prompt: be kind\n")


def test_a_refused_system_prompt_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    chat = new_chat(new_engine(template=NO_SYSTEM + CHAT_TEMPLATE))
    chat.handle("hello")
    chat.handle("/system be kind")
    assert "error: the chat template refused the messages: no system prompts" in capsys.readouterr().err
    assert chat.session.conversation.system is None
    assert len(chat.session.conversation.exchanges) == 1


def test_stats_are_those_of_the_generations(capsys: pytest.CaptureFixture[str]) -> None:
    chat = new_chat(new_engine("layerskip", exit_layer=2, draft_length=4))
    chat.handle("/stats")
    assert capsys.readouterr().err == "there is no answer yet\n"
    engine = new_engine("layerskip", exit_layer=2, draft_length=4)
    first = engine.generate(said("hello"), max_new_tokens=TOKENS)
    second = engine.generate(said("hello", first.text, "why"), max_new_tokens=TOKENS)
    for text in ("hello", "why", "/stats"):
        chat.handle(text)
    last, total = capsys.readouterr().err.splitlines()[-2:]
    assert last.startswith(f"last answer, layerskip: {second.new_token_count} tokens, ")
    assert f"{second.accepted} of {second.drafted} draft tokens accepted ({second.acceptance_rate:.0%})" in last
    assert last.endswith(f"mean generated length {second.mean_generated_length:.2f}")
    assert total.startswith(f"whole chat, 2 answers: {first.new_token_count + second.new_token_count} tokens, ")
    assert f"{first.accepted + second.accepted} of {first.drafted + second.drafted} draft tokens" in total
    assert second.accepted > 0
    assert chat.session.total.seconds > 0


def test_drafts_toggles_the_colours(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    chat = new_chat(new_engine("layerskip", exit_layer=2, draft_length=4))
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = []
    for _ in range(2):
        chat.handle("/drafts")
        chat.handle("/reset")
        chat.handle("hello")
        coloured.append(capsys.readouterr().out)
    assert "\x1b[32m" in coloured[0]
    assert coloured[0].replace("\x1b[32m", "").replace("\x1b[0m", "") == coloured[1] == line(answer("hello"))


# A context that is full


def test_what_leaves_the_conversation_is_said_once_a_turn(capsys: pytest.CaptureFixture[str]) -> None:
    chat = new_chat()
    chat.handle("x" * 700)
    first = capsys.readouterr()
    assert "fits the context" not in first.err
    chat.handle("y" * 300)
    second = capsys.readouterr()
    assert second.err.count("no longer fits the context: the oldest message and its answer are left out") == 1
    assert second.out == line(answer("y" * 300))
    chat.handle("z")
    third = capsys.readouterr()
    assert "fits the context" not in third.err
    assert third.out == line(answer("y" * 300, second.out.removesuffix("\n"), "z"))


def test_a_message_longer_than_the_context_is_refused_and_not_kept(capsys: pytest.CaptureFixture[str]) -> None:
    chat = new_chat()
    chat.handle("hello")
    chat.handle("x" * 1024)
    chat.handle("and you?")
    output = capsys.readouterr()
    assert output.err.count("error: the message has 1041 tokens with the system prompt") == 1
    assert output.out == line(answer("hello")) + line(answer("hello", answer("hello"), "and you?"))


def test_an_answer_that_fills_the_context_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    chat = new_chat()
    chat.handle("x" * 1000)
    assert "(cut off after 7 tokens: the context is full)" in capsys.readouterr().err


# Ctrl-C


def interrupt_writing(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """A Ctrl-C that arrives with a piece of an answer; the pieces before it were written."""
    write, seen = TextWriter.write, []

    def interrupted(self: TextWriter, piece: TextPiece) -> None:
        seen.append(piece)
        if len(seen) == at + 1:
            monkeypatch.setattr(TextWriter, "write", write)
            raise KeyboardInterrupt
        write(self, piece)

    monkeypatch.setattr(TextWriter, "write", interrupted)


def test_a_stopped_answer_stays_as_far_as_it_was_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = new_chat(new_engine("layerskip", exit_layer=2, draft_length=4), interactive=True)
    interrupt_writing(monkeypatch, at=10)
    chat.handle("hello")
    output = capsys.readouterr()
    kept = chat.session.conversation.exchanges[0].assistant
    assert output.err == "(stopped)\n"
    assert kept.startswith(output.out.removesuffix("\n"))
    assert answer("hello").startswith(kept)
    assert 0 < len(kept) < len(answer("hello"))
    assert chat.session.last is not None
    assert chat.session.last[1].tokens == 11
    assert chat.session.last[1].drafted > 0
    chat.handle("and you?")
    assert capsys.readouterr().out == line(answer("hello", kept, "and you?"))


def test_a_message_stopped_before_the_first_word_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = new_chat(interactive=True)
    with interrupt_forward(1):
        chat.handle("hello")
    assert capsys.readouterr() == ("", "(stopped before the first word; the message is dropped)\n")
    assert not chat.session.conversation.exchanges
    assert chat.session.last is None


def test_through_a_pipe_it_ends_the_command(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_writing(monkeypatch, at=3)
    result = run(checkpoint, lines=["hello", "and you?"])
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")
    assert answer("hello").startswith(result.stdout.removesuffix("\n"))


@contextlib.contextmanager
def interrupt_forward(call: int) -> Iterator[None]:
    """A Ctrl-C in the middle of the model: after half of the sublayers of its n-th run, which are written."""
    run_sublayers, calls = Runner.run, []

    def interrupted(self: Runner, hidden_states: torch.Tensor, sublayers: Any, *rest: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) < call:
            return run_sublayers(self, hidden_states, sublayers, *rest, **options)
        chosen = list(sublayers)
        run_sublayers(self, hidden_states, chosen[: len(chosen) // 2], *rest)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "run", interrupted)
        yield
    assert len(calls) == call


@pytest.mark.parametrize("method", ["autoregressive", "suffix", "layerskip", "swift", "token-recycling", "clasp"])
def test_an_engine_writes_the_right_text_after_interruptions(method: str) -> None:
    engine = Engine(build("llama"), method=method)
    for call in (1, 2, 5, 9):
        with interrupt_forward(call), pytest.raises(KeyboardInterrupt):
            engine.generate(prompt(40), max_new_tokens=32, ignore_eos=True)
        result = engine.generate(prompt(12), max_new_tokens=32, ignore_eos=True)
        assert result.token_ids == plain_text("llama", prompt(12), 32)
        assert (result.drafted > 0) == (method != "autoregressive")


# In a terminal


@pytest.fixture
def keyboard() -> Iterator[PipeInput]:
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        yield pipe


def typed(keyboard: PipeInput, text: str, **options: Any) -> ChatCommands:
    """A chat in which this is typed."""
    chat = new_chat(interactive=True, **options)
    keyboard.send_text(text)
    talk(chat)
    return chat


@pytest.mark.parametrize("leaving", ["/exit\r", "\x04"])
def test_messages_are_typed_and_the_chat_is_left(
    leaving: str, keyboard: PipeInput, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(keyboard, f"hello\rand you?\r{leaving}")
    assert capsys.readouterr().out == line(answer("hello")) + line(answer("hello", answer("hello"), "and you?"))


@pytest.mark.parametrize("keys", ["\x1b[200~one\ntwo\x1b[201~\r", "one\x1b\rtwo\r"])
def test_a_message_of_several_lines_is_pasted_or_typed(keys: str, keyboard: PipeInput) -> None:
    chat = typed(keyboard, f"{keys}\x04")
    assert [exchange.user for exchange in chat.session.conversation.exchanges] == ["one\ntwo"]


def test_ctrl_c_at_the_prompt_clears_the_line(keyboard: PipeInput) -> None:
    chat = typed(keyboard, "not this\x03but this\r\x04")
    assert [exchange.user for exchange in chat.session.conversation.exchanges] == ["but this"]


def test_ctrl_c_during_an_answer_stops_it_and_not_the_chat(
    keyboard: PipeInput, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt_writing(monkeypatch, at=5)
    chat = typed(keyboard, "hello\rand you?\r\x04")
    first = chat.session.conversation.exchanges[0].assistant
    output = capsys.readouterr()
    assert output.err.startswith("(stopped)\n")
    assert output.out.endswith(line(answer("hello", first, "and you?")))
    assert first != answer("hello")


def test_the_history_outlives_the_session(keyboard: PipeInput, tmp_path: Path) -> None:
    typed(keyboard, "hello\r/stats\r\x04")
    file = tmp_path / "cache" / "selfspec" / HISTORY_FILE
    assert list(open_history().load_history_strings()) == ["/stats", "hello"]
    assert sys.platform == "win32" or file.stat().st_mode & 0o777 == 0o600
    chat = typed(keyboard, "\x1b[A\x1b[A\r\x04")  # up, up
    assert [exchange.user for exchange in chat.session.conversation.exchanges] == ["hello"]


@pytest.mark.parametrize("obstacle", ["folder", "file"])
def test_a_history_that_cannot_be_written_stops_nothing(obstacle: str, keyboard: PipeInput, tmp_path: Path) -> None:
    if obstacle == "folder":
        (tmp_path / "cache" / "selfspec" / HISTORY_FILE).mkdir(parents=True)
    else:
        (tmp_path / "cache").write_text("")
    chat = typed(keyboard, "hello\r\x04")
    assert [exchange.user for exchange in chat.session.conversation.exchanges] == ["hello"]


@pytest.mark.parametrize(
    ("text", "completions"),
    [
        ("/me", ["/method"]),
        ("/method lay", ["layerskip", "layerskip-fs"]),
        ("/reset ", []),
        ("hello", []),
        ("hello /me", []),
    ],
)
def test_completion(text: str, completions: list[str]) -> None:
    completer = CommandCompleter({"/method": ("layerskip", "layerskip-fs", "suffix"), "/reset": ()})
    found = list(completer.get_completions(Document(text), CompleteEvent()))
    assert [completion.text for completion in found] == completions
    assert all(-completion.start_position == len(text.split(" ")[-1]) for completion in found)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals")
def test_ctrl_c_for_real(checkpoint: str, tmp_path: Path) -> None:
    """The whole command on a terminal of its own, whose line discipline makes a signal of the key."""
    import fcntl
    import termios

    runtime = ("--runtime", "fused")  # with nothing in the cache folder, the compiled one would be built
    environment = {"OMP_NUM_THREADS": "1", "PROMPT_TOOLKIT_NO_CPR": "1", "TERM": "xterm"}
    ours, theirs = os.openpty()

    def take_terminal() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    process = subprocess.Popen(
        [sys.executable, "-m", "selfspec", "chat", "--model", checkpoint, "--max-new-tokens", "900", *runtime],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        preexec_fn=take_terminal,
        env={**os.environ, **environment, "XDG_CACHE_HOME": str(tmp_path)},
    )
    os.close(theirs)
    screen = ""

    def read_until(text: str) -> None:
        nonlocal screen
        while text not in screen:
            screen += os.read(ours, 4096).decode(errors="replace")
        screen = screen.partition(text)[2]

    timer = threading.Timer(120, process.kill)
    timer.start()
    try:
        read_until("Ctrl-D ends the chat.")
        os.write(ours, b"three\r")
        read_until(max(re.findall("[!-~]+", answer("three")), key=len))
        os.write(ours, b"\x03")
        read_until("(stopped)")
        os.write(ours, b"/stats\r")
        read_until("whole chat, 1 answer:")
        os.write(ours, b"/exit\r")
        assert process.wait(timeout=60) == 0
    finally:
        timer.cancel()
        process.kill()  # if it still runs
        process.wait()
        os.close(ours)


def test_every_error_a_turn_can_have_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = new_chat()

    def fail(*_: Any) -> None:
        raise SelfSpecError("the first line\nand the second")

    with monkeypatch.context() as patch:
        patch.setattr(TextWriter, "write", fail)
        chat.handle("hello")
    assert "error: the first line and the second\n" in capsys.readouterr().err
    assert not chat.session.conversation.exchanges


def test_a_turn_reads_only_what_is_new() -> None:
    engine = Engine(build("llama"), make_tokenizer(chat_template=CHAT_TEMPLATE), "suffix", prefix_cache=2**22)
    chat = new_chat(engine)
    chat.handle("one two three")
    assert chat.session.total.cached == 0
    chat.handle("/method autoregressive")  # another method has the same keys and values
    chat.handle("four")
    exchange = chat.session.conversation.exchanges
    assert exchange[0].assistant == answer("one two three")
    assert exchange[1].assistant == answer("one two three", exchange[0].assistant, "four")
    assert chat.session.total.cached >= len(engine.encode(said("one two three"))) - 5
