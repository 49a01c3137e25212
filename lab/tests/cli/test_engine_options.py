"""Commands of both packages take the same options of the engine."""

from collections.abc import Callable
from dataclasses import fields
from inspect import signature
from typing import Any

import pytest

from helpers.commands import run
from selfspec.cli.chat import chat
from selfspec.cli.generate import generate
from selfspec.cli.options import ModelChoice
from selfspec.cli.serve import serve
from selfspec_lab.cli import bench_batches, bench_run
from selfspec_lab.cli.bench import overhead
from selfspec_lab.cli.inspect import inspect
from selfspec_lab.cli.profile import profile
from selfspec_lab.cli.tune import tune


@pytest.mark.parametrize("command", [generate, chat, serve, inspect, tune, profile])
def test_commands_that_load_an_engine_take_all_of_its_options(command: Callable[..., Any]) -> None:
    taken = signature(command).parameters
    assert {field.name: field.default for field in fields(ModelChoice)}.items() <= {
        name: parameter.default for name, parameter in taken.items()
    }.items()


@pytest.mark.parametrize("command", [overhead, bench_run.run, bench_batches.batches])
def test_benchmarks_take_all_but_low_bit_targets_and_caches(command: Callable[..., Any]) -> None:
    taken = signature(command).parameters
    assert {field.name for field in fields(ModelChoice)} - taken.keys() == {"weights", "cache_bits"}


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", "Once", "--max-new-tokens", "2"),
        ("profile",),
        ("bench", "batches", "--methods", "suffix", "--sizes", "1", "--repeats", "1", "--widen", "1"),
        ("bench", "batches", "--methods", "suffix", "--sizes", "1", "--repeats", "1", "--widen", "2"),
        ("bench", "overhead", "--methods", "suffix", "--repeats", "1"),
    ],
    ids=" ".join,
)
def test_activations_of_int8_are_refused_for_a_model_without_weights_of_few_bits(arguments: tuple[str, ...]) -> None:
    result = run(*arguments, "--model", "tiny", "--activations", "int8")
    assert result.exit_code == 2
    assert "activations int8 need weights of few bits" in result.stderr
