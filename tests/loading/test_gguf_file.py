"""The reader of GGUF files: what the gguf package reads, in bounded time and memory; what is wrong is said by name."""

import os
import random
import shutil
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from hypothesis import given
from hypothesis import strategies as st

from helpers import raw_gguf as raw
from helpers.gguf_files import save_gguf
from helpers.models import build
from selfspec.errors import ModelLoadError, UnsupportedModelError
from selfspec.loading.gguf_file import GgufFile
from selfspec.loading.gguf_types import GGML_TYPES, RUNNABLE_TYPES

SECONDS = 1.0
BYTES = 2**20
NUMBERS = np.arange(64, dtype=np.float32).reshape(2, 32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gguf(build("llama"), tmp_path_factory.mktemp("gguf") / "model.gguf")


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


def same(value: Any, expected: Any) -> bool:
    return list(value) == list(expected) if isinstance(expected, list) else bool(value == expected)


def check_as_gguf_reads(path: Path) -> None:
    """Compares keys, values and tensors with what the gguf package reads."""
    expected: Any = GGUFReader(path)
    with GgufFile.open(path) as file:
        names = [name for name in expected.fields if not name.startswith("GGUF.")]
        assert list(file.metadata) == names
        for name in names:
            assert same(file.metadata[name], expected.fields[name].contents()), name
        assert list(file.tensors) == [tensor.name for tensor in expected.tensors]
        for tensor in expected.tensors:
            found = file.tensors[tensor.name]
            assert found.type == tensor.tensor_type.name
            assert found.shape == tuple(reversed(tensor.shape.tolist()))
            assert found.nbytes == tensor.n_bytes
            assert found.data().tobytes() == tensor.data.tobytes()


def test_a_model_is_read_as_the_gguf_package_reads_it(model: Path) -> None:
    check_as_gguf_reads(model)


NUMBER_KINDS = [kind for kind in GGUFValueType if kind not in (GGUFValueType.STRING, GGUFValueType.ARRAY)]
SMALLEST = {"INT8": -(2**7), "INT16": -(2**15), "INT32": -(2**31), "INT64": -(2**63), "BOOL": True}
LARGEST = {"UINT8": 2**8 - 1, "UINT16": 2**16 - 1, "UINT32": 2**32 - 1, "UINT64": 2**64 - 1, "FLOAT64": 1e-300}


def test_every_value_type(tmp_path: Path) -> None:
    path = tmp_path / "values.gguf"
    writer = GGUFWriter(path, "llama")
    for kind in NUMBER_KINDS:
        value = SMALLEST.get(kind.name, LARGEST.get(kind.name, 0.5))
        writer.add_key_value(f"one.{kind.name}", value, kind)
        writer.add_key_value(f"many.{kind.name}", [value, value, type(value)(0)], GGUFValueType.ARRAY, kind)
    writer.add_string("text", "grüße, 世界 🌍\0\n")
    writer.add_array("texts", ["a", "Ġb", "", "世"])
    close(writer)
    check_as_gguf_reads(path)
    metadata = read(path).metadata
    assert type(metadata["one.INT64"]) is int
    assert type(metadata["one.FLOAT32"]) is float
    assert metadata["one.BOOL"] is True
    assert metadata["many.UINT64"].dtype == np.uint64
    assert metadata["many.BOOL"].dtype == np.bool_
    assert type(metadata["texts"]) is list


def test_empty_arrays(tmp_path: Path) -> None:
    keys = [raw.array(f"array.{kind}", kind, b"", 0) for kind in (*NUMBER_KINDS, raw.STRING)]
    values = read(save(tmp_path / "m.gguf", raw.gguf(keys))).metadata.values()
    assert [len(value) for value in values] == [0] * len(keys)


def close(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


STORED = [kind for kind in GGMLQuantizationType if kind.name != "Q8_1"]
"""Q8_1 is of inputs only; ggml halved its scales after the gguf package was written, to 36 bytes a block."""


@pytest.mark.parametrize("kind", STORED, ids=lambda kind: kind.name)
def test_every_tensor_type(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    block, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(0).integers(0, 256, (3, 2, 5 * block_bytes), dtype=np.uint8)
    data = raw.gguf(tensors=[raw.tensor("blocks", (3, 2, 5 * block), int(kind))], data=blocks.tobytes())
    path = save(tmp_path / "tensor.gguf", data)
    check_as_gguf_reads(path)
    (tensor,) = read(path).tensors.values()
    assert (tensor.type, tensor.shape, tensor.nbytes) == (kind.name, (3, 2, 5 * block), blocks.size)


def test_the_table_of_types_is_that_of_the_gguf_package() -> None:
    assert {number: (kind.name, kind.block_size, kind.block_bytes) for number, kind in GGML_TYPES.items()} == {
        **{int(kind): (kind.name, *GGML_QUANT_SIZES[kind]) for kind in STORED},
        9: ("Q8_1", 32, 36),
    }
    assert {kind.name for kind in GGML_TYPES.values()} >= RUNNABLE_TYPES


@pytest.mark.parametrize("version", [2, 3])
def test_both_versions(version: int, tmp_path: Path) -> None:
    tensors = [raw.tensor("numbers", NUMBERS.shape)]
    path = save(tmp_path / "m.gguf", raw.gguf(tensors=tensors, data=NUMBERS.tobytes(), version=version))
    assert (read(path).tensors["numbers"].data().view("<f4").reshape(2, 32) == NUMBERS).all()


@pytest.mark.parametrize("alignment", [8, 32, 4096])
def test_the_alignment_of_the_file_counts(alignment: int, tmp_path: Path) -> None:
    path = tmp_path / "aligned.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_custom_alignment(alignment)
    for name in "ab":
        writer.add_tensor(name, NUMBERS[:, :3])
    close(writer)
    check_as_gguf_reads(path)
    assert np.array_equal(read(path).tensors["b"].data().view("<f4"), NUMBERS[:, :3].ravel())


def test_data_is_mapped_read_only_and_outlives_its_file(model: Path) -> None:
    file = read(model)
    tensor = next(iter(file.tensors.values()))
    data = tensor.data()
    copy = data.copy()
    assert not data.flags.writeable
    tensor.release()
    assert (data == copy).all()
    file.close()
    file.close()
    assert (data == copy).all()
    with pytest.raises(ValueError, match="closed"):
        tensor.data()


def resident_file_bytes() -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssFile")]
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not say what is resident")
def test_release_gives_the_pages_back(tmp_path: Path) -> None:
    size = 2**25
    path = save(tmp_path / "m.gguf", raw.gguf(tensors=[raw.tensor("big", (size // 4,))], data=bytes(size)))
    with read(path) as file:
        before = resident_file_bytes()
        assert not file.tensors["big"].data().any()
        assert resident_file_bytes() - before > size // 2
        file.tensors["big"].release()
        assert resident_file_bytes() - before < size // 8


def split(folder: Path, count: int = 3) -> list[Path]:
    """A split file: the keys in the first part, one tensor in each, as llama.cpp's tool writes them."""
    paths = []
    for i in range(count):
        keys = [raw.key("general.name", raw.STRING, "in parts")] if i == 0 else []
        keys += [raw.key("split.no", raw.UINT32, i), raw.key("split.count", raw.UINT32, count)]
        keys.append(raw.key("split.tensors.count", raw.UINT32, count))
        content = raw.gguf(keys, [raw.tensor(f"numbers.{i}", NUMBERS.shape)], (NUMBERS + i).tobytes())
        paths.append(save(folder / f"model-{i + 1:05}-of-{count:05}.gguf", content))
    return paths


@pytest.mark.parametrize("opened", [0, 1, 2])
def test_any_part_of_a_split_file_stands_for_all(opened: int, tmp_path: Path) -> None:
    paths = split(tmp_path)
    with GgufFile.open(str(paths[opened])) as file:
        assert file.path == paths[opened]
        assert file.parts == tuple(paths)
        assert file.metadata["general.name"] == "in parts"
        assert list(file.tensors) == [f"numbers.{i}" for i in range(3)]
        for i, tensor in enumerate(file.tensors.values()):
            assert np.array_equal(tensor.data().view("<f4").reshape(2, 32), NUMBERS + i)


def test_a_file_split_by_the_gguf_package(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "llama", split_max_tensors=2)
    writer.add_string("general.name", "in parts")
    for i in range(5):
        writer.add_tensor(f"numbers.{i}", NUMBERS + i)
    close(writer)
    assert len(list(tmp_path.iterdir())) == 3
    file = read(tmp_path / "model-00002-of-00003.gguf")
    assert file.metadata["general.name"] == "in parts"
    assert [np.array_equal(tensor.data().view("<f4")[:1], [i]) for i, tensor in enumerate(file.tensors.values())] == [
        True
    ] * 5


def replace_bytes(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda paths: paths[1].unlink(), r"1 of the 3 parts .* missing: '.*model-00002-of-00003\.gguf'"),
        (lambda paths: shutil.copy(paths[1], paths[2]), r"model-00003-of-00003.gguf' is not part 3 of 3"),
        (lambda paths: os.truncate(paths[2], 0), "00003.* empty"),
        (lambda paths: replace_bytes(paths[2], b"numbers.2", b"numbers.1"), r"'numbers\.1' .*00003.* another part"),
        (lambda paths: replace_bytes(paths[0], tensor_count(3), tensor_count(4)), "hold 3 tensors, not 4"),
        (lambda paths: replace_bytes(paths[0], b"split.no", b"split.on"), None),
        (lambda paths: replace_bytes(paths[0], part_count(3), part_count(4)), "part 1 of 4 .* name"),
        (lambda paths: replace_bytes(paths[0], part_count(3), part_count(2**32 - 1)), "part 1 of 4294967295 .* name"),
    ],
)
def test_a_wrong_part_is_named(spoil: Callable[[list[Path]], Any], message: str | None, tmp_path: Path) -> None:
    paths = split(tmp_path)
    spoil(paths)
    if message is None:  # the first part needs no number
        assert len(read(paths[0]).tensors) == 3
        return
    with pytest.raises(ModelLoadError, match=message):
        read(paths[0])


def tensor_count(value: int) -> bytes:
    return raw.key("split.tensors.count", raw.UINT32, value)


def part_count(value: int) -> bytes:
    return raw.key("split.count", raw.UINT32, value)


def test_a_part_of_another_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"part 2 of 3 .* NAME-00001-of-00003\.gguf"):
        read(split(tmp_path)[1].rename(tmp_path / "second.gguf"))


NUMBERS_ENTRY = raw.tensor("n", NUMBERS.shape)
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


def test_types_that_do_not_run_are_refused_by_name(tmp_path: Path) -> None:
    entries = [raw.tensor("norm", (32,)), raw.tensor("weight", (256,), 16, 128), raw.tensor("more", (32,), 39, 224)]
    path = save(tmp_path / "m.gguf", raw.gguf(tensors=entries, data=bytes(256)))
    with read(path) as file, pytest.raises(UnsupportedModelError, match=r"IQ2_XXS, MXFP4 \('weight'\)"):
        file.check_runnable()


def test_types_that_run_are_not_refused(model: Path) -> None:
    read(model).check_runnable()


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


def change_at_random(content: bytes, header: int, path: Path, files: int) -> None:
    """Reads copies of a file with up to four bytes of its header changed and now and then its end cut off."""
    generator = random.Random(0)
    taken, slowest = 0, 0.0
    save(path, content)
    with path.open("r+b", buffering=0) as file:
        for _ in range(files):
            changed = bytearray(content[:header])
            for _ in range(generator.randint(1, 4)):
                value = generator.choice((0, 1, 127, 128, 255, generator.randrange(256)))
                changed[generator.randrange(header)] = value
            file.seek(0)
            file.write(changed)
            cut = generator.random() < 0.1
            if cut:
                file.truncate(generator.randrange(len(content)))
            start = time.thread_time()
            taken += read_or_refuse(path)
            slowest = max(slowest, time.thread_time() - start)
            if cut:
                file.seek(0)
                file.write(content)
    assert 0 < taken < files
    assert slowest < SECONDS


def test_ten_thousand_files_with_changed_bytes_are_read_or_refused(tmp_path: Path) -> None:
    content = small_header()
    change_at_random(content, len(content), tmp_path / "changed.gguf", 10_000)


@pytest.mark.slow
def test_ten_thousand_models_with_changed_bytes_are_read_or_refused(model: Path, tmp_path: Path) -> None:
    with read(model) as file:
        header = min(tensor._offset for tensor in file.tensors.values())
    change_at_random(model.read_bytes(), header, tmp_path / "changed.gguf", 10_000)
