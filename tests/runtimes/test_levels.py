"""Levels of instructions: which one is chosen; every one that this processor has against modules, and row by row."""

import copy
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from helpers.kernels import found_again, needs_kernels
from helpers.low_bit_model import SUBLAYERS, random_model
from helpers.models import build
from helpers.mxfp4_checkpoints import gpt_oss, save_mxfp4
from selfspec import Engine, load_model
from selfspec.errors import InvalidParameterError
from selfspec.runtimes import kernel_build, kernels
from selfspec.runtimes.precision import Precision
from selfspec.runtimes.target import Target

pytestmark = pytest.mark.early  # a level's kernels are built

ICE_LAKE = {
    "sse2",
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512cd",
    "avx512dq",
    "avx512vl",
    "avx512_vnni",
    "sha_ni",
}
PROMPT = torch.arange(1, 40) % 128


def names(architecture: str, features: set[str]) -> list[str]:
    return [level.name for level in kernel_build.usable_levels(architecture, features)]


def test_the_levels_that_a_processor_has() -> None:
    assert names("x86_64", ICE_LAKE) == ["sse2", "avx2", "avx512", "avx512-vnni"]
    assert names("x86_64", ICE_LAKE - {"avx512bw"}) == ["sse2", "avx2"]
    assert names("x86_64", ICE_LAKE | {"avx512_bf16"})[-1] == "avx512-bf16"
    assert names("x86_64", ICE_LAKE | {"avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"})[-1] == "amx"
    assert names("aarch64", {"asimd"}) == ["neon"]
    assert names("aarch64", {"asimd", "asimddp"}) == ["neon", "neon-dot"]
    assert names("aarch64", {"asimddp", "i8mm", "bf16", "sve"}) == ["neon", "neon-dot", "neon-i8mm", "neon-bf16"]
    assert names("aarch64", {"asimddp", "bf16"}) == ["neon", "neon-dot"]
    assert names("aarch64", set()) == ["neon"]
    assert names("x86_64", {"avx2", "fma", "f16c", "avx_vnni"})[-1] == "avx-vnni"
    assert names("riscv64", set()) == ["generic"]
    assert names("x86_64", set()) == ["sse2"]


X86 = "processor\t: 0\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\nflags\t\t: fpu avx2\n"
ARM = "processor\t: 0\nBogoMIPS\t: 2100.00\nFeatures\t: asimd i8mm\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n"


@pytest.mark.parametrize(
    ("listing", "name", "features"),
    [
        (X86 + "\n" + X86, "AMD EPYC, family 25 model 17", {"fpu", "avx2"}),
        (ARM, "aarch64, family 0x41 model 0xd40", {"asimd", "i8mm"}),
        ("processor\t: 0\n", "aarch64", set()),
        (None, "aarch64", set()),
    ],
)
def test_the_name_of_the_processor(
    listing: str | None, name: str, features: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: object, **__: object) -> str:
        if listing is None:
            raise FileNotFoundError
        return listing

    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr(kernel_build, "machine", lambda: "aarch64")
    assert kernel_build.processor_name.__wrapped__() == name
    assert kernel_build.listed_features() == features


@pytest.mark.parametrize("name", ["avx3", "neon2", "AVX2"])
def test_a_level_that_there_is_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SELFSPEC_KERNELS", name)
    with pytest.raises(InvalidParameterError, match=f"SELFSPEC_KERNELS is '{name}'; this processor has "):
        kernel_build.choose_level()
    with found_again(), pytest.raises(InvalidParameterError, match=name):
        Target(random_model())


def test_tiles_that_are_not_permitted(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = frozenset(ICE_LAKE | {"avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"})
    monkeypatch.setattr(kernel_build, "listed_features", lambda: listed)
    monkeypatch.setattr(kernel_build, "machine", lambda: "x86_64")
    monkeypatch.delenv("SELFSPEC_KERNELS", raising=False)
    monkeypatch.setattr(kernel_build, "_permits_tiles", lambda: True)
    assert kernel_build.choose_level().name == "amx"
    assert kernel_build.refusal() == ""
    monkeypatch.setattr(kernel_build, "_permits_tiles", lambda: False)
    assert kernel_build.choose_level().name == "avx512-bf16"
    assert kernel_build.processor_features() == listed - {"amx_tile", "amx_bf16", "amx_int8"}
    monkeypatch.setenv("SELFSPEC_KERNELS", "amx")
    with pytest.raises(
        InvalidParameterError, match=r"has sse2, .*, avx512-bf16\. AMX is not used: Linux does not permit"
    ):
        kernel_build.choose_level()


@needs_kernels
def test_the_description_says_why_a_level_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ";" not in kernels.describe()
    monkeypatch.setattr(kernels, "refusal", lambda: "AMX is not used: a reason")
    assert kernels.describe().endswith("; AMX is not used: a reason")


@pytest.mark.skipif(
    not Path("/proc/cpuinfo").exists() or kernel_build.machine() != "x86_64", reason="of Linux on x86-64"
)
def test_linux_permits_tiles_where_the_processor_has_them() -> None:
    if "amx_tile" not in kernel_build.listed_features():
        assert not kernel_build._permits_tiles()


def test_flags_name_the_instructions() -> None:
    flags = {level.name: level.flags for level in kernel_build.LEVELS}
    assert flags["avx2"] == ("-mavx2", "-mfma", "-mf16c")
    assert flags["avx-vnni"][-1] == "-mavxvnni"
    assert flags["avx512-bf16"][-2:] == ("-mavx512vnni", "-mavx512bf16")
    assert flags["amx"][-3:] == ("-mamx-tile", "-mamx-bf16", "-mamx-int8")


def test_the_build_needs_no_torch() -> None:
    """The wheel's hook imports it where nothing else is installed."""
    absent = "import sys; sys.modules.update(dict.fromkeys(('torch', 'numpy', 'transformers'))); "
    program = absent + "import selfspec.runtimes.kernel_build"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_of_several_that_need_a_library_one_builds_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    built = []

    def build(level: kernel_build.Level, library: Path) -> None:
        time.sleep(0.05)
        built.append(level.name)
        library.touch()

    monkeypatch.setattr(kernels, "build", build)
    library = tmp_path / "cache" / "kernels.so"
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda level: kernels._build_once(level, library), kernel_build.LEVELS[:4]))
    assert len(built) == 1
    assert library.exists()


def test_a_cache_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(kernels.KernelBuildError, match=r"cannot be kept in .*file"):
        kernels._build_once(kernel_build.LEVELS[0], tmp_path / "file" / "kernels.so")


LEVELS = [level.name for level in kernel_build.usable_levels(kernel_build.machine(), kernel_build.processor_features())]
QUICK = "avx2" if "avx2" in LEVELS else LEVELS[0]
"""The one that is tested each time; the others take a build each."""


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.slow] * (name != QUICK)) for name in LEVELS])
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Kernels of a level, for models that are prepared meanwhile."""
    monkeypatch.setenv("SELFSPEC_KERNELS", request.param)
    with found_again():
        yield request.param


@torch.inference_mode()
def states(target: Target, chunk: int, precision: Precision | None = None) -> torch.Tensor:
    """The logits of a prompt that is read in chunks."""
    view, state = target.at(precision), target.new_sequence(len(PROMPT), len(PROMPT), len(PROMPT))
    logits = []
    for tokens in PROMPT.split(chunk):
        forward = target.lay_out(state, len(tokens))
        logits.append(view.logits(view.run(target.embed(tokens), range(2 * (SUBLAYERS // 2)), forward).hidden_states))
        state.cache.commit(range(len(tokens)))
    return torch.cat(logits)


@needs_kernels
def test_every_level(level: str) -> None:
    """float32 as transformers' modules; in bfloat16 a row is the same bit for bit alone and with others."""
    assert kernels.find().level == level
    exact, half = Target(random_model(), "compiled"), Target(random_model(torch.bfloat16), "compiled")
    modules = Target(random_model(), "eager")
    torch.testing.assert_close(states(exact, 13), states(modules, 39), rtol=1e-4, atol=1e-4)
    for precision in (None, Precision.of(8), Precision.of(6), Precision.of(4)):
        alone = states(half, 1, precision)
        for chunk in (2, 5, 13, 39):
            if chunk <= kernels.row_limit(torch.bfloat16, attends=True):
                assert torch.equal(states(half, chunk, precision), alone)
    packed, packed_modules = (Target(random_model(), runtime, cache_bits=8) for runtime in ("compiled", "eager"))
    assert torch.equal(states(packed, 13), states(packed, 1))
    rounded = states(packed_modules, 39)
    assert (states(packed, 13) - rounded).norm() < 0.01 * rounded.norm() < (rounded - states(modules, 39)).norm() * 10
    low, full = states(half, 39, Precision.of(8)).float(), states(modules, 39)
    assert 0 < (low - full).norm() / full.norm() < 0.1


@needs_kernels
def test_every_level_writes_what_transformers_writes(level: str) -> None:
    model = random_model()
    expected = model.generate(PROMPT[None], max_new_tokens=24, do_sample=False, pad_token_id=0)[0, len(PROMPT) :]
    generation = Engine(model, method="low-bit", runtime="compiled").generate(PROMPT, max_new_tokens=24)
    assert list(generation.token_ids) == expected.tolist()
    assert sum(each.drafted for each in generation.rounds) > 0
    assert sum(each.accepted for each in generation.rounds) > 0


@needs_kernels
@torch.inference_mode(mode=False)
def test_every_level_runs_gpt_oss(level: str, tmp_path: Path) -> None:
    """Sinks, clamped units and experts in MXFP4: float32 as transformers' modules, rows alone as with others."""
    assert kernels.find().level == level
    folder = save_mxfp4(tmp_path, gpt_oss(num_hidden_layers=SUBLAYERS // 2))
    model, half = (load_model(folder, dtype=dtype, activations="exact")[0] for dtype in ("float32", "bfloat16"))
    exact = Target(model)
    assert exact.at(None).path().native
    wanted = states(Target(load_model(folder, dtype="float32", unpack=True)[0], "eager"), 39)
    torch.testing.assert_close(states(exact, 13), wanted, rtol=1e-4, atol=1e-4)
    rounded = Target(half)
    alone = states(rounded, 1)
    assert (alone.float() - wanted).norm() < 0.2 * wanted.norm()
    for chunk in (2, 13, 39):
        if chunk <= kernels.row_limit(torch.bfloat16, attends=True):
            assert torch.equal(states(rounded, chunk), alone)


@needs_kernels
@torch.inference_mode(mode=False)
def test_every_level_attends_to_latents(level: str) -> None:
    assert kernels.find().level == level
    exact, modules = Target(build("deepseek_v3")), Target(build("deepseek_v3"), "eager")
    assert exact.at(None).path().native
    torch.testing.assert_close(states(exact, 13), states(modules, 39), rtol=1e-4, atol=1e-4)
    half = Target(copy.deepcopy(build("deepseek_v3")).bfloat16())
    alone = states(half, 1)
    for chunk in (2, 13, 39):
        if chunk <= kernels.row_limit(torch.bfloat16, attends=True):
            assert torch.equal(states(half, chunk), alone)


@needs_kernels
def test_every_level_draws_what_the_noise_says(level: str) -> None:
    options = {"max_new_tokens": 24, "temperature": 0.8, "seed": 3, "ignore_eos": True}
    model = random_model()
    expected = Engine(model, method="autoregressive", runtime="eager").generate(PROMPT, **options)
    generation = Engine(model, method="low-bit", runtime="compiled").generate(PROMPT, **options)
    assert generation.token_ids == expected.token_ids
    assert 0 < generation.accepted <= generation.drafted
