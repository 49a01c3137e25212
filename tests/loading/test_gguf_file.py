"""The reader of GGUF files reads what the gguf package reads, and all parts of a split file as one."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter

from helpers import raw_gguf as raw
from helpers.gguf_files import save_gguf
from helpers.models import build
from selfspec.errors import ModelLoadError, UnsupportedModelError
from selfspec.loading.gguf_file import GgufFile
from selfspec.loading.gguf_types import BLOCKS, NAMES
from selfspec.runtimes.formats import GGUF_FORMATS

NUMBERS = np.arange(64, dtype=np.float32).reshape(2, 32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gguf(build("llama"), tmp_path_factory.mktemp("gguf") / "model.gguf")


def save(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def read(path: Path) -> GgufFile:
    return GgufFile.open(path)


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


STORED = [kind for kind in GGMLQuantizationType if kind.name in BLOCKS]


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
    assert all(NAMES[int(kind)] == kind.name for kind in GGMLQuantizationType)
    assert {kind.name: GGML_QUANT_SIZES[kind] for kind in STORED} == BLOCKS
    assert BLOCKS.keys() == GGUF_FORMATS.keys()


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
        (
            lambda paths: [replace_bytes(paths[i], b"numbers.%d" % i, b"a\n" * 4 + b"a") for i in (1, 2)],
            r"'a\\na\\na\\na\\na' .*00003.* another part",
        ),
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


def test_types_that_do_not_run_are_refused_by_name(tmp_path: Path) -> None:
    entries = [raw.tensor("norm", (32,)), raw.tensor("weight", (256,), 16, 128), raw.tensor("more", (64,), 40, 224)]
    path = save(tmp_path / "m.gguf", raw.gguf(tensors=entries, data=bytes(288)))
    with pytest.raises(UnsupportedModelError, match=r"'weight' .* stored as IQ2_XXS, which is not supported; take"):
        read(path)
