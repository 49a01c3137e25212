"""GGUF files by their names on the hub; the hub's client is replaced by a table of files and a folder."""

from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

from fixtures.make_gguf import fixture_path
from selfspec import errors, load_model
from selfspec.loading import gguf_hub, load_config, loader, resolve_name
from selfspec.loading import hub as hub_client
from selfspec.loading.gguf_hub import HubFile

NAME = "someone/Some-Model-GGUF"
FILES = [
    "README.md",
    "some-model-Q4_K.gguf",
    "some-model-Q4_K_M.gguf",
    "some-model.Q6_K.gguf",
    "some-model-iq4_xs.gguf",
    "some-model-UD-Q5_K_XL.gguf",
    "F16/some-model-f16-00001-of-00003.gguf",
    "F16/some-model-f16-00002-of-00003.gguf",
    "F16/some-model-f16-00003-of-00003.gguf",
    "mmproj-some-model-Q6_K.gguf",
    "some-model-q8_0.gguf",
    "other-model-q8_0.gguf",
]


class Hub:
    """A hub with one repository, of which some files have been downloaded."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.files, self.offline = folder, FILES, False
        self.asked: list[Any] = []

    def list_repo_files(self, repository: str) -> Sequence[str]:
        if self.offline:
            raise ConnectionError("cannot reach the hub\nand more")
        if repository != NAME:
            answer = httpx.Response(404, request=httpx.Request("GET", "https://hub"))
            raise RepositoryNotFoundError("404 Client Error", response=answer)
        return self.files

    def snapshot_download(self, repository: str, *, allow_patterns: Any, local_files_only: bool = False) -> str:
        assert repository == NAME
        self.asked.append(allow_patterns)
        if local_files_only and not any(self.folder.rglob("*")):
            raise LocalEntryNotFoundError("not in the cache")
        if self.offline and not local_files_only:
            raise ConnectionError("cannot reach the hub")
        for name in self.files:
            if not local_files_only and any(fnmatch(name, pattern) for pattern in allow_patterns):
                self.keep(name)
        return str(self.folder)

    def keep(self, name: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"GGUF")
        return path


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    made = Hub(tmp_path / "snapshot")
    made.folder.mkdir()
    monkeypatch.setattr(hub_client, "_is_reachable", lambda _: True)
    monkeypatch.setattr(gguf_hub, "HfApi", lambda: made)
    monkeypatch.setattr(gguf_hub, "snapshot_download", made.snapshot_download)
    return made


@pytest.mark.parametrize("name", [f"{NAME}:Q4_K_M", f"{NAME}:q8_0"])
def test_a_name_with_a_type_is_a_file_on_the_hub(name: str) -> None:
    repository, kind = name.split(":")
    assert resolve_name(name) == HubFile(repository, kind)


@pytest.mark.parametrize("name", [NAME, "no-owner:Q4_K_M", f"{NAME}:", f"{NAME}:a b", f"{NAME}:Q4:K"])
def test_other_names_are_not(name: str) -> None:
    assert gguf_hub.parse_hub_file(name) is None


@pytest.mark.parametrize(
    ("kind", "file"),
    [
        ("Q4_K", "some-model-Q4_K.gguf"),
        ("Q4_K_M", "some-model-Q4_K_M.gguf"),
        ("q4_k_m", "some-model-Q4_K_M.gguf"),
        ("Q6_K", "some-model.Q6_K.gguf"),
        ("IQ4_XS", "some-model-iq4_xs.gguf"),
        ("Q5_K_XL", "some-model-UD-Q5_K_XL.gguf"),
        ("UD-Q5_K_XL", "some-model-UD-Q5_K_XL.gguf"),
        ("other-model-q8_0", "other-model-q8_0.gguf"),
    ],
)
def test_the_type_chooses_the_file(hub: Hub, kind: str, file: str) -> None:
    assert gguf_hub.download(HubFile(NAME, kind)) == hub.folder / file
    assert hub.asked == [[file]]


def test_all_parts_of_a_split_file_are_downloaded(hub: Hub) -> None:
    parts = [name for name in FILES if "f16" in name]
    assert gguf_hub.download(HubFile(NAME, "F16")) == hub.folder / parts[0]
    assert hub.asked == [parts]
    assert all((hub.folder / name).is_file() for name in parts)


@pytest.mark.parametrize(
    ("files", "file"),
    [
        (["mtp-model-Q8_0.gguf", "eagle3-model-Q8_0.gguf", "dflash-model-Q8_0.gguf", "model-Q8_0.gguf"], 3),
        (["MTP/model-Q8_0.gguf", "model-Q8_0-MTP.gguf", "imatrix-model-Q8_0.gguf", "model-Q8_0.gguf"], 3),
        (["heads/mtp-model-Q8_0.gguf", "MMPROJ-model-Q8_0.gguf", "Model-MTP-Q8_0.gguf"], 2),
        (["mtp-model-Q8_0.gguf", "MTP/model-Q8_0.gguf"], 1),
        (["mmproj-model-Q8_0.gguf", "model-Q8_0-MTP.gguf"], 1),
    ],
)
def test_what_stands_beside_a_model_is_not_it(hub: Hub, files: list[str], file: int) -> None:
    """Heads that draft, projections of pictures, and statistics of a quantiser."""
    hub.files = files
    assert gguf_hub.download(HubFile(NAME, "Q8_0")) == hub.folder / files[file]


def test_heads_alone_are_no_model(hub: Hub) -> None:
    hub.files = ["mtp-model-Q8_0.gguf", "model-Q4_0.gguf"]
    with pytest.raises(errors.ModelLoadError, match=r"no GGUF file of type 'Q8_0'; its files: model-Q4_0"):
        gguf_hub.download(HubFile(NAME, "Q8_0"))


@pytest.mark.parametrize("kind", ["Q5_K", "Q4", "4_K_M", "README"])
def test_a_type_that_no_file_has_lists_those_that_there_are(hub: Hub, kind: str) -> None:
    with pytest.raises(errors.ModelLoadError, match=rf"no GGUF file of type '{kind}'; its files: F16/.*Q4_K_M"):
        gguf_hub.download(HubFile(NAME, kind))
    assert not hub.asked


def test_a_type_that_several_models_have_lists_them(hub: Hub) -> None:
    wanted = r"several GGUF files of type 'Q8_0'; its files: other-model-q8_0\.gguf, some-model-q8_0\.gguf$"
    with pytest.raises(errors.ModelLoadError, match=wanted):
        gguf_hub.download(HubFile(NAME, "Q8_0"))


def test_a_repository_without_gguf_files(hub: Hub) -> None:
    hub.files = ["model.safetensors"]
    with pytest.raises(errors.ModelLoadError, match="no GGUF file of type 'Q4_K_M'; its files: none"):
        gguf_hub.download(HubFile(NAME, "Q4_K_M"))


def test_offline_a_file_that_was_downloaded_before_is_taken(hub: Hub) -> None:
    path = hub.keep("some-model-Q4_K_M.gguf")
    hub.keep("some-model.Q6_K.gguf")
    hub.offline = True
    assert gguf_hub.download(HubFile(NAME, "Q4_K_M")) == path
    wanted = r"cannot reach the hub; of those .* before: .* no GGUF file of type 'Q8_0'; its files: some-model-Q4_K_M"
    with pytest.raises(errors.ModelLoadError, match=wanted):
        gguf_hub.download(HubFile(NAME, "Q8_0"))


def test_offline_without_files_the_reason_is_named(hub: Hub) -> None:
    hub.offline = True
    with pytest.raises(errors.ModelLoadError, match=f"files of '{NAME}': cannot reach the hub$"):
        load_model(f"{NAME}:Q4_K_M")


def test_a_repository_that_is_not_there(hub: Hub) -> None:
    with pytest.raises(errors.ModelLoadError, match=r"files of 'someone/else': 404"):
        gguf_hub.download(HubFile("someone/else", "Q4_K_M"))


def fail_without_config(*_: Any, **__: Any) -> Any:
    raise OSError(f"{NAME} does not appear to have a file named config.json")


@pytest.fixture
def no_config(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """A hub of which transformers finds no config."""
    monkeypatch.setattr(loader.PreTrainedConfig, "get_config_dict", fail_without_config)
    return hub


@pytest.mark.parametrize("load", [load_model, load_config])
def test_a_repository_of_gguf_files_without_a_type_says_how_to_name_one(load: Any, no_config: Hub) -> None:
    wanted = rf"^'{NAME}' holds GGUF files; name one by its type, as {NAME}:Q4_K_M \(its files: F16/some-model"
    with pytest.raises(errors.ModelLoadError, match=wanted):
        load(NAME)


@pytest.mark.parametrize("files", [["config.json"], ["a-Q4_0.gguf", "model.safetensors"], ["a-Q4_0.gguf", "b.bin"]])
def test_other_repositories_say_what_is_wrong(files: list[str], no_config: Hub) -> None:
    no_config.files = files
    with pytest.raises(errors.ModelLoadError, match=rf"^cannot load '{NAME}': .* does not appear to have"):
        load_model(NAME)


def test_offline_there_is_no_hint(no_config: Hub) -> None:
    no_config.offline = True
    with pytest.raises(errors.ModelLoadError, match=rf"^cannot load '{NAME}': .* does not appear to have"):
        load_model(NAME)


def test_a_download_that_breaks_off(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise OSError("no space left on device")

    monkeypatch.setattr(gguf_hub, "snapshot_download", fail)
    with pytest.raises(errors.ModelLoadError, match=r"download 'some-model-Q4_K_M\.gguf' of .*: no space left"):
        load_model(f"{NAME}:Q4_K_M")


def test_the_model_is_that_of_the_file(hub: Hub) -> None:
    hub.files = ["model-Q6_K.gguf"]
    hub.keep("model-Q6_K.gguf").write_bytes(fixture_path("Q6_K").read_bytes())
    hub.offline = True
    model, tokenizer = load_model(f"{NAME}:Q6_K")
    assert model.config.to_dict() == load_model(fixture_path("Q6_K"))[0].config.to_dict()
    assert len(tokenizer) == 100
    assert load_config(f"{NAME}:Q6_K").num_hidden_layers == model.config.num_hidden_layers
