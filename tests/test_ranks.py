"""Two processes that share a model: the same text and the same rounds on both, and clear ends where they differ."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers import ranks_program
from helpers.checkpoints import make_tokenizer, save_checkpoint
from helpers.models import plain_text

pytestmark = pytest.mark.early

PROGRAM = Path(ranks_program.__file__)


def environment(**others: str) -> dict[str, str]:
    folders = [str(PROGRAM.parents[1]), *sys.path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1", **others}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints; ``other`` is ``llama`` but for one projection, of which each process holds a part."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name in ("llama", "llama-multi-query", "stablelm"):
        save_checkpoint(folder / name, name)
    model = AutoModelForCausalLM.from_pretrained(folder / "llama")
    with torch.no_grad():
        model.model.layers[2].self_attn.q_proj.weight.mul_(1.5)
    model.save_pretrained(folder / "other")
    make_tokenizer().save_pretrained(folder / "other")
    return folder


@pytest.fixture(scope="module")
def ended(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], str]:
    """What came of everything in each of two processes, and what rank 0 wrote when rank 1 was killed afterwards."""
    out = tmp_path_factory.mktemp("ranks")
    first, second = start(folder, out, "SIGKILL")
    outputs = [process.communicate(timeout=300)[0] for process in (first, second)]
    assert (first.returncode, second.returncode) == (3, -signal.SIGKILL), [output[-4000:] for output in outputs]
    return read(out), outputs[0]


@pytest.fixture(scope="module")
def shared(ended: tuple[list[dict[str, Any]], str]) -> list[dict[str, Any]]:
    """What came of everything in each process."""
    return ended[0]


def start(folder: Path, out: object, number: str, **others: str) -> list["subprocess.Popen[str]"]:
    """Two processes that share a model, with the variables that ``torchrun`` would give them."""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port()), **others}
    return [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(folder), str(out), number],
            env=environment(RANK=str(rank), LOCAL_RANK=str(rank), **common),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]


def read(out: Path) -> list[dict[str, Any]]:
    return [json.loads((out / f"{rank}.json").read_text()) for rank in (0, 1)]


def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_each_process_holds_a_part_of_the_weights(shared: list[dict[str, Any]]) -> None:
    assert [each["shard"] for each in shared] == [[48, 64], [48, 64]]


@pytest.mark.parametrize("case", ranks_program.CASES)
def test_all_processes_play_the_same_rounds(shared: list[dict[str, Any]], case: str) -> None:
    first, second = (each[case] for each in shared)
    assert first == second
    if case not in ranks_program.MAY_DRAFT_NOTHING:
        assert sum(each["drafted"] for each in first) > 0
        assert sum(each["accepted"] for each in first) > 0


@pytest.mark.parametrize("case", ["plain", "skipping", "selecting", "n-gram", "auto", "auto by its clock"])
def test_the_text_is_that_of_the_whole_model(shared: list[dict[str, Any]], case: str) -> None:
    texts = [tuple(each["token_ids"]) for each in shared[0][case]]
    prompts = (ranks_program.TEXT, ranks_program.REPEATING)
    assert texts == [plain_text("llama", text, ranks_program.LENGTH) for text in prompts]


@pytest.mark.slow
def test_torchrun_starts_them(shared: list[dict[str, Any]], folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port())]
    command += [str(PROGRAM), str(folder), str(tmp_path), "-"]
    ran = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-4000:]
    for started, wanted in zip(read(tmp_path), shared, strict=True):
        assert all(started[case] == wanted[case] for case in ("shard", "plain", "skipping", "seeded", "errors"))


def test_a_clock_ends_the_text_alike(shared: list[dict[str, Any]]) -> None:
    assert 0 < len(shared[0]["for a time"][0]["token_ids"]) < 500


def test_samples_differ_from_the_greedy_text(shared: list[dict[str, Any]]) -> None:
    texts = {name: tuple(shared[0][name][0]["token_ids"]) for name in ("plain", "sampled", "seeded")}
    assert len(set(texts.values())) == 3


def test_the_model_has_one_identity(shared: list[dict[str, Any]]) -> None:
    assert shared[0]["fingerprint"] == shared[1]["fingerprint"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("prompts", "RanksError: rank 1 and rank 0 differ in a prompt or its parameters"),
        ("parameters", "RanksError: rank 1 and rank 0 differ in a prompt or its parameters"),
        ("versions", "RanksError: rank 1 and rank 0 differ in the versions of selfspec, torch and transformers"),
        ("weights", "RanksError: rank 1 and rank 0 differ in the weights of their model"),
        ("heads", "UnsupportedModelError: 2 processes cannot share the 1 key and value heads"),
        ("family", "UnsupportedModelError: transformers has no tp_plan for the family 'stablelm'"),
        ("runtime", "UnsupportedModelError: runtime 'compiled' needs all weights in one process"),
        ("low-bit", "UnsupportedModelError: low-bit weights need the kernels"),
        ("files", "InvalidParameterError: processes that share a model may not have the same files"),
        ("requests", "InvalidParameterError: 2 processes share this model"),
    ],
)
def test_what_cannot_be_shared_is_refused_on_every_rank(shared: list[dict[str, Any]], name: str, message: str) -> None:
    for each in shared:
        assert each["errors"][name].startswith(message)
        assert "\n" not in each["errors"][name]


def assert_ended(output: str) -> None:
    """Rank 0 says that the other one was lost, and soon."""
    message = r"([\d.]+) s later: RanksError: another process that shares the model ended or did not answer"
    found = re.search(message, output)
    assert found is not None, output[-3000:]
    assert float(found[1]) < 60


def test_a_lost_process_ends_the_others(ended: tuple[list[dict[str, Any]], str]) -> None:
    assert_ended(ended[1])


@pytest.mark.slow
def test_a_process_that_stands_still_ends_the_others(folder: Path) -> None:
    processes = start(folder, "-", "SIGSTOP", SELFSPEC_RANK_TIMEOUT="4")
    try:
        output, _ = processes[0].communicate(timeout=300)
        assert processes[0].returncode == 3, output[-3000:]
        assert_ended(output)
    finally:
        for process in processes:
            process.kill()
            process.communicate(timeout=30)
