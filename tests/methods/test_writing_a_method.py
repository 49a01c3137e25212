"""The page about writing a method: its example is the file, its other methods work as they stand there."""

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from helpers.models import FAMILY_NAMES, build, plain_text, prompt
from selfspec import Engine
from selfspec.decoding.draft import LayerDraft
from selfspec.methods import api
from selfspec.methods.base import Method

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "writing-a-method.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def methods_of_the_page() -> dict[str, type[Method]]:
    """By name the methods that the page defines."""
    found = {}
    for number, block in enumerate(BLOCKS):
        if "(Method):" not in block:
            continue
        module = ModuleType(f"block_{number}")
        exec(compile(block, f"block {number} of the page", "exec"), vars(module))
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, Method) and value is not Method:
                found[value.name] = value
    return found


METHODS = methods_of_the_page()


def test_the_page_shows_the_example() -> None:
    assert (ROOT / "examples" / "my_method.py").read_text(encoding="utf-8") in BLOCKS
    assert METHODS.keys() == {"every-nth", "copy-or-skip", "by-margin"}


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_methods_of_the_page_write_the_plain_text(name: str, method: str) -> None:
    result = Engine(build(name), method=METHODS[method]).generate(prompt(17), max_new_tokens=40)
    assert result.token_ids == plain_text(name, prompt(17), 40)
    assert result.drafted > 0
    assert result.accepted > 0


@pytest.mark.parametrize("method", METHODS)
def test_they_do_so_in_a_batch(method: str) -> None:
    prompts = [prompt(length) for length in (17, 3, 40)]
    results = Engine(build("llama"), method=METHODS[method]).generate(prompts, max_new_tokens=40)
    for ids, result in zip(prompts, results, strict=True):
        assert result.token_ids == plain_text("llama", ids, 40)
        assert result.accepted > 0


@pytest.mark.parametrize("method", METHODS)
def test_they_sample_what_the_seed_says(method: str) -> None:
    options: dict[str, Any] = {"max_new_tokens": 40, "temperature": 0.7, "seed": 3}
    plain = Engine(build("llama"), method="autoregressive").generate(prompt(17), **options)
    result = Engine(build("llama"), method=METHODS[method]).generate(prompt(17), **options)
    assert result.token_ids == plain.token_ids
    assert result.drafted > result.accepted > 0


@pytest.mark.parametrize("new_tokens", [1, 2, 3, 4])
@pytest.mark.parametrize("method", METHODS)
def test_near_the_end_of_the_output(method: str, new_tokens: int) -> None:
    result = Engine(build("llama"), method=METHODS[method]).generate(prompt(17), max_new_tokens=new_tokens)
    assert result.token_ids == plain_text("llama", prompt(17), new_tokens)
    assert result.drafted <= max(0, new_tokens - 2)


def test_a_composed_draft_uses_the_second_if_the_first_finds_nothing() -> None:
    result = Engine(build("llama"), method=METHODS["copy-or-skip"]).generate(prompt(17), max_new_tokens=40)
    kinds = {played.kept is not None for played in result.rounds if played.drafted}
    assert kinds == {True, False}, "only one of the two drafts was used"


def test_the_page_names_what_there_is_to_import() -> None:
    for name in api.__all__:
        assert name in PAGE or name == "register", f"{name} is not explained"
        assert api.__doc__ is not None
        assert f"``{name}" in api.__doc__, f"{name} is not in the map"
    for block in BLOCKS:
        for imported in re.findall(r"from selfspec\.methods\.api import \(?([^)]*?)\)?\n(?!\s)", block):
            assert {name.strip() for name in imported.split(",") if name.strip()} <= set(api.__all__)
    assert LayerDraft is api.LayerDraft
