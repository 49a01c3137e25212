"""GGUF files that are wrong are refused in one line, in bounded time and memory, whatever is wrong with them."""

import os
import random
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fixtures.make_gguf import fixture_path
from helpers import raw_gguf as raw
from helpers.gguf_files import save_gguf
from helpers.models import build
from selfspec.errors import ModelLoadError, SelfSpecError, UnsupportedModelError
from selfspec.loading import INSTALLABLE, load_model
from selfspec.loading.catalog import find_installed
from selfspec.loading.gguf_file import GgufFile

SECONDS = 1.0
BYTES = 2**20
MOST_BYTES = 2**27
"""That reading a file takes at most: headers are at most half as long, and a changed length can make one as long."""


def save(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def read(path: Path) -> GgufFile:
    return GgufFile.open(path)


@contextmanager
def bounded() -> Iterator[None]:
    """Fails if the body takes more than a second of processor time or a mebibyte."""
    tracemalloc.start()
    start = time.thread_time()
    try:
        yield
        assert time.thread_time() - start < SECONDS
        assert tracemalloc.get_traced_memory()[1] < BYTES
    finally:
        tracemalloc.stop()


NUMBERS_ENTRY = raw.tensor("n", (2, 32))
NESTED = raw.array("deep", raw.ARRAY, struct.pack("<IQ", raw.ARRAY, 2**40), 2**40)
HUGE = 2**62
BAD = {
    "empty": (b"", "not a GGUF file: it is empty"),
    "another format": (b"PK\3\4" + bytes(100), "not a GGUF file: it begins with b'PK"),
    "magic alone": (b"GGUF", "ends within the header"),
    "version 1": (raw.gguf(version=1), "version 1"),
    "version 99": (raw.gguf(version=99), "version 99"),
    "head cut": (raw.gguf()[:20], "ends within the header"),
    "too many tensors": (raw.gguf(counts=(HUGE, 0)), "tensors do not fit into a file of 32 bytes"),
    "too many keys": (raw.gguf(counts=(0, HUGE)), "keys do not fit into a file of 32 bytes"),
    "more tensors than any model": (raw.gguf(counts=(10**5, 0), data=bytes(2**22)), "100,000 tensors are more than"),
    "more keys than any model": (raw.gguf(counts=(0, 10**5), data=bytes(2**21)), "100,000 keys are more than"),
    "a key cut": (raw.gguf([raw.string("k" * 7)], counts=(0, 1), alignment=1), "ends within the header"),
    "a key of gigabytes": (raw.gguf([raw.string(b"k" * 32, 2**33)], counts=(0, 1)), "8,589,934,592 bytes"),
    "a key beyond the end": (raw.gguf([raw.string(b"k" * 32, 999)], counts=(0, 1)), "ends within a key"),
    "a key not UTF-8": (raw.gguf([raw.key("k", raw.STRING, "").replace(b"k", b"\xff")]), "a key is not UTF-8"),
    "a key twice": (raw.gguf([raw.key("k", raw.UINT8, 1)] * 2), "key 'k' is there twice"),
    "an unknown value type": (raw.gguf([raw.key("k", 77, bytes(8))]), "'k' has the value type 77"),
    "an unknown item type": (raw.gguf([raw.array("k", 77, bytes(8), 1)]), "'k' has the value type 77"),
    "a number cut": (raw.gguf([raw.key("k", 12, b"\0")], alignment=1), "ends within 'k'"),
    "a string of gigabytes": (raw.gguf([raw.key("k", raw.STRING, raw.string("", 2**40))]), "'k' takes 1,099,"),
    "a string beyond the end": (raw.gguf([raw.key("k", raw.STRING, raw.string("", 99))]), "ends within 'k'"),
    "a string not UTF-8": (raw.gguf([raw.key("k", raw.STRING, raw.string(b"\xff"))]), "'k' is not UTF-8"),
    "numbers beyond the end": (raw.gguf([raw.array("k", raw.UINT64, b"", HUGE)]), "ends within 'k'"),
    "strings beyond the end": (raw.gguf([raw.array("k", raw.STRING, b"", HUGE)]), "strings in 'k' do not fit"),
    "an item beyond the end": (raw.gguf([raw.array("k", raw.STRING, raw.string("", 2**63), 1)]), "ends within 'k'"),
    "an item not UTF-8": (raw.gguf([raw.array("k", raw.STRING, raw.string(b"\xff"), 1)]), "'k' is not UTF-8"),
    "items cut": (raw.gguf([raw.array("k", raw.STRING, raw.string("a" * 20), 3)], alignment=1), "ends within 'k'"),
    "nested arrays": (raw.gguf([NESTED]), "'deep' is an array of arrays"),
    "alignment 0": (raw.gguf([raw.key("general.alignment", raw.UINT32, 0)]), "alignment is not a power of two"),
    "alignment 24": (raw.gguf([raw.key("general.alignment", raw.UINT32, 24)]), "alignment is not a power of two"),
    "alignment a text": (raw.gguf([raw.key("general.alignment", raw.STRING, "8")]), "alignment is not a power of two"),
    "a tensor twice": (raw.gguf(tensors=[NUMBERS_ENTRY] * 2, data=bytes(512)), "tensor 'n' is there twice"),
    "five dimensions": (raw.gguf(tensors=[raw.tensor("n", (1,) * 5)], data=bytes(4)), "'n' has 5 dimensions"),
    "billions of dimensions": (raw.gguf(tensors=[raw.string("n") + b"\xff" * 40]), "'n' has 4294967295 dimensions"),
    "no number": (raw.gguf(tensors=[raw.tensor("n", (0, 32))], data=bytes(32)), r"'n' is empty: .* \(0, 32\)"),
    "an impossible shape": (raw.gguf(tensors=[raw.tensor("n", (HUGE,) * 4)]), "'n' has an impossible shape"),
    "half a block": (
        raw.gguf(tensors=[raw.tensor("n", (4, 48), raw.Q4_0)], data=bytes(108)),
        "48 .* whole blocks of 32",
    ),
    "not aligned": (raw.gguf(tensors=[raw.tensor("n", (8,), offset=4)], data=bytes(99)), "at 4, .* alignment 32"),
    "overlapping": (
        raw.gguf(tensors=[raw.tensor("a", (16,)), raw.tensor("b", (16,), offset=32)], data=bytes(200)),
        "tensors 'a' and 'b' overlap",
    ),
    "at one place": (
        raw.gguf(tensors=[raw.tensor("a", (4,)), raw.tensor("b", (4,))], data=bytes(99)),
        "'a' and 'b' overlap",
    ),
    "weights cut": (raw.gguf(tensors=[NUMBERS_ENTRY], data=bytes(200)), "truncated: 56 of 352 bytes are missing"),
    "an offset of exabytes": (raw.gguf(tensors=[raw.tensor("n", (8,), offset=HUGE)], data=bytes(32)), "are missing"),
    "a long name": (raw.gguf(tensors=[raw.tensor("\n" * 999, (1,) * 5)]), "has 5 dimensions"),
    "a part of a text": (raw.gguf([raw.key("split.count", raw.STRING, "3")]), "split.count is not a whole number"),
}


@pytest.mark.parametrize(("content", "message"), BAD.values(), ids=BAD.keys())
def test_a_bad_file_is_refused_in_one_line_at_once(content: bytes, message: str, tmp_path: Path) -> None:
    path = save(tmp_path / "bad.gguf", content)
    with bounded(), pytest.raises(ModelLoadError, match=message) as refused:
        read(path)
    text = str(refused.value)
    assert str(path) in text
    assert len(text.splitlines()) == 1
    assert len(text) < 400 + len(str(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (raw.gguf(tensors=[raw.tensor("n", (8,), 77)], data=bytes(64)), "'n' .* number type 77"),
        (raw.gguf(tensors=[raw.tensor("n", (32,), 31)], data=bytes(64)), "'n' .* Q4_0_4_4"),
    ],
    ids=["big-endian", "unknown type", "type given up"],
)
def test_what_is_not_supported_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read(save(tmp_path / "other.gguf", content))


def test_a_long_array_of_a_large_file_ends_early(tmp_path: Path) -> None:
    """Half a gigabyte of empty strings is refused before they are read; the file has no blocks on the disk."""
    path = save(tmp_path / "m.gguf", raw.gguf([raw.array("k", raw.STRING, b"", 2**26)]))
    os.truncate(path, 2**30)
    with bounded(), pytest.raises(ModelLoadError, match="67,108,864 strings in 'k' are more"):
        read(path)


def test_a_header_of_gigabytes_ends_early(tmp_path: Path) -> None:
    path = save(tmp_path / "m.gguf", raw.gguf([raw.array("k", raw.UINT8, b"", 2**29)]))
    os.truncate(path, 2**30)
    with bounded(), pytest.raises(ModelLoadError, match="header is longer than"):
        read(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"cannot read '.*missing\.gguf'"):
        read(tmp_path / "missing.gguf")


def test_a_folder_or_a_pipe_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="is not a file"):
        read(tmp_path)
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelLoadError, match="is not a file"):
        read(tmp_path / "pipe.gguf")


def read_or_refuse(path: Path) -> bool:
    """Whether a file can be read; anything but an error of selfspec fails."""
    try:
        with GgufFile.open(path) as file:
            for tensor in file.tensors.values():
                assert tensor.data().size == tensor.nbytes
        return True
    except (ModelLoadError, UnsupportedModelError):
        return False


def small_header() -> bytes:
    """A header with each kind of key and of tensor."""
    keys = [
        raw.key("general.architecture", raw.STRING, "llama"),
        raw.key("general.alignment", raw.UINT32, 32),
        raw.key("llama.block_count", raw.UINT32, 2),
        raw.array("tokenizer.ggml.tokens", raw.STRING, b"".join(raw.string(text) for text in ("a", "b", "Ġc")), 3),
        raw.array("tokenizer.ggml.scores", raw.FLOAT32, np.arange(3, dtype="<f4").tobytes(), 3),
        raw.key("general.quantization_version", raw.UINT64, 2),
    ]
    tensors = [raw.tensor("norm", (32,)), raw.tensor("blk.0.weight", (2, 32), raw.Q4_0, 128)]
    return raw.gguf(keys, tensors, bytes(164))


@given(st.binary(max_size=200), st.booleans())
def test_random_bytes_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, magic: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "random.gguf"
    read_or_refuse(save(path, (b"GGUF\3\0\0\0" if magic else b"") + content))


def change_at_random(header: bytes, size: int, path: Path, files: int, read: Callable[[Path], bool]) -> None:
    """Reads files with up to four bytes of a header changed, and now and then their end cut off.

    Each within a second of processor time; of some the memory is measured.
    """
    generator = random.Random(0)
    taken, slowest, most = 0, 0.0, 0
    with path.open("w+b", buffering=0) as file:
        for number in range(files):
            changed = bytearray(header)
            for _ in range(generator.randint(1, 4)):
                value = generator.choice((0, 1, 127, 128, 255, generator.randrange(256)))
                changed[generator.randrange(len(header))] = value
            file.seek(0)
            file.write(changed)
            file.truncate(generator.randrange(size) if generator.random() < 0.1 else size)
            if measured := number % 50 == 0:
                tracemalloc.start()
            start = time.thread_time()
            taken += read(path)
            if measured:
                most = max(most, tracemalloc.get_traced_memory()[1])
                tracemalloc.stop()
            else:
                slowest = max(slowest, time.thread_time() - start)
    assert 0 < taken < files
    assert slowest < SECONDS
    assert 0 < most < MOST_BYTES


def split_file(path: Path) -> tuple[bytes, int]:
    """The header of a file, and the bytes of the whole file."""
    with read(path) as file:
        end = min(tensor.offset for tensor in file.tensors.values())
    with path.open("rb") as content:
        return content.read(end), path.stat().st_size


def test_ten_thousand_files_with_changed_bytes_are_read_or_refused(tmp_path: Path) -> None:
    content = small_header()
    change_at_random(content, len(content), tmp_path / "changed.gguf", 10_000, read_or_refuse)


@pytest.mark.slow
@pytest.mark.parametrize("is_real", [False, True], ids=["tiny", "smollm2"])
def test_ten_thousand_models_with_changed_bytes_are_read_or_refused(is_real: bool, tmp_path: Path) -> None:
    """Of a tiny model, and of a real one, whose weights are zeros that take no space on the disk."""
    model = find_installed(INSTALLABLE["smollm2"]) if is_real else save_gguf(build("llama"), tmp_path / "model.gguf")
    if model is None:
        pytest.skip("smollm2 is not installed; run: selfspec models install smollm2")
    change_at_random(*split_file(model), tmp_path / "changed.gguf", 10_000, read_or_refuse)


@pytest.mark.slow
def test_models_with_changed_bytes_are_loaded_or_refused(tmp_path: Path) -> None:
    """With their config, tokenizer and weights."""

    messages = []

    def load(path: Path) -> bool:
        try:
            load_model(path)
            return True
        except SelfSpecError as error:
            messages.append(str(error))
            return False

    header, size = split_file(fixture_path("Q4_0"))
    change_at_random(header, size, tmp_path / "changed.gguf", 1_000, load)
    assert all(len(message.splitlines()) == 1 for message in messages)
