"""Questions become prompts, in a chat or as text."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.checkpoints import CHAT_TEMPLATE, make_tokenizer
from helpers.models import build, prompt
from measured_runs import PROMPTS, SHORT, SUITE, Watcher, measure, options
from selfspec import Engine
from selfspec.errors import InvalidParameterError
from selfspec.loading import bundled_models, load_model
from selfspec.types import SamplingParams
from selfspec_lab.bench.report import write_report
from selfspec_lab.bench.run.chat import decide_chat, marks_turns
from selfspec_lab.bench.run.folder import RunFolder
from selfspec_lab.bench.run.prompts import answer_suite
from selfspec_lab.bench.run.runner import Run
from selfspec_lab.bench.suites.types import Question, Suite


def test_later_turns_follow_plain_answers() -> None:
    plain = Engine(build("llama"), make_tokenizer(), method="autoregressive")
    prompts, skipped = answer_suite(SUITE, plain, SamplingParams(max_new_tokens=12))  # as texts
    assert skipped == []
    first, second = prompts[1], prompts[2]
    answer = plain.generate("Once upon a time there was", max_new_tokens=12)
    assert first.answer == answer.token_ids
    expected = f"Once upon a time there was\n\n{answer.text}\n\nAnd then?"
    assert list(second.token_ids) == plain.encode(expected)
    assert second.answer == plain.generate(expected, max_new_tokens=12).token_ids


def test_chats_go_through_the_template() -> None:
    plain = Engine(build("llama"), make_tokenizer(chat_template=CHAT_TEMPLATE), method="autoregressive")
    prompts, _ = answer_suite(replace(SUITE, questions=SUITE.questions[1:]), plain, SHORT, chat=True)
    assert list(prompts[0].token_ids) == plain.encode("user: Once upon a time there was\nassistant:")
    text = plain.generate(list(prompts[0].token_ids), max_new_tokens=4).text
    messages = f"user: Once upon a time there was\nassistant: {text}\nuser: And then?\nassistant:"
    assert list(prompts[1].token_ids) == plain.encode(messages)


def test_in_a_chat_a_question_says_what_it_wants_and_a_passage_stays_as_it_is() -> None:
    plain = Engine(build("llama"), make_tokenizer(chat_template=CHAT_TEMPLATE), method="autoregressive")
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
    plain = Engine(build("llama"), make_tokenizer(chat_template=CHAT_TEMPLATE), method="autoregressive")
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
    with pytest.raises(InvalidParameterError, match=r"no prompt of the suite fits the model: .*1020 tokens.*--context"):
        measure(tmp_path / "out", suite=suite)
    assert not (tmp_path / "out").exists()
