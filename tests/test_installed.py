"""The wheel and the source distribution, each installed alone into an empty environment without a compiler."""

import os
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

import selfspec
from helpers.checkpoints import save_checkpoint
from helpers.kernels import needs_kernels
from test_wheel import ROOT, build_wheel, cached_compiler, wheel_of

Run = Callable[..., subprocess.CompletedProcess[str]]
SECONDS = 900
PROMPT = "one two three one two"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a program of an environment that has the wheel and what it requires; of other programs it sees none."""
    folder = tmp_path_factory.mktemp("installed")
    built = build_wheel(folder / "dist", SELFSPEC_WHEEL_KERNELS="always", CXX=cached_compiler())
    assert built.returncode == 0, built.stderr
    venv.create(folder / "venv", with_pip=True)
    kept = {name: os.environ[name] for name in os.environ if name.startswith("PIP_") or name.endswith("_proxy")}
    cache = subprocess.run([sys.executable, "-m", "pip", "cache", "dir"], capture_output=True, text=True, check=False)
    variables = {
        "HOME": str(folder),
        "PATH": str(folder / "venv" / "bin"),
        "PIP_CONSTRAINT": str(ROOT / "constraints.txt"),
    }
    variables |= kept | ({"PIP_CACHE_DIR": cache.stdout.strip()} if cache.returncode == 0 else {})

    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        program, *others = map(str, arguments)
        command = [str(folder / "venv" / "bin" / program), *others]
        return subprocess.run(
            command, cwd=folder, env=variables, capture_output=True, text=True, timeout=SECONDS, check=False
        )

    installed = run("pip", "install", wheel_of(folder / "dist"))
    assert installed.returncode == 0, installed.stderr
    return run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("model") / "llama")


def text_of(run: Run, model: Path | str, *options: str) -> str:
    """What the installed command writes."""
    done = run("selfspec", "generate", PROMPT, "--model", model, "--max-new-tokens", "12", *options)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@needs_kernels
def test_the_wheel_alone_generates_with_its_kernels(environment: Run, model: Path) -> None:
    described = environment("selfspec", "info", "--model", model)
    assert described.returncode == 0, described.stderr
    assert "from the wheel" in described.stdout
    assert environment("selfspec", "--version").stdout.split()[-1] == selfspec.__version__
    own = selfspec.Engine.from_pretrained(model, dtype="float32").generate(PROMPT, max_new_tokens=12).text
    assert own
    for method in ("auto", "suffix", "autoregressive"):
        assert own in text_of(environment, model, "--dtype", "float32", "--method", method)


@pytest.mark.slow
@needs_kernels
def test_the_lines_of_errors_install_what_is_missing(environment: Run, model: Path) -> None:
    """``pip install 'selfspec[EXTRA]'`` keeps the installed selfspec."""
    options = ("generate", PROMPT, "--model", model, "--max-new-tokens", "12", "--json-schema", "schema.json")
    environment("python", "-c", "open('schema.json', 'w').write('{\"type\": \"object\"}')")
    missing = environment("selfspec", *options)
    assert missing.returncode == 2
    assert "pip install 'selfspec[structured]'" in missing.stderr
    added = environment("pip", "install", "selfspec[structured]")
    assert added.returncode == 0, added.stderr
    assert f"selfspec-{selfspec.__version__}" not in added.stdout.rpartition("Successfully installed")[2]
    assert environment("selfspec", *options).returncode == 0
    lab = environment("selfspec", "bench", "run")
    assert lab.returncode == 2
    assert "pip install ./lab" in lab.stderr


@pytest.mark.slow
@needs_kernels
def test_the_real_model_of_the_readme(environment: Run) -> None:
    installed = environment("selfspec", "models", "install", "smollm2")
    assert installed.returncode == 0, installed.stderr
    assert len(text_of(environment, "smollm2", "--chat").split()) > 3


@pytest.mark.slow
@needs_kernels
def test_the_source_distribution_alone_generates_without_kernels(environment: Run, model: Path, tmp_path: Path) -> None:
    """The last test: it replaces what the wheel installed."""
    text = text_of(environment, model, "--dtype", "float32")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    installed = environment("pip", "install", "--force-reinstall", "--no-deps", archive)
    assert installed.returncode == 0, installed.stderr
    described = environment("selfspec", "info", "--model", model)
    assert described.returncode == 0, described.stderr
    assert "from the wheel" not in described.stdout
    assert text_of(environment, model, "--dtype", "float32") == text
