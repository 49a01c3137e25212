"""The pure parts of ``benchmarks/serve.py``, and its client against small servers of its own."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture
def serving(benchmarks: Callable[[str], ModuleType]) -> Callable[[str], ModuleType]:
    return lambda name: benchmarks(f"serving.{name}")


@asynccontextmanager
async def listening(serving: Callable[[str], ModuleType], handler: Handler) -> AsyncIterator[object]:
    server = await asyncio.start_server(handler, "127.0.0.1", 0)
    async with server:
        yield serving("http").Server("127.0.0.1", server.sockets[0].getsockname()[1], "m")


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)


def writes(*parts: bytes) -> Handler:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        for part in parts:
            writer.write(part)
            await writer.drain()
        writer.close()

    return handle


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def delta(text: str, reason: str | None = None) -> bytes:
    return event(choices=[{"delta": {"content": text}, "finish_reason": reason}])


HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_a_stream_is_read_however_its_events_are_cut_into_chunks(serving: Callable[[str], ModuleType]) -> None:
    body = delta("one ") + delta("two") + delta("", "stop") + event(choices=[], usage={"completion_tokens": 5})
    cut = [body[:7], body[7:60], body[60:]]

    async def ask() -> object:
        async with listening(serving, writes(HEAD, chunked(*cut), b"0\r\n\r\n")) as server:
            return await serving("chat").stream_chat(server, b"{}")

    answer = asyncio.run(ask())
    assert (answer.text, answer.tokens, len(answer.arrivals)) == ("one two", 5, 2)
    assert answer.began <= answer.arrivals[0] <= answer.arrivals[1] <= answer.ended


def test_an_event_has_arrived_when_its_last_byte_has(serving: Callable[[str], ModuleType]) -> None:
    first, second = chunked(delta("one")), chunked(delta("two", "stop"))
    pauses = iter((0.05, 0.0))

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for part in (HEAD + first + second[:9], second[9:] + b"0\r\n\r\n"):
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(next(pauses))  # the connection stays open after the last chunk

    async def ask() -> Any:
        async with listening(serving, handle) as server:
            return await asyncio.wait_for(serving("chat").stream_chat(server, b"{}"), 10)

    answer = asyncio.run(ask())
    assert answer.text == "onetwo"
    assert answer.arrivals[1] - answer.arrivals[0] > 0.04
    assert answer.ended >= answer.arrivals[1]


@pytest.mark.parametrize("text", ["onetwo", "one"])
def test_pairs_take_turns_and_have_the_same_text(serving: Callable[[str], ModuleType], text: str) -> None:
    known, order = serving("known"), list[str]()

    def ask(_: object) -> Any:
        order.append("engine")
        return serving("chat").Answer(text, 2, 1.0, (1.5, 2.0), 3.0)

    async def streamed(*_: object) -> tuple[Any, float]:
        order.append("server")
        return serving("chat").Answer("onetwo", 2, 10.0, (11.0, 12.0), 14.0), 0.1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving("pairs"), "_streamed", streamed)
        chats, seconds = [known.Chat("a", 2), known.Chat("b", 2)], iter([1.0, 1.25, 7.0, 7.25])
        pairs = serving("pairs").in_pairs(object(), ask, chats, lambda: next(seconds))
        if text == "one":
            with pytest.raises(RuntimeError, match="alone 'one'"):
                list(pairs)
            return
        found = [pair.fields() for pair in pairs]
    assert order == ["server", "engine", "engine", "server"]
    assert found == [{"tokens": 2, "engine": 2.0, "server": 4.0, "client": 0.1, "first": 0.5, "loop": 0.25}] * 2
    figures = {"ratio": 0.5, "low": 0.5, "high": 0.5, "later": 0.5, "client": 0.025}
    assert serving("pairs").figures_of_pairs(found) == {**figures, "loop": 0.125}
    for pair in found:
        del pair["loop"]  # as files of earlier runs have it
    assert serving("pairs").figures_of_pairs(found) == figures


def test_threads_of_an_engine_without_a_server_wait_as_a_servers_do(
    serving: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Else what their waits cost would count as the server's."""
    script = tmp_path / "alone.py"
    answer = '{"text": os.environ["GOMP_SPINCOUNT"], "tokens": 1, "began": 0.0, "arrivals": [0.0], "ended": 1.0}'
    script.write_text(f"import json, os\ninput()\nprint(json.dumps({answer}), flush=True)\n")
    known = serving("known")
    monkeypatch.setattr(known, "SCRIPT", script)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    with known.engine_alone("m", "auto") as ask:
        assert ask(known.Chat("x", 1)).text == "2000"


def test_the_processor_time_of_a_loop_is_that_of_its_thread(serving: Callable[[str], ModuleType]) -> None:
    if not Path(f"/proc/{os.getpid()}/task/{os.getpid()}/schedstat").exists():
        pytest.skip("the system does not say what threads took")
    before, spent = serving("pairs").loop_seconds(os.getpid()), time.thread_time()
    while time.thread_time() - spent < 0.05:
        pass
    assert 0.03 < serving("pairs").loop_seconds(os.getpid()) - before < 5


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param((HEAD, chunked(delta("one"))), id="within the body"),
        pytest.param((HEAD, chunked(delta("one")), b"0\r\n\r\n"), id="no reason to end"),
        pytest.param((HEAD, b"ff\r\nabc"), id="within a chunk"),
        pytest.param((b"HTTP/1.1 200",), id="within the head"),
        pytest.param((), id="at once"),
    ],
)
def test_a_stream_that_ends_early_is_no_answer(serving: Callable[[str], ModuleType], parts: tuple[bytes, ...]) -> None:
    async def ask() -> None:
        async with listening(serving, writes(*parts)) as server:
            await serving("chat").stream_chat(server, b"{}")

    with pytest.raises(serving("http").BrokenReplyError):
        asyncio.run(ask())


@pytest.mark.parametrize(
    ("parts", "status"),
    [
        ((b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 4\r\n\r\nfull",), 429),
        ((HEAD, chunked(delta("one"), event(error={"message": "full"})), b"0\r\n\r\n"), 200),
    ],
)
def test_an_error_is_told_from_an_answer(
    serving: Callable[[str], ModuleType], parts: tuple[bytes, ...], status: int
) -> None:
    async def ask() -> None:
        async with listening(serving, writes(*parts)) as server:
            await serving("chat").stream_chat(server, b"{}")

    with pytest.raises(serving("chat").RefusedError, match="full") as raised:
        asyncio.run(ask())
    assert raised.value.status == status


def test_every_client_sends_one_request_at_a_time_and_every_prompt_is_sent_once(
    serving: Callable[[str], ModuleType],
) -> None:
    seen, busy, most = [], 0, 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        prompt = json.loads(await reader.readexactly(length))["messages"][0]["content"]
        seen.append(prompt)
        await asyncio.sleep(0)
        busy -= 1
        writer.write(HEAD + chunked(delta(prompt, "stop")) + b"0\r\n\r\n")
        writer.close()

    level = serving("load").Level(3, tuple("abcdefgh"))

    async def run() -> list[object]:
        async with listening(serving, handle) as server:
            return await serving("load").measure(server, level, 4)

    answers = asyncio.run(run())
    assert sorted(seen) == sorted(each.text for each in answers) == list("abcdefgh")
    assert most <= 3


def test_levels_share_no_prompt(serving: Callable[[str], ModuleType]) -> None:
    prompts = serving("prompts").PROMPTS
    levels = serving("load").levels_of([1, 2, 4, 8, 16, 32], prompts, rounds=2)
    sent = [prompt for level in levels for prompt in level.prompts]
    assert [len(level.prompts) for level in levels] == [4, 4, 8, 16, 32, 64]
    assert len(sent) == len(set(sent))
    with pytest.raises(ValueError, match="different prompts"):
        serving("load").levels_of([200], prompts, rounds=2)


def test_figures_are_those_of_the_times(serving: Callable[[str], ModuleType]) -> None:
    make = serving("chat").Answer
    answers = [make("a", 4, 0.0, (1.0, 2.0, 4.0), 4.5), make("b", 6, 0.5, (2.5, 3.5), 5.0)]
    found = serving("figures").figures_of(answers)
    assert found["tokens_per_second"] == pytest.approx(10 / 5)
    assert (found["first_p50"], found["first_p99"]) == (1.0, 2.0)
    assert (found["gap_p50"], found["gap_p99"]) == (1.0, 2.0)
    assert (found["token_p50"], found["token_p99"]) == (pytest.approx(0.2), pytest.approx(1.0))


def test_percentiles(serving: Callable[[str], ModuleType]) -> None:
    percentile = serving("figures").percentile
    hundred = [float(number) for number in range(100, 0, -1)]
    assert [percentile(hundred, percent) for percent in (1, 50, 99, 100)] == [1, 50, 99, 100]
    assert percentile([7.0], 50) == percentile([7.0], 99) == 7


def test_the_table_has_medians_with_their_spread(serving: Callable[[str], ModuleType]) -> None:
    samples = [
        {"server": "a", "clients": 1, "speed": 10.0},
        {"server": "a", "clients": 1, "speed": 30.0},
        {"server": "a", "clients": 1, "speed": 20.0},
        {"server": "b", "clients": 4, "speed": 5.0},
    ]
    assert serving("figures").table(samples, "speed").splitlines()[2:] == [
        "| `a` | 20 (10-30) | - |",
        "| `b` | - | 5 |",
    ]


def test_prompts_of_a_file(serving: Callable[[str], ModuleType], tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('"one"\n{"prompt": "two"}\n')
    assert serving("prompts").read_prompts(file) == ["one", "two"]
    file.write_text('{"text": "two"}\n')
    with pytest.raises(ValueError, match="line 1"):
        serving("prompts").read_prompts(file)


def test_ratios_compare_with_one_client_and_with_the_best_other_server(serving: Callable[[str], ModuleType]) -> None:
    speeds = {
        ("selfspec:auto", 1): 97.0,
        ("selfspec:auto", 16): 600.0,
        ("llama.cpp", 1): 50.0,
        ("vllm", 1): 60.0,
    }
    samples = [
        {"server": name, "clients": count, "tokens_per_second": speed} for (name, count), speed in speeds.items()
    ]
    assert serving("figures").ratios_of(samples) == [
        "`selfspec:auto`, 16 clients ÷ one: 6.19",
        "`selfspec:auto` ÷ the best other server, by number of clients: 1.62 at 1 (`vllm`)",
    ]


def test_a_server_that_fails_ends_no_run(serving: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    turns = serving("turns")

    def measured(kind: str, levels: list[Any], _: object) -> Iterator[dict[str, Any]]:
        yield {"clients": levels[0].clients}
        if kind == "bad":
            raise RuntimeError("the server did not start")

    monkeypatch.setattr(turns, "_measured", measured)
    levels = [serving("load").Level(count, ("a",)) for count in (1, 2)]
    terms = turns.Terms(serving("servers").Files("m"), levels, 4, frozenset({"slow"}), frozenset({2}))
    assert list(turns.in_turns(["bad", "slow"], 2, terms)) == [
        {"server": "bad", "repeat": 0, "clients": 1},
        {"server": "bad", "repeat": 0, "error": "RuntimeError: the server did not start"},
        {"server": "slow", "repeat": 0, "clients": 2},
        {"server": "bad", "repeat": 1, "clients": 1},
        {"server": "bad", "repeat": 1, "error": "RuntimeError: the server did not start"},
    ]


def test_processors_are_numbers_and_ranges(
    serving: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    parse = serving("processors").parse_processors
    assert parse("0,2-3") == (0, 2, 3)
    for wrong in ("4", "", "a", "3-1"):
        with pytest.raises(ValueError, match=r".*"):
            parse(wrong)


def test_the_page_has_the_figures_of_the_kept_results(serving: Callable[[str], ModuleType], tmp_path: Path) -> None:
    page = BENCHMARKS.parent / "docs" / "serving.md"
    kept = [BENCHMARKS / "results" / f"serve-load-{name}.json" for name in ("qwen-q4_k_m", "smollm2-bf16-cpu")]
    load_section = serving("page").load_section
    section = "\n\n".join(load_section(json.loads(file.read_text(encoding="utf-8"))) for file in kept)
    assert section in page.read_text(encoding="utf-8")
    other = tmp_path / "page.md"
    other.write_text(page.read_text(encoding="utf-8").replace(section, "old"), encoding="utf-8")
    serving("page").write_section(other, section)
    assert other.read_text(encoding="utf-8") == page.read_text(encoding="utf-8")
    other.write_text("no marks", encoding="utf-8")
    with pytest.raises(ValueError, match="marks"):
        serving("page").write_section(other, section)
