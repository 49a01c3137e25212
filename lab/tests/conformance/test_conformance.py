"""``selfspec conformance``: what it finds of servers that diverge, and what it says of those that do not answer."""

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from helpers.checkpoints import CHAT_TEMPLATE, make_tokenizer
from helpers.commands import run
from helpers.models import build
from helpers.serving import listening
from scripted_api import CHANGED, CHOSEN, MODEL, OTHER, Asked, Script, prompt_of, serving, words
from selfspec.engine import Engine
from selfspec.serve.served_engine import ServedEngine
from selfspec_lab.conformance.checks import all_checks

QUICK = ("--prompts", "2", "--tokens", "8", "--at-once", "2,4")
CHECKS = [check.name for check in all_checks((2, 4))]
ONE_INTERFACE = ("/v1/completions",)
"""The paths of a server whose chats are not asked, where they would show nothing more."""
Kind = tuple[str, str]


@pytest.fixture(autouse=True)
def _entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command, whether or not the package was installed since it exists."""
    entry = EntryPoint("conformance", "selfspec_lab.cli.conformance:conformance", "selfspec.commands")
    monkeypatch.setattr("selfspec.cli.plugins.entry_points", lambda group: [entry])


@pytest.fixture
def start() -> Iterator[Callable[[Script], str]]:
    with ExitStack() as stack:
        yield lambda script: stack.enter_context(serving(script))


def ask(url: str, *options: str) -> Result:
    return run("conformance", url, *QUICK, *options)


def report(url: str, *options: str, code: int = 0) -> Any:
    result = ask(url, "--json", *options)
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def statuses(found: Any, interface: str = "completions") -> dict[str, str]:
    return {each["check"]: each["status"] for each in found["results"] if each["interface"] == interface}


def diverged(found: Any, interface: str = "completions") -> set[str]:
    return {check for check, status in statuses(found, interface).items() if status == "diverged"}


def result_of(found: Any, check: str, interface: str = "completions") -> Any:
    [one] = [each for each in found["results"] if (each["check"], each["interface"]) == (check, interface)]
    return one


class TestDivergences:
    def test_a_server_that_conforms_passes_every_check(self, start: Callable[[Script], str]) -> None:
        card = {"selfspec": {"methods": ["auto"], "method": "auto"}}
        found = report(start(Script(card=card, accepted=True)))
        for interface in ("completions", "chat"):
            assert statuses(found, interface) == dict.fromkeys(CHECKS, "passed")
        assert all(each["compared"] >= 2 for each in found["results"])
        assert found["server"] == {"engine": "script", "version": "1.2.3", "model": MODEL, "chooses_drafts": True}
        assert found["not_asked"] == {}

    @pytest.mark.parametrize("interface", ["completions", "chat"])
    def test_the_first_differing_token_and_its_margin_are_named(
        self, interface: str, start: Callable[[Script], str]
    ) -> None:
        found = report(start(Script(lambda asked: bool(asked.body["stream"]))), code=1)
        assert diverged(found, interface) == {"streamed"}
        one = result_of(found, "streamed", interface)
        assert (one["compared"], len(one["divergences"])) == (2, 2)
        for divergence in one["divergences"]:
            field = "prompt" if interface == "completions" else "messages"
            tokens = words(prompt_of({field: divergence["prompt"]}), None, 8)
            assert divergence["token"] == CHANGED
            assert divergence["expected_token"] == tokens[CHANGED]
            assert divergence["found_token"] == f"{tokens[CHANGED]}x"
            assert divergence["margin"] == pytest.approx(CHOSEN - OTHER)
            assert divergence["expected"] == "".join(tokens)
            assert divergence["found"].startswith("".join(tokens[:CHANGED]) + divergence["found_token"])

    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            (lambda asked: plain(asked) and asked.body in asked.before, {"repeated", "among 2", "among 4"}),
            (lambda asked: asked.most_running >= 2 and not asked.body["stream"], {"among 2", "among 4"}),
            (lambda asked: asked.most_running >= 4, {"among 4"}),
            (lambda asked: asked.dropped > 0 and asked.body["max_tokens"] == 8, set()),
            (lambda asked: known(asked) == "beginning", {"prefix known", "second turn"}),
            (lambda asked: "seed" in asked.body and asked.body in asked.before, {"seed"}),
        ],
        ids=["repeated", "among others", "among four", "after a cancel", "prefix", "seed"],
    )
    def test_each_check_finds_its_divergence(
        self, changes: Callable[[Asked], bool], expected: set[str], start: Callable[[Script], str]
    ) -> None:
        found = report(start(Script(changes, paths=ONE_INTERFACE)), code=1)
        beside = {"others cancelled"}  # also asks again, and beside another
        assert expected <= diverged(found) <= expected | beside
        if not expected:
            assert diverged(found) == beside

    def test_what_only_an_empty_cache_shows(self, start: Callable[[Script], str]) -> None:
        """A server whose keys of its own answers differ from those of a prompt; it knows a field that leaves them."""

        def follows(asked: Asked) -> bool:
            return "Now say the same" in prompt_of(asked.body) and "cache_salt" not in asked.body

        found = report(start(Script(follows)), code=1)
        assert diverged(found) == diverged(found, "chat") == {"second turn"}
        refusing = Script(follows, refuses=lambda body: "no cache_salt here" if "cache_salt" in body else "")
        assert diverged(report(start(refusing))) == set()

    def test_with_and_without_speculation_by_a_second_server(self, start: Callable[[Script], str]) -> None:
        reference = start(Script())
        same = report(start(Script(accepted=True)), "--reference", reference)
        assert result_of(same, "speculation")["status"] == "passed"
        assert "2 draft tokens accepted" in result_of(same, "speculation")["detail"]
        assert same["reference"]["engine"] == "script"
        other = report(start(Script(lambda _: True)), "--reference", reference, code=1)
        assert diverged(other) == diverged(other, "chat") == {"speculation"}

    def test_with_and_without_speculation_by_a_field(self, start: Callable[[Script], str]) -> None:
        card = {"selfspec": {"methods": ["auto"], "method": "auto"}}
        found = report(start(Script(lambda asked: "speculative" in asked.body, card=card)), code=1)
        assert diverged(found) == diverged(found, "chat") == {"speculation"}

    def test_a_server_that_accepted_no_draft_shows_nothing(self, start: Callable[[Script], str]) -> None:
        counter = (200, "text/plain", b"vllm:spec_decode_num_accepted_tokens_total 5.0\n")
        script = Script(answers=lambda path, _: counter if path == "/metrics" else None)
        found = report(start(script), "--reference", start(Script()))
        assert result_of(found, "speculation")["status"] == "not supported"


def plain(asked: Asked) -> bool:
    return asked.body["temperature"] == 0 and not asked.body["stream"] and "Volume" not in prompt_of(asked.body)


def known(asked: Asked) -> str:
    """How much of a prompt came before: ``all`` of it, its ``beginning``, or nothing."""
    prompt, before = prompt_of(asked.body), [prompt_of(body) for body in asked.before]
    if prompt in before:
        return "all"
    return "beginning" if any(each[:60] == prompt[:60] for each in before) else ""


class TestWithoutLogprobs:
    def test_the_characters_are_named(self, start: Callable[[Script], str]) -> None:
        script = Script(lambda asked: asked.body["stream"], refuses=lambda body: "no logprobs" * ("logprobs" in body))
        [first, _] = result_of(report(start(script), code=1), "streamed")["divergences"]
        assert (first["token"], first["margin"]) == (None, None)
        tokens = words(prompt_of({"prompt": first["prompt"]}), None, 8)
        assert first["place"] == len("".join(tokens[: CHANGED + 1]))  # an x follows there
        assert first["found_token"].startswith("x")
        assert not first["expected_token"].startswith("x")


class TestNotSupported:
    def test_an_interface_that_is_not_there(self, start: Callable[[Script], str]) -> None:
        found = report(start(Script(paths=ONE_INTERFACE)))
        assert set(statuses(found)) == set(CHECKS)
        assert statuses(found, "chat") == {}
        assert re.search("status 404 at http.*/v1/chat/completions", found["not_asked"]["chat"])

    def test_fields_that_are_refused(self, start: Callable[[Script], str]) -> None:
        def refuses(body: dict[str, Any]) -> str:
            return next((f"no {name} here" for name in ("seed", "stream") if body.get(name)), "")

        found = report(start(Script(refuses=refuses)))
        checks = statuses(found)
        assert {name for name, status in checks.items() if status == "not supported"} == {
            *("streamed", "others cancelled", "seed", "speculation")
        }
        assert "no seed here" in result_of(found, "seed")["detail"]

    @pytest.mark.parametrize(("cached", "status"), [(0, "not supported"), (7, "passed"), (None, "passed")])
    def test_a_cache_that_knows_nothing(self, cached: int | None, status: str, start: Callable[[Script], str]) -> None:
        found = statuses(report(start(Script(cached=cached, paths=ONE_INTERFACE))))
        assert (found["prefix known"], found["second turn"]) == (status, status)

    def test_a_seed_that_is_ignored(self, start: Callable[[Script], str]) -> None:
        script = Script(paths=ONE_INTERFACE)
        script.tokens = lambda asked: Script.tokens(script, Asked({**asked.body, "seed": 1}, 1, [], 0))  # type: ignore[method-assign]
        assert result_of(report(start(script)), "seed")["status"] == "not supported"


HTML = (200, "text/html", b"<html><title>A proxy</title></html>")


class TestFaults:
    """A clear line and exit code 2, no traceback."""

    def refused(self, url: str, *options: str) -> str:
        result = ask(url, *options)
        assert result.exit_code == 2, result.output
        [line] = result.stderr.strip().splitlines()
        assert line.startswith("error: ")
        return line

    def test_nothing_listens(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as closed:
            port = closed.getsockname()[1]
        assert f"the connection to http://127.0.0.1:{port} failed" in self.refused(f"http://127.0.0.1:{port}")

    def test_a_silent_server(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            url = f"http://127.0.0.1:{silent.getsockname()[1]}"
            assert "gave no complete answer within 0.5 seconds" in self.refused(url, "--timeout", "0.5")

    def test_an_answer_that_comes_byte_by_byte(self) -> None:
        """Each byte is in time, the answer is not."""
        with socket.create_server(("127.0.0.1", 0)) as slow:
            thread = threading.Thread(target=trickle, args=(slow,), daemon=True)
            thread.start()
            url = f"http://127.0.0.1:{slow.getsockname()[1]}"
            assert "gave no complete answer within 1 seconds" in self.refused(url, "--timeout", "1")
        thread.join(10)

    @pytest.mark.parametrize(
        ("answer", "line"),
        [
            (HTML, "answered with text/html, not application/json"),
            ((502, "text/html", b"<html>Bad Gateway</html>"), "/v1/models: a body of 24 bytes"),
            ((500, "application/json", b'{"error": {"message": "out of order"}}'), "out of order"),
            ((401, "application/json", b'{"detail": "who?"}'), "give it by --api-key: who?"),
            ((200, "application/json", b'{"data": ['), "no valid JSON"),
            ((200, "application/json", b'{"data": []}'), "lists no model; name one by --model"),
            ((200, "application/json", b"[1, 2]"), "lists no model; name one by --model"),
        ],
    )
    def test_answers_about_the_models(
        self, answer: tuple[int, str, bytes], line: str, start: Callable[[Script], str]
    ) -> None:
        assert line in self.refused(start(Script(answers=lambda path, _: answer if path == "/v1/models" else None)))

    @pytest.mark.parametrize(
        ("answer", "line"),
        [
            (HTML, "/v1/completions answered with text/html"),
            ((500, "application/json", b"{}"), "/v1/completions: a body of 2 bytes"),
            ((200, "application/json", b'{"text": "hello"}'), "the answer has no 'choices'"),
            ((200, "application/json", b'{"error": "broken"}'), "the answer is an error: broken"),
            ((200, "application/json", b'{"choices": [{"text": "a"}]}'), "the answer has no 'finish_reason'"),
            ((200, "application/json", b'{"choices": [{"text": 3, "finish_reason": "stop"}]}'), "answers are empty"),
        ],
    )
    def test_answers_to_all_requests(
        self, answer: tuple[int, str, bytes], line: str, start: Callable[[Script], str]
    ) -> None:
        assert line in self.refused(start(Script(answers=lambda _, body: answer if body else None)))

    @pytest.mark.parametrize(
        ("script", "line"),
        [
            (Script(cuts_streams=True), "only half of it came"),
            (Script(answers=lambda _, body: HTML if body.get("stream") else None), "text/html, not text/event-stream"),
            (
                Script(
                    answers=lambda _, body: (
                        (200, "text/event-stream", b'data: {"error": {"message": "gone"}}\n\n')
                        if body.get("stream")
                        else None
                    )
                ),
                "the answer is an error: gone",
            ),
            (
                Script(
                    answers=lambda _, body: (200, "text/event-stream", b"data: {\n\n") if body.get("stream") else None
                ),
                "no valid JSON",
            ),
        ],
        ids=["half a stream", "HTML", "an error in a stream", "no JSON"],
    )
    def test_streams(self, script: Script, line: str, start: Callable[[Script], str]) -> None:
        script.paths = ONE_INTERFACE
        found = report(start(script), code=2)
        one = result_of(found, "streamed")
        assert (one["status"], one["compared"]) == ("failed", 0)
        assert line in one["detail"]
        assert statuses(found)["repeated"] == "passed"

    def test_a_server_that_falls_silent(self, start: Callable[[Script], str]) -> None:
        def sleeps(_: str, body: dict[str, Any]) -> None:
            if body.get("seed"):
                time.sleep(2)

        one = result_of(report(start(Script(answers=sleeps, paths=ONE_INTERFACE)), "--timeout", "1.5", code=2), "seed")
        assert (one["status"], "no complete answer within 1.5 seconds" in one["detail"]) == ("failed", True)

    def test_a_stream_that_the_server_ends_for_another_request(self, start: Callable[[Script], str]) -> None:
        script = Script(interrupts=True, paths=ONE_INTERFACE)
        one = result_of(report(start(script), code=2), "others cancelled")
        assert one["status"] == "failed"
        assert one["compared"] in (0, 2), "beside the first request, or on a busy machine beside the second"
        assert one["detail"].startswith("a stream beside another request: the stream ended")

    def test_a_divergence_counts_more_than_a_fault(self, start: Callable[[Script], str]) -> None:
        script = Script(lambda asked: asked.body in asked.before, cuts_streams=True, paths=ONE_INTERFACE)
        found = report(start(script), code=1)
        assert (statuses(found)["repeated"], statuses(found)["streamed"]) == ("diverged", "failed")

    @pytest.mark.parametrize(
        ("options", "line"),
        [
            (("--prompts", "0"), "--prompts is from 1 to 30, not 0"),
            (("--prompts", "31"), "--prompts is from 1 to 30, not 31"),
            (("--tokens", "0"), "--tokens is at least 1, not 0"),
            (("--at-once", "2,x"), "--at-once has numbers separated by commas, not '2,x'"),
            (("--at-once", "1"), "--at-once has numbers of at least 2"),
            (("--out", "."), "--out '.' is a folder"),
            (("--timeout", "1e9"), "--timeout is at most 86400 seconds, not 1000000000"),
            (("--api-key", "schlüssel"), "--api-key has characters that no header can have"),
            (("--reference", "localhost:8000"), "'localhost:8000' is no URL of a server"),
        ],
    )
    def test_options(self, options: tuple[str, ...], line: str, start: Callable[[Script], str]) -> None:
        script = Script()
        assert line in self.refused(start(script), *options)
        assert script.bodies == []

    @pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "ftp://host", "http://", "http://host:port", "http://h?a=b"])
    def test_urls(self, url: str) -> None:
        assert "is no URL of a server" in self.refused(url)


def trickle(listening: socket.socket) -> None:
    """Answers the first connection with a byte of a head every tenth of a second."""
    connection, _ = listening.accept()
    with connection:
        try:
            for byte in b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}":
                connection.sendall(bytes([byte]))
                time.sleep(0.1)
        except OSError:
            pass


class TestOutput:
    def test_the_table_and_the_file(self, start: Callable[[Script], str], tmp_path: Path) -> None:
        url = start(Script(lambda asked: asked.body["stream"]))
        result = ask(url, "--out", str(tmp_path / "report.json"))
        assert result.exit_code == 1
        assert re.search(r"completions\s+│ streamed\s+│ diverged: 2 of 2", result.stdout)
        assert re.search(r"chat\s+│ repeated\s+│ passed: 2", result.stdout)
        assert f"token {CHANGED}: ' word" in result.stdout
        assert "margin 0.2500" in result.stdout
        found = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
        assert found["settings"] == {"prompts": 2, "tokens": 8, "at_once": [2, 4]}
        assert found["date"].endswith("+00:00")
        assert diverged(found) == {"streamed"}

    def test_names_that_the_user_gives(self, start: Callable[[Script], str]) -> None:
        script = Script(paths=ONE_INTERFACE)
        found = report(f"{start(script)}/v1/", "--model", "mine", "--engine", "an engine 7")
        assert found["server"] == {"engine": "an engine 7", "version": None, "model": "mine", "chooses_drafts": False}
        assert {body["model"] for body in script.bodies} == {"mine"}


class TestOwnServer:
    def test_passes_every_check(self) -> None:
        engine = Engine(build("llama"), make_tokenizer(chat_template=CHAT_TEMPLATE), "suffix")
        with listening(ServedEngine(lambda: engine)) as url:
            found = report(url, "--tokens", "12")
        for interface in ("completions", "chat"):
            assert statuses(found, interface) == dict.fromkeys(CHECKS, "passed")
        for check in ("prefix known", "second turn"):
            cached = re.search(r"(\d+) prompt tokens from the cache, 0 where", result_of(found, check)["detail"])
            assert cached is not None
            assert int(cached[1]) > 100
        accepted = re.search(r"'speculative'; (\d+) draft tokens accepted", result_of(found, "speculation")["detail"])
        assert accepted is not None
        assert int(accepted[1]) > 0
        assert found["server"]["engine"] == "selfspec"

    def test_a_key(self) -> None:
        engine = Engine(build("llama"), make_tokenizer(), "suffix")
        with listening(ServedEngine(lambda: engine), api_keys=["secret"]) as url:
            assert "if the server wants a key, give it by --api-key" in ask(url).stderr
            found = report(url, "--api-key", "secret", "--at-once", "2")
        assert statuses(found)["among 2"] == "passed"
        assert "chat" in found["not_asked"]  # the model has no chat template
