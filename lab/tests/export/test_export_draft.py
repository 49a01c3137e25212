"""``selfspec export-draft``: each method and format on ``tiny``, used by the engines that it is for, and bad input."""

import functools
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import typer
from click.testing import Result
from typer.testing import CliRunner

from helpers.models import build
from selfspec import load_model
from selfspec.errors import (
    InvalidParameterError,
    ModelLoadError,
    SelfSpecError,
    UnknownMethodError,
    UnsupportedModelError,
)
from selfspec_lab.cli.export_draft import export_draft
from selfspec_lab.export.expectation import Expectation
from selfspec_lab.export.request import Request
from selfspec_lab.families.tiny import tiny_config

LLAMA_SERVER = os.environ.get("LLAMA_SERVER")

NEW_TOKENS = 24
KNAPSPEC = ("--method", "knapspec", "--set", "recent_tokens=12")
"""It selects within these tokens."""
CLASP = ("--method", "clasp")
PROMPTS = (
    "def split_header(line, separator):",
    "class Counter:",
    "The captain was a man of few words; but when",
    "Question: A bus has 45 seats. A third of the seats are empty.",
)
Exports = Callable[..., tuple[Path, dict[str, Any]]]
"""The folder and the record of a draft with some options."""


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "prompts.txt"
    path.write_text("\n".join(PROMPTS))
    return path


def run(*arguments: object) -> Result:
    app = typer.Typer()
    app.command()(export_draft)
    result: Result = CliRunner().invoke(app, [str(each) for each in arguments], catch_exceptions=False)
    return result


def export(folder: Path, texts: Path, *arguments: object) -> dict[str, Any]:
    """Exports a draft of ``tiny`` in float32 and returns its record."""
    short = ("--texts", texts, "--max-new-tokens", NEW_TOKENS, "--dtype", "float32", "--json")
    result = run("--model", "tiny", "--out", folder, *short, *arguments)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    assert found == json.loads((folder / "draft.json").read_text())
    return found


@pytest.fixture(scope="module")
def made(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Exports:
    """Drafts of ``tiny`` by their options. Tests only read them."""

    @functools.cache
    def make(*arguments: object) -> tuple[Path, dict[str, Any]]:
        folder = tmp_path_factory.mktemp("export") / "draft"
        return folder, export(folder, texts, *arguments)

    return make


@pytest.fixture(scope="module")
def tiny() -> Any:
    return load_model("tiny", dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def tiny_file(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``tiny`` as a GGUF file."""
    from selfspec_lab.bench.gguf_writer import write_gguf

    path = tmp_path_factory.mktemp("tiny") / "model.gguf"
    write_gguf(tiny[0], path, tiny[1])
    return path


@pytest.fixture(scope="module")
def written(tiny: Any) -> Callable[..., list[torch.Tensor]]:
    """What ``tiny`` writes after some prompts with options of ``generate``."""
    model, tokenizer = tiny

    def write(**options: Any) -> list[torch.Tensor]:
        prompts = [tokenizer(prompt, return_tensors="pt") for prompt in PROMPTS[:2]]
        return [model.generate(**each, max_new_tokens=NEW_TOKENS, do_sample=False, **options) for each in prompts]

    return write


@pytest.fixture(scope="module")
def plain(written: Callable[..., list[torch.Tensor]]) -> list[torch.Tensor]:
    return written()


class Counted:
    """Counts the tokens that an assistant of transformers drafts, and how many of them are accepted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from transformers.generation.candidate_generator import AssistedCandidateGenerator as Generator

        self.drafted = self.accepted = 0
        drafts, updates = Generator.get_candidates, Generator.update_candidate_strategy

        def get_candidates(own: Any, input_ids: torch.Tensor, *rest: Any, **options: Any) -> Any:
            found = drafts(own, input_ids, *rest, **options)
            self.drafted += found[0].shape[1] - input_ids.shape[1]
            return found

        def update(own: Any, input_ids: torch.Tensor, scores: Any, matches: int, *rest: Any) -> None:
            self.accepted += int(matches)
            updates(own, input_ids, scores, matches, *rest)

        monkeypatch.setattr(Generator, "get_candidates", get_candidates)
        monkeypatch.setattr(Generator, "update_candidate_strategy", update)


@pytest.mark.parametrize(
    "options",
    [KNAPSPEC, CLASP, ("--method", "swift"), ("--method", "self-spec", "--iterations", 2)],
    ids=lambda options: options[1],
)
def test_transformers_drafts_with_it(
    options: tuple[object, ...],
    plain: list[torch.Tensor],
    written: Callable[..., list[torch.Tensor]],
    made: Exports,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers import AutoModelForCausalLM

    folder, found = made(*options)
    assert found["method"] == options[1]
    assert found["zeroed_sublayers"] == []
    assert 0 < len(found["kept_layers"]) < found["layers"] == 16
    assert found["read"] < 1
    reader: Any = AutoModelForCausalLM
    assistant = reader.from_pretrained(folder, dtype=torch.float32)
    assert assistant.config.num_hidden_layers == len(found["kept_layers"])
    assert assistant.generation_config.num_assistant_tokens == found["draft_length"]
    counted = Counted(monkeypatch)
    assert [text.tolist() for text in written(assistant_model=assistant)] == [text.tolist() for text in plain]
    assert counted.drafted > 0
    assert counted.accepted > 0


def test_halves_are_kept_if_asked_for(made: Exports) -> None:
    folder, found = made(*KNAPSPEC, "--halves")
    assert found["zeroed_sublayers"]
    assert set(found["zeroed_sublayers"]) <= set(found["skipped_sublayers"])
    weights = load_model(folder, dtype="float32", device="cpu")[0].state_dict()
    sublayer = found["zeroed_sublayers"][0]
    place = found["kept_layers"].index(sublayer // 2)
    output = ("self_attn.o_proj", "mlp.down_proj")[sublayer % 2]
    assert not weights[f"model.layers.{place}.{output}.weight"].any()


@pytest.mark.parametrize(
    ("method", "bits", "kind"),
    [("clasp", "BF16", "BF16"), ("clasp", "Q8_0", "Q8_0"), ("low-bit", "Q4_0", "Q4_0"), ("low-bit", "Q8_0", "Q8_0")],
)
def test_gguf_files(method: str, bits: str, kind: str, made: Exports, tiny: Any) -> None:
    from gguf import GGUFReader

    folder, found = made("--method", method, "--format", "gguf", "--bits", bits)
    reader = GGUFReader(folder / "draft.gguf")
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert types["blk.0.ffn_up.weight"] == kind
    assert types["token_embd.weight"] == ("Q8_0" if bits == "Q4_0" else kind)
    assert reader.fields["llama.block_count"].contents() == len(found["kept_layers"])
    assert (len(found["kept_layers"]) == 16) == (method == "low-bit")
    assert found["acceptance"] > 0.5
    share = {"BF16": 0.5, "Q8_0": 0.27, "Q4_0": 0.15}[bits]  # of float32
    assert found["read"] == pytest.approx(share, rel=0.2)
    _, tokenizer = load_model(folder / "draft.gguf", device="cpu")
    for prompt in PROMPTS:
        assert tokenizer(prompt).input_ids == tiny[1](prompt).input_ids


@pytest.mark.parametrize(
    ("method", "bits"), [("clasp", "BF16"), ("clasp", "Q8_0"), ("low-bit", "Q8_0"), ("low-bit", "Q4_0")]
)
def test_llama_cpp_drafts_with_it(method: str, bits: str, made: Exports, tiny_file: Path, tiny: Any) -> None:
    """llama.cpp computes from the file what selfspec does, and writes the same text with it as a draft."""
    llama_cpp = pytest.importorskip("llama_cpp")
    path = made("--method", method, "--format", "gguf", "--bits", bits)[0] / "draft.gguf"
    options = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "verbose": False, "logits_all": True}
    draft = llama_cpp.Llama(str(path), **options)
    ids = draft.tokenize(PROMPTS[0].encode())
    assert ids == tiny[1](PROMPTS[0]).input_ids
    draft.eval(ids)
    own = load_model(path, dtype="float32", device="cpu", unpack=True)[0]
    with torch.inference_mode():
        expected = own(torch.tensor([ids])).logits[0].numpy()
    assert np.abs(draft.scores[: len(ids)] - expected).max() < (0.1 if bits == "BF16" else 0.5)  # it rounds states, too
    model = llama_cpp.Llama(str(tiny_file), **options)
    plain = greedy(model, ids)
    drafts = Drafts(draft, model)
    model.reset()
    model.draft_model = drafts
    assert greedy(model, ids) == plain
    assert drafts.drafted > 0
    assert drafts.accepted > 0


@contextmanager
def llama_server(command: str, model: Path) -> Iterator[str]:
    """The URL of a server that a printed command starts with a model in place of ``MODEL.gguf``."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    words = [{"llama-server": LLAMA_SERVER or "", "MODEL.gguf": str(model)}.get(each, each) for each in command.split()]
    options = ["--port", str(port), "--ctx-size", "512", "--parallel", "1", "--threads", "1", "--threads-batch", "1"]
    process = subprocess.Popen([*words, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + 60
    try:
        while not answers(f"{url}/health"):
            assert process.poll() is None, process.communicate()[0][-2000:]
            assert time.monotonic() < until, "the server did not start"
            time.sleep(0.1)
        yield url
    finally:
        process.kill()
        process.communicate()


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=10).status_code == 200
    except httpx.TransportError:
        return False


def completions(url: str) -> list[dict[str, Any]]:
    """The greedy completions of all prompts."""
    body = {"n_predict": NEW_TOKENS, "temperature": 0, "cache_prompt": False}
    return [httpx.post(f"{url}/completion", json={**body, "prompt": each}, timeout=60).json() for each in PROMPTS]


@pytest.mark.skipif(LLAMA_SERVER is None, reason="LLAMA_SERVER names no llama-server")
@pytest.mark.parametrize(("method", "bits"), [("clasp", "Q8_0"), ("low-bit", "Q4_0")])
def test_llama_server_drafts_with_it_by_the_printed_command(
    method: str, bits: str, made: Exports, tiny_file: Path
) -> None:
    _, found = made("--method", method, "--format", "gguf", "--bits", bits)
    with llama_server("llama-server -m MODEL.gguf", tiny_file) as url:
        plain = completions(url)
    with llama_server(found["usage"]["llama.cpp"], tiny_file) as url:
        drafted = completions(url)
    assert [each["content"] for each in drafted] == [each["content"] for each in plain]
    counts = [(each["timings"]["draft_n"], each["timings"]["draft_n_accepted"]) for each in drafted]
    assert all(drafts >= accepted > 0 for drafts, accepted in counts)
    assert not any("draft_n" in each["timings"] for each in plain)


def greedy(model: Any, ids: list[int]) -> list[int]:
    found: list[int] = []
    for token in model.generate(ids, temp=0.0, repeat_penalty=1.0):
        found.append(token)
        if len(found) == 32:
            return found
    return found


class Drafts:
    """A draft model of llama-cpp-python that another model drafts for, four tokens a round."""

    def __init__(self, draft: Any, model: Any) -> None:
        self.draft, self.drafted, self.accepted = draft, 0, 0
        self.last: list[int] = []
        self.context = 0

    def __call__(self, input_ids: Any, /, **_: Any) -> Any:
        text = [int(token) for token in input_ids]
        self.accepted += sum(1 for _ in self._agreeing(text))
        tokens: list[int] = []
        self.draft.reset()
        for token in self.draft.generate(text, temp=0.0, repeat_penalty=1.0):
            tokens.append(token)
            if len(tokens) == 4:
                break
        self.last, self.context = tokens, len(text)
        self.drafted += len(tokens)
        return np.array(tokens, dtype=np.intc)

    def _agreeing(self, text: list[int]) -> Iterator[int]:
        for drafted, written in zip(self.last, text[self.context :], strict=False):
            if drafted != written:
                return
            yield drafted


def test_expected_speedup() -> None:
    found = Expectation(0.8, 100, 0.25, 0.3, {1: 1.0, 2: 1.1, 3: 3.0})
    assert found.speedup(1) == pytest.approx(1.8 / 1.25)
    assert found.speedup(2) == pytest.approx((1 + 0.8 + 0.64) / 1.6)
    assert (found.best_length, found.best) == (2, found.speedup(2))


@pytest.mark.parametrize("method", ["auto", "suffix", "prompt-lookup", "autoregressive", "layerskip"])
def test_methods_without_a_kept_set_are_refused(method: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError, match=f"'{method}' has no kept set that a checkpoint could hold"):
        run("--model", "tiny", "--method", method, "--out", tmp_path / "draft")
    assert not (tmp_path / "draft").exists()


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (UnknownMethodError, "there is no method 'clsp'", ("--method", "clsp")),
        (InvalidParameterError, "choose --format gguf", ("--method", "low-bit")),
        (InvalidParameterError, "no format 'onnx'", ("--method", "clasp", "--format", "onnx")),
        (InvalidParameterError, "--bits is for GGUF files", ("--method", "clasp", "--bits", "Q8_0")),
        (InvalidParameterError, "no bits 'Q3_K'", ("--method", "clasp", "--format", "gguf", "--bits", "Q3_K")),
        (InvalidParameterError, "fewer bits", ("--method", "low-bit", "--format", "gguf", "--bits", "BF16")),
        (InvalidParameterError, "at least 2", ("--method", "clasp", "--max-new-tokens", 1)),
        (InvalidParameterError, "at least 1", ("--method", "clasp", "--iterations", 0)),
        (SelfSpecError, "cannot read prompts file", ("--method", "clasp", "--texts", "nowhere.txt")),
    ],
)
def test_bad_options(error: type[Exception], message: str, arguments: tuple[object, ...], tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        run("--model", "tiny", "--out", tmp_path / "draft", *arguments)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_empty_is_refused(made: Exports, texts: Path, tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("mine")
    for force in ((), ("--force",)):
        with pytest.raises(ModelLoadError, match="is not empty"):
            run("--model", "tiny", "--method", "clasp", "--out", tmp_path, *force)
    folder = tmp_path / "draft"
    shutil.copytree(made(*CLASP)[0], folder)
    with pytest.raises(ModelLoadError, match="is not empty"):
        run("--model", "tiny", "--method", "clasp", "--out", folder)
    export(folder, texts, "--method", "low-bit", "--format", "gguf", "--force")
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "draft.gguf", "draft.json"]


def test_families_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    """Folders with a config alone."""
    for model_type in ("jamba", "qwen3_next"):
        tiny_config(model_type).save_pretrained(tmp_path / model_type)
        with pytest.raises(UnsupportedModelError, match="cannot be pruned"):
            Request(str(tmp_path / model_type), "clasp", tmp_path / "draft").check()
    build("gemma3").config.save_pretrained(tmp_path / "gemma3")
    Request(str(tmp_path / "gemma3"), "clasp", tmp_path / "draft").check()
    with pytest.raises(UnsupportedModelError, match="GGUF files can be written for the families"):
        Request(str(tmp_path / "gemma3"), "clasp", tmp_path / "draft", form="gguf").check()
