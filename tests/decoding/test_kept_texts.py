"""Texts of earlier processes: the same output from them, and nothing from files that cannot be trusted."""

import asyncio
import logging
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.auto import give
from helpers.low_bit_model import random_model
from helpers.models import build, plain_text, prompt
from selfspec import AsyncEngine, Engine, Generation
from selfspec.decoding import kept_texts, prefix_cache, scheduler
from selfspec.decoding.kept_texts import Scope
from selfspec.decoding.prefix_cache import PrefixCache
from selfspec.decoding.suffixes import SEPARATOR, KnownText, SuffixAutomaton
from selfspec.errors import InvalidParameterError
from selfspec.files import cache_folder
from selfspec.methods.auto.preparation import Preparation
from selfspec.runtimes.costs.rows import RowCosts

TOKENS = 30
ASKED = [token % 100 for token in prompt(50)]


def engine_with(folder: Path, method: str = "suffix", model: Any = None, **options: Any) -> Engine:
    """An engine of a process that starts: nothing of it is shared with others but the folder."""
    return Engine(model or build("llama"), method=method, cache_dir=folder, **options)


def ask(engine: Engine, asked: list[int] = ASKED, tokens: int = TOKENS, **options: Any) -> Generation:
    result = engine.generate(asked, max_new_tokens=tokens, ignore_eos=True, **options)
    engine.flush()
    return result


def files(folder: Path, kind: str = "*") -> list[Path]:
    return sorted(folder.glob(f"selfspec-*/*.{kind}/*"))


@pytest.mark.parametrize("method", ["suffix", "auto"])
@pytest.mark.parametrize("runtime", ["eager", "auto"])
def test_a_restart_writes_the_same_text_from_what_was_kept(
    method: str, runtime: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(monkeypatch, Preparation(RowCosts((1, 64), (1.0, 1.001)), None))
    asked = prompt(50)
    first, again = (ask(engine_with(tmp_path, method, runtime=runtime), asked) for _ in range(2))
    assert first.token_ids == again.token_ids == plain_text("llama", asked, TOKENS)
    assert (first.cached_prompt_tokens, again.cached_prompt_tokens) == (0, len(asked) - 1)
    assert again.accepted > max(first.accepted, TOKENS // 2)
    assert again.round_count < first.round_count
    if method == "auto":
        assert {each.drafted_by for each in again.rounds if each.accepted} >= {"earlier"}
    sampled = [
        ask(engine_with(folder, method, runtime=runtime), asked, temperature=0.9, seed=3).token_ids
        for folder in (tmp_path, tmp_path, tmp_path / "empty")
    ]
    assert sampled[0] == sampled[1] == sampled[2]


@pytest.mark.parametrize("runtime", ["eager", "auto"])
def test_bits_in_bfloat16_are_those_without_files(runtime: str, tmp_path: Path) -> None:
    model = random_model(torch.bfloat16)
    method = "autoregressive" if runtime == "eager" else "suffix"  # torch may round several rows together otherwise
    plain = ask(Engine(model, method="autoregressive", runtime=runtime, prefill_chunk=16))
    results = [ask(engine_with(tmp_path, method, model=model, runtime=runtime, prefill_chunk=16)) for _ in range(2)]
    assert [each.token_ids for each in results] == [plain.token_ids] * 2
    assert results[1].cached_prompt_tokens in (48, 49)
    follow_up = [*ASKED, *plain.token_ids, 5, 6, 7]
    kept, read = (
        ask(engine, follow_up)
        for engine in (
            engine_with(tmp_path, method, model=model, runtime=runtime, prefill_chunk=16),
            Engine(model, method=method, runtime=runtime, prefill_chunk=16),
        )
    )
    assert kept.token_ids == read.token_ids
    assert kept.cached_prompt_tokens >= 48


def test_a_chat_goes_on_where_it_ended(tmp_path: Path) -> None:
    text = list(ASKED)
    for turn in range(4):
        result = ask(engine_with(tmp_path), text)
        assert result.cached_prompt_tokens == (0 if not turn else len(text) - 5 - 1)
        text += [*result.token_ids, *prompt(5, turn)]
    written = sum(path.stat().st_size for path in files(tmp_path, "keys"))
    slots = Engine(build("llama")).target.slot_bytes * len(text)
    assert written < 1.2 * slots, "each stretch is written once"


def test_what_left_the_memory_is_read_from_the_folder(tmp_path: Path) -> None:
    target = Engine(build("llama")).target
    engine = engine_with(tmp_path, prefix_cache=100 * target.slot_bytes)
    texts = [[seed, *prompt(40, seed)] for seed in range(4)]
    for text in texts:
        ask(engine, text)
    assert ask(engine, texts[0]).cached_prompt_tokens == 40
    assert engine.prefix_cache is not None
    assert engine.prefix_cache.bytes <= 100 * target.slot_bytes


def test_a_longer_text_of_which_a_beginning_is_split_off(tmp_path: Path) -> None:
    long, other = prompt(60), [*prompt(60)[:30], *prompt(20, 9)]
    ask(engine_with(tmp_path), long)
    before = len(files(tmp_path, "keys"))
    engine = engine_with(tmp_path)
    assert ask(engine, other).cached_prompt_tokens == 30
    assert ask(engine, long).cached_prompt_tokens == 59
    assert len(files(tmp_path, "keys")) <= before + 3
    assert ask(engine_with(tmp_path), other).cached_prompt_tokens == len(other) - 1


def test_folders_that_were_deleted_are_made_again(tmp_path: Path) -> None:
    """A user who needs the space deletes them while the engine runs."""
    engine = engine_with(tmp_path)
    for _ in range(3):
        ask(engine)
        assert files(tmp_path, "keys")
        assert files(tmp_path, "text")
        for folder in tmp_path.iterdir():
            shutil.rmtree(folder)


# Salts


def test_other_salts_share_nothing(tmp_path: Path) -> None:
    async def answer(salt: str) -> Generation:
        engine = engine_with(tmp_path)
        async with AsyncEngine(engine) as served:
            request = served.prepare(ASKED, max_new_tokens=TOKENS, ignore_eos=True, cache_salt=salt)
            stream = served.enqueue([request], ["one"])[0]
            async for _ in stream:
                pass
            return stream.result

    results = [asyncio.run(answer(salt)) for salt in ("a", "b", "", "a", "b")]
    assert [each.cached_prompt_tokens for each in results] == [0, 0, 0, 49, 49]
    assert len({each.token_ids for each in results}) == 1
    assert results[3].accepted > results[2].accepted == results[1].accepted == results[0].accepted
    assert not any(salt in path.name.split("-") for path in files(tmp_path) for salt in ("a", "b"))


# Files that are not used


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"0")


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def changed_at(share: float) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[int(share * (len(content) - 1))] ^= 1
        path.write_bytes(content)

    return change


def of_many_tokens(path: Path) -> None:
    """A head that promises more than any file has."""
    path.write_bytes(path.read_bytes()[:32] + b"\xff\xff\xff\xff\x00\x00\x00\x00")


def writable_by_all(path: Path) -> None:
    path.chmod(0o666)


def of_another_user(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root gives files away")
    os.chown(path, 12345, 12345)


@pytest.mark.parametrize(
    "spoil",
    [
        cut,
        longer,
        emptied,
        *map(changed_at, (0.0, 0.05, 0.5, 1.0)),
        of_many_tokens,
        writable_by_all,
        of_another_user,
    ],
)
def test_a_spoilt_file_is_not_used_and_said_once(
    spoil: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = ask(engine_with(tmp_path))
    assert len(files(tmp_path, "keys")) == 2
    assert len(files(tmp_path, "text")) == 1
    for path in files(tmp_path):
        spoil(path)
    with caplog.at_level(logging.WARNING, logger="selfspec"):
        again = ask(engine_with(tmp_path))
    assert (again.token_ids, again.cached_prompt_tokens, again.accepted) == (first.token_ids, 0, first.accepted)
    (said,) = caplog.records
    assert "is not used: " in said.message
    assert "\n" not in said.message
    repaired = ask(engine_with(tmp_path))
    assert (repaired.token_ids, repaired.cached_prompt_tokens) == (first.token_ids, 49)
    assert repaired.accepted > first.accepted
    assert len(caplog.records) == 1


def test_files_of_another_model_under_this_ones_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(1)
    other = type(build("llama"))(build("llama").config).eval()
    mine, others = tmp_path / "mine", tmp_path / "others"
    expected = [ask(engine_with(mine)), ask(engine_with(others, model=other))]
    for one, two in zip(files(mine), files(others), strict=True):
        shutil.copyfile(two, one)
    with caplog.at_level(logging.WARNING, logger="selfspec"):
        again = ask(engine_with(mine))
    assert again.token_ids == expected[0].token_ids != expected[1].token_ids
    assert (again.cached_prompt_tokens, len(caplog.records)) == (0, 1)


def test_what_computes_keys_has_a_folder_of_its_own(tmp_path: Path) -> None:
    model, wide = random_model(torch.bfloat16), random_model(torch.float32)
    with torch.no_grad():
        changed = random_model(torch.bfloat16)
        changed.model.layers[1].mlp.up_proj.weight[:, 3] += 1
    scaled = random_model(torch.bfloat16, rms_norm_eps=0.01)
    engines = [
        engine_with(tmp_path, model=model),
        engine_with(tmp_path, model=model, runtime="eager"),
        engine_with(tmp_path, model=wide),
        engine_with(tmp_path, model=changed),
        engine_with(tmp_path, model=scaled),
        engine_with(tmp_path, model=model, weights="int8"),
        engine_with(tmp_path, model=model, runtime="eager", prefill_chunk=16),
    ]
    assert all(ask(engine).cached_prompt_tokens == 0 for engine in engines)
    assert len(list(tmp_path.iterdir())) == len(engines)


def test_weights_that_are_replaced_end_it(tmp_path: Path) -> None:
    model = type(build("llama"))(build("llama").config).eval()
    model.load_state_dict(build("llama").state_dict())
    engine = engine_with(tmp_path, model=model)
    ask(engine)
    kept = files(tmp_path, "keys")
    with torch.no_grad():
        projection = model.model.layers[0].self_attn.o_proj
        projection.weight = torch.nn.Parameter(torch.zeros_like(projection.weight))
    result = ask(engine)
    assert result.cached_prompt_tokens == 0
    assert result.token_ids == ask(Engine(model, method="autoregressive")).token_ids
    assert files(tmp_path, "keys") == kept


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidParameterError, match=r"cannot be used: .*; give a folder of your own"):
        engine_with(tmp_path / "file")
    with pytest.raises(InvalidParameterError, match="cache_dir_limit must be at least 1"):
        engine_with(tmp_path, cache_dir_limit=0)
    with pytest.raises(InvalidParameterError, match="of another model"):
        Engine(build("llama"), cache_dir=engine_with(tmp_path).kept)


def test_a_folder_of_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a model; no shell expands what a program says."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_folder().parent))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    ask(engine_with(Path("~/texts")))
    assert files(tmp_path / "home" / "texts")
    assert [each.name for each in tmp_path.iterdir()] == ["home"]


def test_a_full_disk_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept_texts, "replace_file", full)
    engine = engine_with(tmp_path)
    with caplog.at_level(logging.WARNING, logger="selfspec"):
        results = [ask(engine).token_ids for _ in range(3)]
    assert results == [results[0]] * 3
    assert [record.message.count("No space left") for record in caplog.records] == [1]
    assert not files(tmp_path)


def test_others_cannot_open_the_folder(tmp_path: Path) -> None:
    ask(engine_with(tmp_path / "new"))
    (folder,) = (tmp_path / "new").iterdir()
    assert folder.stat().st_mode & 0o077 == 0


# Bounds, and several processes


def test_the_limit_is_kept_and_what_was_used_last_stays(tmp_path: Path) -> None:
    limit, foreign = 200_000, tmp_path / "selfspec-of-mine" / "notes.txt"
    foreign.parent.mkdir()
    foreign.write_bytes(b"0" * 10_000)
    for seed in range(20):
        ask(engine_with(tmp_path, cache_dir_limit=limit), [seed, *prompt(40, seed)])
        assert sum(path.stat().st_size for path in files(tmp_path) if path != foreign) <= limit
    assert ask(engine_with(tmp_path, cache_dir_limit=limit), [19, *prompt(40, 19)]).cached_prompt_tokens == 40
    assert ask(engine_with(tmp_path, cache_dir_limit=limit), [0, *prompt(40, 0)]).cached_prompt_tokens == 0
    assert len(foreign.read_bytes()) == 10_000


def test_a_text_that_is_larger_than_the_limit_is_not_written(tmp_path: Path) -> None:
    ask(engine_with(tmp_path, cache_dir_limit=5_000))
    assert not files(tmp_path, "keys")
    assert len(files(tmp_path, "text")) == 1


def test_texts_are_bounded_in_number_and_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_texts, "_MOST_TEXTS", 3)
    monkeypatch.setattr(kept_texts, "_MOST_TOKENS", 80)
    monkeypatch.setattr(kept_texts, "_MOST_SALTS", 2)
    for seed in range(6):
        ask(engine_with(tmp_path), [seed, *prompt(40, seed)], 20)
    assert len(files(tmp_path, "text")) <= 4
    engine = engine_with(tmp_path)
    assert engine.kept is not None
    for seed in range(12):
        assert len(engine.kept.earlier("").tokens) <= 2 * 80 + 37
        ask(engine, [seed, *prompt(40, seed)], 20)
    for salt in "abc":
        engine.kept.earlier(salt)
    assert len(engine.kept._earlier) == 2


def test_salts_fill_neither_the_folder_nor_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_texts, "_MOST_FILES", 20)
    monkeypatch.setattr(kept_texts, "_MOST_NAMES", 6)
    kept = engine_with(tmp_path, cache_dir_limit=2**16).kept
    assert kept is not None
    for number in range(100):
        kept.earlier(f"salt {number}")
        kept.keep(ASKED, [1, 2, 3], [], Scope(f"salt {number}"))
        kept.flush()
    assert 20 <= len(files(tmp_path)) <= 45  # the folder is looked through at times
    assert all(any(folder.iterdir()) for folder in tmp_path.glob("selfspec-*/*"))  # empty folders go
    assert len(kept._entries) <= 6


def test_a_new_salt_costs_no_look_at_the_files_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = engine_with(tmp_path).kept
    assert kept is not None
    for number in range(20):
        kept.keep(ASKED, [1, 2, 3], [], Scope(f"salt {number}"))
    kept.flush()
    seen: list[Path] = []
    monkeypatch.setattr(kept_texts, "_files", lambda paths: [seen.append(path) for path in paths] and [])
    kept.earlier("salt 3")
    assert len(seen) == 1
    kept.earlier("another salt")
    assert len(seen) == 1


def test_files_that_went_are_forgotten(tmp_path: Path) -> None:
    engine = engine_with(tmp_path, cache_dir_limit=200 * Engine(build("llama")).target.slot_bytes)
    for seed in range(20):
        ask(engine, [seed, *prompt(40, seed)])
    assert engine.kept is not None
    known = {entry.path for entries in engine.kept._entries.values() for entry in entries}
    assert known <= set(files(tmp_path, "keys"))
    assert known


def test_what_is_known_of_a_prompt_is_taken_over_in_parts_while_others_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 16 * Engine(build("llama")).target.slot_bytes
    monkeypatch.setattr(kept_texts, "PART_BYTES", size)
    monkeypatch.setattr(prefix_cache, "PART_BYTES", size)
    monkeypatch.setattr(scheduler, "_RECALL_SECONDS", 0.0)
    asked, other = prompt(160), prompt(10, 1)
    expected = ask(engine_with(tmp_path, "autoregressive"), asked).token_ids
    engine = engine_with(tmp_path, "autoregressive")
    parts: list[tuple[int, int]] = []  # tokens of a part, and those that the other has then
    writing: list[Any] = []
    assert engine.kept is not None
    find, fill = engine.kept.find, PrefixCache.fill

    def note(count: int) -> None:
        if count and writing:
            parts.append((count, len(writing[0].request.output.token_ids)))

    def noted_find(*arguments: Any) -> Any:
        found = find(*arguments)
        note(0 if found is None else found.length - found.start)
        return found

    def noted_fill(*arguments: Any, **options: Any) -> Any:
        count = fill(*arguments, **options)
        note(count)
        return count

    monkeypatch.setattr(engine.kept, "find", noted_find)
    monkeypatch.setattr(PrefixCache, "fill", noted_fill)

    async def run() -> Generation:
        async with AsyncEngine(engine) as served:
            writes = served.submit(other, max_new_tokens=600, ignore_eos=True)
            await anext(writes)
            writing.append(writes)
            result = await served.generate(asked, max_new_tokens=TOKENS, ignore_eos=True)
            async for _ in writes:
                pass
            return result

    result = asyncio.run(run())
    assert (result.token_ids, result.cached_prompt_tokens) == (expected, 159)
    counts, tokens = zip(*parts, strict=True)
    assert sum(counts) >= 2 * 159  # from files, and from memory
    assert max(counts) <= 16
    assert len(set(tokens)) == len(tokens)  # a token of the other between any two of them


def test_a_file_that_a_process_left_half_written_goes(tmp_path: Path) -> None:
    ask(engine_with(tmp_path))
    folder = files(tmp_path, "text")[0].parent
    left, fresh = folder / ".old.part", folder / ".new.part"
    left.write_bytes(b"0")
    fresh.write_bytes(b"0")
    os.utime(left, (0, 0))
    ask(engine_with(tmp_path), prompt(20))
    assert fresh.exists()
    assert not left.exists()


def test_several_processes_share_a_folder(tmp_path: Path) -> None:
    texts = [[seed, *prompt(40, seed)] for seed in range(6)]
    engines = [engine_with(tmp_path) for _ in range(3)]
    for engine in engines:
        ask(engine, [99, 98])  # all have looked into the folder
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for text in texts[2 * number : 2 * number + 2]:
                ask(engines[number], text)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    last = engine_with(tmp_path)
    assert [ask(last, text).cached_prompt_tokens for text in texts] == [40] * 6
    for path in files(tmp_path):
        path.unlink()  # by another process
    assert ask(engines[0], texts[5]).cached_prompt_tokens == 0
    assert ask(engines[0], texts[5]).cached_prompt_tokens == 40


# What drafts


TEXT = st.lists(st.integers(0, 2), min_size=1, max_size=20)


def longest_suffix(text: list[int], texts: list[list[int]]) -> int:
    """Tokens of the longest suffix that occurs in one of the texts."""
    for length in range(len(text), 0, -1):
        suffix = text[-length:]
        for other in texts:
            if any(other[start : start + length] == suffix for start in range(len(other) - length + 1)):
                return length
    return 0


@given(st.lists(TEXT, max_size=4), st.lists(st.tuples(TEXT, st.none() | TEXT), min_size=1, max_size=5), TEXT)
def test_matches_in_earlier_texts_while_they_grow(
    earlier: list[list[int]], pieces: list[tuple[list[int], list[int] | None]], drafted: list[int]
) -> None:
    """Against a search: the longest match of both, unless nothing follows it in the earlier texts."""
    automaton, texts = SuffixAutomaton(), list(earlier)
    for text in earlier:
        automaton.extend((*text, SEPARATOR))
    whole: list[int] = []
    known = KnownText([], automaton)
    for piece, added in pieces:
        whole += piece
        known.extend(piece)
        if added is not None:
            automaton.extend((*added, SEPARATOR))
            texts.append(added)
        for after in ([], drafted):
            match, own = known.match_after(after), SuffixAutomaton(whole).match_after(after)
            if not match.earlier:
                assert match == own
                continue
            assert own.length < match.length <= longest_suffix([*whole, *after], texts)
            assert automaton.tokens[match.end - match.length : match.end] == [*whole, *after][-match.length :]
            copied = known.copy(match, 5, after)
            assert 1 <= len(copied) <= 5
            assert copied == automaton.tokens[match.end : match.end + len(copied)]
            assert SEPARATOR not in copied


@given(st.lists(TEXT, max_size=4), TEXT, TEXT)
def test_the_longest_match_is_found_where_earlier_texts_stay(
    earlier: list[list[int]], text: list[int], more: list[int]
) -> None:
    automaton = SuffixAutomaton()
    for each in earlier:
        automaton.extend((*each, SEPARATOR))
    known = KnownText(text, automaton)
    known.extend(more)
    assert known._followed[1] == longest_suffix([*text, *more], earlier)
