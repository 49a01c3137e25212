"""The offline search of Draft & Verify: Bayesian optimisation of the skipped sublayers for tokens per second."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfspec.errors import InvalidParameterError, InvalidPromptError, StateError

if TYPE_CHECKING:
    from selfspec import Engine, Prompt

_STAMPED = ("selfspec", "torch", "transformers", "scikit-learn")


@dataclass(frozen=True)
class Trial:
    """The measurement of one set of skipped sublayers over all calibration prompts, without prefill."""

    skipped: tuple[int, ...]
    tokens_per_second: float
    acceptance_rate: float


def tune(
    engine: "Engine", prompts: "Sequence[Prompt]", *, iterations: int, max_new_tokens: int = 32, seed: int = 0
) -> Iterator[Trial]:
    """Measures sets of skipped sublayers: uniform skipping first, then proposals of a Gaussian process.

    As in the authors' search, any number of sublayers may be skipped, and outputs have a fixed length: they continue
    past end-of-sequence tokens. First and last layer are always kept, as in SWIFT, unless the method's settings say
    otherwise (``fixed_ends``), as in Draft & Verify. The engine's method is ``self-spec``, and its profile changes with
    every trial.

    Yields:
        Each trial when it is finished. The iterator may be abandoned at any time.
    """
    from selfspec.methods.fixed import SelfSpec
    from selfspec.methods.layer_search import (
        DRAFT_VERIFY_KAPPA,
        Observations,
        generator_of,
        point_of,
        skipped_by,
        suggest_point,
    )

    method = engine.method
    assert isinstance(method, SelfSpec)
    observations = Observations(len(method.free))
    skipped = method.profile.skipped
    _measure(engine, skipped, prompts[:1], max_new_tokens)  # warms up
    for iteration in range(iterations):
        if iteration:
            generator = generator_of(seed, iteration)
            point = suggest_point(*observations.table(), None, generator, DRAFT_VERIFY_KAPPA)
            skipped = skipped_by(point, method.free)
        trial = _measure(engine, skipped, prompts, max_new_tokens)
        observations.add(point_of(skipped, method.free), trial.tokens_per_second)
        yield trial


def _measure(engine: Any, skipped: tuple[int, ...], prompts: "Sequence[Prompt]", max_new_tokens: int) -> Trial:
    from selfspec.methods.fixed import Profile

    engine.method.adopt(Profile(skipped))
    results = [engine.generate(prompt, max_new_tokens=max_new_tokens, ignore_eos=True) for prompt in prompts]
    seconds = sum(result.seconds - result.prefill_seconds for result in results)
    drafted = sum(result.drafted for result in results)
    return Trial(
        skipped=skipped,
        tokens_per_second=sum(result.new_token_count - 1 for result in results) / seconds,
        acceptance_rate=sum(result.accepted for result in results) / max(1, drafted),
    )


def write_profile(engine: Any, best: Trial, iterations: int, path: Path) -> None:
    """Writes a trial as a profile, a state file for ``Engine.load_state``, which the engine uses from then on."""
    from selfspec.methods.fixed import Profile

    versions = _versions() | {"device": str(engine.target.device)}
    found = {"tokens_per_second": best.tokens_per_second, "iterations": iterations, "versions": versions}
    engine.method.adopt(Profile(best.skipped, found))
    engine.save_state(path)


def _versions() -> dict[str, str]:
    """Versions of the installed packages that a search uses."""
    versions = {}
    for name in _STAMPED:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def read_prompts(path: Path) -> list[str]:
    """Reads calibration prompts, at least one, from a UTF-8 file.

    A ``.jsonl`` file has one JSON object per line, with a string ``prompt``; any other file has one prompt per line.
    Empty lines are ignored.

    Raises:
        InvalidPromptError: the file cannot be read, is not UTF-8 or has no prompts, or a line of JSON has no prompt.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise InvalidPromptError(f"cannot read prompts file '{path}': {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidPromptError(
            f"prompts file '{path}' is not UTF-8: byte 0x{error.object[error.start]:02x} at offset {error.start}; "
            "save it as UTF-8"
        ) from error
    # Not ``splitlines``: prompts may contain the other characters that it splits at.
    lines = [(number, line.rstrip("\r")) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise InvalidPromptError(f"prompts file '{path}' has no prompts; write one per line")
    if path.suffix != ".jsonl":
        return [line for _, line in lines]
    return [_prompt_of(line, f"line {number} of '{path}'") for number, line in lines]


def _prompt_of(line: str, where: str) -> str:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise InvalidPromptError(
            f"{where} is not JSON ({error}); give one object per line, or name the file .txt"
        ) from error
    prompt = entry.get("prompt") if isinstance(entry, dict) else None
    if not isinstance(prompt, str) or not prompt:
        raise InvalidPromptError(f'{where} has no prompt; give an object with a string "prompt"')
    return prompt


def check_request(method: str, iterations: int, max_new_tokens: int, out: Path) -> None:
    """Checks a request of ``selfspec tune`` before the model is loaded.

    Raises:
        InvalidParameterError: the method has no profile, or a number is too small.
        StateError: the profile cannot be written to ``out``.
        MissingPackageError: scikit-learn is not installed; the first set, uniform skipping, is measured without it.
    """
    if method != "self-spec":
        raise InvalidParameterError(f"'{method}' has no profile to tune; run `selfspec tune self-spec`")
    if iterations > 1:
        from selfspec.methods.layer_search import require_gaussian_process

        require_gaussian_process()
    if iterations < 1:
        raise InvalidParameterError(f"iterations must be at least 1, not {iterations}")
    if max_new_tokens < 2:
        raise InvalidParameterError(f"max_new_tokens must be at least 2 to measure a speed, not {max_new_tokens}")
    if out.is_dir():
        raise StateError(f"'{out}' is a folder; name a file in it")
    if not out.parent.is_dir():
        raise StateError(f"there is no folder '{out.parent}' to write the profile to; make it first")
