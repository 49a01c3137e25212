"""The presets: every switch is named, the text is plain decoding's, and what is wrong is said."""

import json
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from helpers.commands import run
from helpers.markov import TOKENS, deviation, write
from helpers.models import LAYERS, build, plain_text, prompt
from selfspec.cli.options import EngineChoice
from selfspec.engine import Engine
from selfspec.engine_options import EngineOptions
from selfspec.errors import ChangedPaperWarning, InvalidParameterError, InvalidSettingError, UnknownMethodError
from selfspec.methods import METHODS, find_method
from selfspec.methods.papers import PAPERS, paper_method
from selfspec.methods.settings import PrecisionSettings
from selfspec.types import SamplingParams

PRESETS = [(name, False) for name in PAPERS] + [(name, True) for name, paper in PAPERS.items() if paper.authors]
PRECISION = set(PrecisionSettings().to_values())
FREE = {
    "swift": {"skip_ratio", "seed", "reopen_below"},  # by ratio_rule; which sets are tried; without recheck_interval
    "swift-v1": {"min_skip_ratio", "adjustment_interval"},  # the ratio is never lowered
}
"""Settings that a preset may leave alone."""

PRINTED: dict[str, dict[str, Any]] = {
    "swift-v1": {
        "context_window": 32,  # "The context window γ is set to 32" (B.2)
        "max_draft_length": 25,  # "The maximum draft length N_D is set to 25" (B.2)
        "max_optimization_steps": 1000,  # "S is set to 1000" (B.2)
        "bayesian_interval": 25,  # "every β = 25 steps" (B.2)
        "patience": 300,  # "does not improve after 300 steps" (B.2)
        "max_matchness": 0.95,  # "or exceeds 0.95" (B.2)
        "acceptance_tolerance": 0.0,  # "The layer skip ratio r is fixed" (B.2)
    },
    "swift-v2": {
        "context_window": 32,
        "max_draft_length": 25,
        "max_optimization_steps": 1000,
        "bayesian_interval": 25,
        "patience": 300,
        "max_matchness": 0.95,
        "acceptance_tolerance": 0.7,  # "below the tolerance threshold of 0.7" (C.2, footnote)
        "min_skip_ratio": 0.4,  # "automatically adjusted from 0.5 to 0.4" (C.2, footnote)
    },
    "clasp": {
        "skip_ratio": 44 / 80,  # "number of skipped layers is 44", of "80 layers" (5.3.1)
        "draft_exit_threshold": 0.7,  # "setting the DET around 0.7" (5.3.3)
    },
    "del": {
        "context_window": 32,  # "the last 32 tokens of the context" (B.2)
        "omega": 0.95,  # "a decay factor of ω = 0.95" (B.2)
        "d_max": 18,  # "to d_max = 18 tokens" (B.2)
    },
    "knapspec": {
        "recent_rounds": 5,  # "recent m = 5 speculation steps" (3.4)
        "similarity_threshold": 0.5,  # "falls below τ = 0.5" (3.4)
        "skip_budget": 0.5,  # "total skipped weight exceeds K/2" (3.4)
        "max_draft_length": 10,  # "D = 10 in our experiment" (3.5)
        "confidence_threshold": 0.7,  # "falls below τ_conf = 0.7" (3.5)
    },
    "self-spec": {"max_draft_length": 12, "threshold": 0.6, "target_acceptance": 0.9, "step": 0.01},  # their notebook
    "layerskip": {"draft_length": 6},  # DEL, B.3: "(E = 8, γ = 6) is applied for HumanEval"
}


@pytest.mark.parametrize("name", PAPERS)
def test_every_switch_is_named_and_every_printed_value_is_the_presets(name: str) -> None:
    paper, values = PAPERS[name], find_method(f"paper({name})").Settings().to_values()
    known = set(METHODS[paper.method].Settings().to_values()) - PRECISION
    assert set(paper.settings) == known - FREE.get(paper.method, set()) - FREE.get(name, set())
    assert set(paper.authors) <= known
    assert all(paper.settings.get(each) != given for each, given in paper.authors.items())
    assert all(given.place for given in [*paper.settings.values(), *paper.authors.values()])
    assert {each: values[each] for each in PRINTED[name]} == PRINTED[name]


@pytest.mark.parametrize(("name", "authors"), PRESETS)
@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma3"])
def test_the_text_is_that_of_plain_decoding(name: str, authors: bool, family: str) -> None:
    engine = Engine(build(family), paper=name, authors=authors)
    result = engine.generate(prompt(30), max_new_tokens=60)
    assert result.token_ids == plain_text(family, prompt(30), 60)
    assert result.drafted > 0
    assert result.accepted > 0
    assert result.method == paper_method(name, authors)
    assert engine.method.name.startswith("paper(")
    assert isinstance(engine.method, METHODS[PAPERS[name].method])
    both = Engine(build(family), paper=name, authors=authors).generate([prompt(30), prompt(21)], max_new_tokens=40)
    assert [each.token_ids for each in both] == [plain_text(family, prompt(length), 40) for length in (30, 21)]
    assert all(each.drafted > 0 for each in both)


@pytest.mark.filterwarnings("ignore::selfspec.errors.ChangedPaperWarning")
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("del", {}),
        ("swift-v2", {"context_window": 8, "confidence_threshold": 0.3, "max_draft_length": 5}),
        pytest.param("del", {"dynamic_length": False}, marks=pytest.mark.slow),
        pytest.param("clasp", {"update_interval": 4, "draft_exit_threshold": 0.3}, marks=pytest.mark.slow),
        pytest.param("knapspec", {"interval": 8, "confidence_threshold": 0.3}, marks=pytest.mark.slow),
    ],
)
def test_speculative_sampling_writes_the_targets_distribution(name: str, settings: dict[str, Any]) -> None:
    """Leviathan's sampling, as in the papers."""
    params = SamplingParams(max_new_tokens=TOKENS, temperature=1.0, seed=7, acceptance="speculative", ignore_eos=True)
    result = write(f"paper({name})", params, settings)
    assert deviation(result) > 1e-3
    assert result.drafted > 100
    assert result.accepted > 50


# What is given beside a paper


def test_a_setting_of_its_own_is_used_and_said() -> None:
    with pytest.warns(ChangedPaperWarning, match=r"paper\(del\) with omega=0.5 for 0.95"):
        engine = Engine(build("llama"), paper="del", settings={"omega": 0.5})
    assert engine.method.settings.omega == 0.5
    assert engine.method.settings.d_max == 18
    with warnings.catch_warnings():
        warnings.simplefilter("error", ChangedPaperWarning)
        Engine(build("llama"), paper="del")
        Engine(build("llama"), paper="del", settings={"omega": 0.95})
        Engine(build("llama"), paper="swift-v2", settings={"skip_ratio": 0.5, "seed": 3})


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"paper": "dell"}, UnknownMethodError, "no paper 'dell'; did you mean 'del'"),
        ({"paper": "del", "method": "swift"}, InvalidParameterError, "paper 'del' chooses the method; leave out"),
        ({"authors": True}, InvalidParameterError, "give paper too"),
        ({"paper": "layerskip", "authors": True}, UnknownMethodError, "leave authors out"),
        ({"method": "paper(del, swift)"}, UnknownMethodError, r"write paper\(del\) or paper\(del, authors\)"),
        ({"method": "paper"}, UnknownMethodError, "names no method"),
        ({"method": "paper(paper(del))"}, UnknownMethodError, "stages of its own"),
        ({"paper": "del", "settings": {"omega": 2.0}}, InvalidSettingError, "omega must be"),
        ({"paper": "clasp", "settings": {"skipped_layers": 2}}, InvalidSettingError, "give only one"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        Engine(build("llama"), **options)


def test_a_method_object_and_a_paper_are_refused() -> None:
    engine = Engine(build("llama"), method="del")
    with pytest.raises(InvalidParameterError, match="chooses the method"):
        Engine(build("llama"), method=engine.method, options=EngineOptions(paper="del"))


def test_a_preset_is_one_class_and_its_state_is_its_methods(tmp_path: Path) -> None:
    assert find_method("paper(swift-v2)") is find_method("paper( swift-v2 )")
    engine = Engine(build("llama"), paper="clasp")
    engine.generate(prompt(30), max_new_tokens=30)
    engine.save_state(tmp_path / "state")
    other = Engine(build("llama"), method="clasp", settings={"skip_ratio": 0.55})
    other.load_state(tmp_path / "state")
    assert other.method.state().values == engine.method.state().values != {"skipped": None}


def test_draft_and_verify_may_skip_the_ends() -> None:
    published: Any = Engine(build("llama"), paper="self-spec").method
    assert published.free == range(2 * LAYERS)
    ours: Any = Engine(build("llama"), method="self-spec").method
    assert ours.free == range(2, 2 * LAYERS - 2)


def test_layerskip_drafts_six_tokens_with_a_quarter_of_the_layers() -> None:
    result = Engine(build("llama"), paper="layerskip").generate(prompt(30), max_new_tokens=60)
    assert {each.drafted for each in result.rounds[:-1]} <= {6, *range(6)}
    assert [each.drafted for each in result.rounds[:4]] == [6] * 4
    assert {len(each.kept.sublayers) // 2 for each in result.rounds if each.kept} == {max(1, LAYERS // 4)}


# On the command line


def test_the_list_of_methods_names_the_papers() -> None:
    listed = json.loads(run("methods", "--json").stdout)["paper"]["papers"]
    assert list(listed) == list(PAPERS)
    assert listed["del"]["settings"]["omega"] == {"value": 0.95, "place": "B.2: ω"}
    text = run("methods").stdout
    for name in PAPERS:
        assert f"--paper {name}: {PAPERS[name].source}" in text
    assert "drop_unsure=true" in text
    assert "--authors, hemingkx/SWIFT" in text


def test_the_option_of_generate() -> None:
    generate = ("generate", "--model", "tiny-early-exit", "--max-new-tokens", "24", "Once upon a time")
    plain = run(*generate, "--method", "autoregressive").stdout
    result = run(*generate, "--paper", "del", "--stats")
    assert result.stdout == plain
    assert "paper(del): 24 tokens" in result.stderr
    assert "warning" not in result.stderr
    changed = run(*generate, "--paper", "del", "--authors", "--set", "d_max=4", "--stats")
    assert changed.stdout == plain
    assert "warning: paper(del, authors) with d_max=4 for 18" in changed.stderr
    refused = run(*generate, "--paper", "del", "--method", "swift")
    assert refused.exit_code != 0
    assert "leave out the method 'swift'" in refused.stderr


def test_the_help_names_every_paper() -> None:
    help_text = next(each for each in fields(EngineChoice) if each.name == "paper").metadata["others"]["help"]
    assert all(name in help_text for name in PAPERS)
