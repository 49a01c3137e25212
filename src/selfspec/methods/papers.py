"""The papers' methods as published: for each one table of settings, and where the paper says so.

``--paper NAME``, ``Engine(..., paper=NAME)`` and the method ``paper(NAME)`` are the same: the method with the paper's
values as the defaults of its settings. With ``authors``, ``paper(NAME, authors)``, they are those of the authors' code
where that differs. Settings that are given are used, with a warning that names them, so that an ablation is a preset
and one setting. ``docs/faithfulness.md`` has a section for each paper.

Sections and equations are those of the papers' text. "Not named" is a value that the text does not give; it is then
that of the code which is named.
"""

import functools
import types
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any, NamedTuple, cast, get_type_hints

from selfspec.errors import ChangedPaperWarning, UnknownMethodError
from selfspec.methods.base import Method
from selfspec.methods.registry import METHODS, composition
from selfspec.methods.settings import suggest
from selfspec.runtimes.target import Target

AUTHORS = "authors"
"""What follows a paper's name, ``paper(del, authors)``, for the authors' code."""


class Value(NamedTuple):
    """The value of a setting, and where it is from."""

    value: Any
    place: str


Values = Mapping[str, Value]


@dataclass(frozen=True)
class Paper:
    """A paper's method as published.

    Attributes:
        method: name of the method.
        source: the paper.
        settings: by setting the paper's value.
        authors: by setting the value in the authors' code, where that differs; empty if nothing does.
        code: which code that is.
    """

    method: str
    source: str
    settings: Values
    authors: Values = field(default_factory=dict)
    code: str = ""

    def values(self, *, authors: bool = False) -> dict[str, Any]:
        """The values alone, by setting."""
        chosen = {**self.settings, **(self.authors if authors else {})}
        return {name: each.value for name, each in chosen.items()}


_SELECTING = {
    "schedule": Value("paper", "when it selects: as published, with nothing carried from request to request"),
    "share_kept_set": Value(False, "batch size 1: a request drafts by its own selection"),
}

_SWIFT = {
    **_SELECTING,
    "schedule": Value("paper", "4.1.2: one step before every round; the search goes on over all instances"),
    "ratio_rule": Value("paper", "B.2: r = 0.45 for 13B, 0.5 for 34B and 70B"),
    "fixed_ends": Value(False, "equation 2: all subsets of rL layers"),
    "start": Value("even", "4.1.1: uniformly skipping layers"),
    "score_start": Value(False, "equation 2: every step, the first too, scores a candidate"),
    "accumulation": Value("uniform", "4.1.1: an instance of the optimisation starts with uniform skipping"),
    "window": Value("fixed", "equation 3: y_1 to y_γ"),
    "context_window": Value(32, "B.2: γ"),
    "max_optimization_steps": Value(1000, "B.2: S"),
    "bayesian_interval": Value(25, "B.2: β"),
    "patience": Value(300, "B.2"),
    "max_matchness": Value(0.95, "B.2"),
    "recheck_interval": Value(0, "4.1.2: a search that has ended does not start again"),
    "max_draft_length": Value(25, "B.2: N_D"),
    "confidence_threshold": Value(0.8, "4.2: ε, not named; authors' code"),
    "dynamic_verification": Value(True, "4.2"),
    "tree_widths": Value("paper", "4.2: k = 10, 5, 3, 1"),
    "max_siblings": Value(None, "4.2: no limit"),
}

_SWIFT_CODE = {
    "fixed_ends": Value(True, "utils.py, layer_random_search: keeps the first and last layer"),
    "start": Value("alternate", "inference_swift.py: np.arange(1, L - 1, 2) of both kinds"),
    "accumulation": Value("best", "utils.py, swift_optimization: the best set stays set in the model"),
    "window": Value("authors", "utils.py, swift_optimization: compares y_2 to y_(γ+1)"),
    "context_window": Value(50, "eval_llama.sh: CONTEXT_WINDOW (inference_swift.py has 32)"),
    "max_matchness": Value(0.93, "eval_llama.sh: MAX_SCORE (inference_swift.py has 0.95)"),
    "max_optimization_steps": Value(1001, "utils.py, swift_optimization: ends above MAX_OPT_ITER, 1000"),
    "patience": Value(301, "utils.py, swift_optimization: ends above MAX_TOLERANCE_ITER, 300"),
    "skip_ratio": Value(0.45, "eval_llama.sh: SKIP_RATIO"),
    "acceptance_tolerance": Value(0.0, "the ratio is never lowered"),
    "tree_widths": Value("authors", "utils.py, get_choices_list: 3, 5, 8, 10 in greedy decoding"),
}
_SWIFT_REPOSITORY = "hemingkx/SWIFT, 88caed7"
_SWIFT_SOURCE = "SWIFT (Xia et al. 2025)"
_PORT = "the port in kaist-flexml-lab/knapspec, 8eef1a2"

PAPERS: dict[str, Paper] = {
    "swift-v1": Paper(
        "swift",
        f"{_SWIFT_SOURCE}, arXiv v1",
        {**_SWIFT, "acceptance_tolerance": Value(0.0, "the ratio r is fixed (4.1.2)")},
        _SWIFT_CODE,
        _SWIFT_REPOSITORY,
    ),
    "swift-v2": Paper(
        "swift",
        f"{_SWIFT_SOURCE}, arXiv v2",
        {
            **_SWIFT,
            "acceptance_tolerance": Value(0.7, "C.2, footnote: the ratio is lowered while α stays below 0.7"),
            "min_skip_ratio": Value(0.4, "C.2, footnote: from 0.5 to 0.4"),
            "adjustment_interval": Value(100, "C.2, footnote: not named; ours"),
        },
        _SWIFT_CODE,
        _SWIFT_REPOSITORY,
    ),
    "clasp": Paper(
        "clasp",
        "CLaSp (Chen et al. 2025)",
        {
            **_SELECTING,
            "skip_ratio": Value(0.55, "5.3.1: 44 of 80 layers; 50 % to 60 % in 4.1"),
            "skipped_layers": Value(None, "5.3.1: by the share"),
            "update_interval": Value(64, "3.7, figure 4b: LOI, not named; KnapSpec's port"),
            "first_choice": Value("prompt", "not said; the last token that was read, as 3.1 has the last accepted one"),
            "draft_exit_threshold": Value(0.7, "5.3.3: DET"),
            "draft_length": Value(10, "3.1: K, not named; KnapSpec's port"),
            "fixed_first_layers": Value(0, "Algorithm 1, lines 3 to 4: i from 1 (10 only in figure 3b)"),
            "fixed_last_layers": Value(0, "Algorithm 1, line 3: i to L (10 only in figure 3b)"),
        },
        {
            "skip_ratio": Value(0.25, "run_comparison.sh: SKIP_BUDGET, 20 of 80, 8 of 32, 4 of 16"),
            "first_choice": Value("round", "clasp_generator.py: optimises after the first round, of the whole model"),
        },
        _PORT,
    ),
    "del": Paper(
        "del",
        "DEL (Entezari Zarch et al. 2025)",
        {
            **_SELECTING,
            "d_max": Value(18, "B.2"),
            "omega": Value(0.95, "B.2: ω"),
            "context_window": Value(32, "B.2: the last 32 tokens of the context"),
            "keep_prompt": Value(False, "Algorithm 1, line 4: the lists are empty after the prefilling"),
            "carry_over": Value(False, "Algorithm 1, line 4"),
            "allow_no_draft": Value(False, "Algorithm 1, lines 7 to 13: every round drafts, whatever γ is"),
            "least_length": Value(0, "Algorithm 1, line 24: d in [0, d_max]"),
            "drop_unsure": Value(True, "Algorithm 1, lines 9 to 12: the loop ends before the token is appended"),
            "no_mean": Value("never", "equation 3: 0 / 0, which no confidence is below"),
            "dynamic_length": Value(True, "4.4"),
            "fixed_exit": Value(None, "4.3"),
            "shallowest_exit": Value(1, "4.3: ℓ in [1, L)"),
        },
        {
            "keep_prompt": Value(True, "DEL.py, run: the context's counts stay in the sums"),
            "drop_unsure": Value(False, "del_generator.py: appends the token before it breaks"),
        },
        f"{_PORT} (the authors' repository was not seen)",
    ),
    "knapspec": Paper(
        "knapspec",
        "KnapSpec (Cha et al. 2026)",
        {
            **_SELECTING,
            "interval": Value(None, "5: T = 64, 128 from 10 billion parameters on"),
            "recent_rounds": Value(5, "3.4, equation 6: m"),
            "recent_tokens": Value(None, "3.4, equation 6: all tokens of these rounds"),
            "similarity_threshold": Value(0.5, "3.4: τ"),
            "skip_budget": Value(0.5, "3.4: K / 2"),
            "max_weight": Value(None, "3.4: integers by rounding alone"),
            "fixed_ends": Value(False, "equation 5: S is any subset of [2L]"),
            "full_model": Value(True, "Algorithm 1, lines 18 to 22: j from 0 on"),
            "lengths": Value("paper", "equation 5: γ in [D]"),
            "max_draft_length": Value(10, "3.5: D"),
            "confidence_threshold": Value(0.7, "3.5: τ_conf"),
            "tpt": Value("paper", "equation 4"),
        },
        {
            "max_weight": Value(5, "knapspec.py, optimize: min(..., 5)"),
            "fixed_ends": Value(True, "knapspec.py, optimize: starts at xs[2], does not skip the last two"),
            "full_model": Value(False, "knapspec.py, optimize_tpt: range(1, max_skip + 1)"),
            "lengths": Value("authors", "knapspec.py, optimize_tpt: range(18)"),
        },
        "kaist-flexml-lab/knapspec, 8eef1a2",
    ),
    "self-spec": Paper(
        "self-spec",
        "Draft & Verify (Zhang et al. 2024)",
        {
            "skip_ratio": Value(
                0.45, "not printed: SWIFT's, until a profile is loaded (the authors' of LLaMA-2-13B: 34 of 80)"
            ),
            "fixed_ends": Value(False, "searching.py: x0 to x(2L - 1)"),
            "max_draft_length": Value(12, "evaluate_sum.ipynb: max_step_draft"),
            "threshold": Value(0.6, "evaluate_sum.ipynb: th_stop_draft_essg_autoth"),
            "target_acceptance": Value(0.9, "evaluate_sum.ipynb: auto_parameters[2]"),
            "step": Value(0.01, "evaluate_sum.ipynb: auto_parameters[3]"),
        },
    ),
    "layerskip": Paper(
        "layerskip",
        "LayerSkip (Elhoushi et al. 2024)",
        {
            "exit_layer": Value(None, "8 of 32 layers (DEL, B.3; README of the authors): a quarter of the model"),
            "draft_length": Value(6, "6 for HumanEval (DEL, B.3; README of the authors)"),
        },
    ),
}
"""The papers, by the name that ``--paper`` takes."""


@composition
class PaperMethod(Method):
    """``paper(NAME)`` and ``paper(NAME, authors)``: the method of a paper, with its settings."""

    name = "paper"
    summary = "paper(swift-v2): the method of a paper as published, also --paper NAME; paper(NAME, authors): as coded"
    source = "docs/faithfulness.md"

    @classmethod
    def named(cls, names: Sequence[str]) -> type[Method]:
        """The method of a paper's name, and ``authors`` after it.

        Raises:
            UnknownMethodError: there is no such paper, or its authors' code does not differ.
        """
        name, *rest = names
        if name not in PAPERS:
            raise UnknownMethodError(f"there is no paper '{name}'{suggest(name, PAPERS)} (papers: {', '.join(PAPERS)})")
        if rest not in ([], [AUTHORS]):
            raise UnknownMethodError(f"write paper({name}) or paper({name}, {AUTHORS}), not '{', '.join(rest)}'")
        if rest and not PAPERS[name].authors:
            raise UnknownMethodError(f"no setting of '{name}' differs in its authors' code; leave {AUTHORS} out")
        return _method_of(name, bool(rest))


@functools.cache
def _method_of(name: str, authors: bool) -> type[Method]:
    """The class of a preset: its paper's method, with other defaults."""
    paper = PAPERS[name]
    method, values = METHODS[paper.method], paper.values(authors=authors)

    def initialise(self: Method, target: Target, settings: Any) -> None:
        method.__init__(self, target, settings)
        _warn_of_changes(self.name, values, settings)

    members = {
        "__doc__": f"{paper.source}, {'as in the code of its authors' if authors else 'as published'}.",
        "__init__": initialise,
        "__module__": __name__,
        "name": f"paper({name}, {AUTHORS})" if authors else f"paper({name})",
        "summary": f"{method.name} as in {paper.code}" if authors else f"{method.name} as published",
        "source": paper.source,
        "state_name": method.name,
        "Settings": _settings_of(method.Settings, values),
    }
    made = types.new_class(f"Paper{method.__name__}", (method,), exec_body=lambda names: names.update(members))
    return cast("type[Method]", made)


def _settings_of(settings: type, values: Mapping[str, Any]) -> type:
    """Settings with other defaults."""
    hints = get_type_hints(settings)
    changed = [
        (each.name, hints[each.name], field(default=values[each.name], metadata=each.metadata))
        for each in fields(settings)
        if each.name in values
    ]
    return make_dataclass(f"Paper{settings.__name__}", changed, bases=(settings,), frozen=True)


def _warn_of_changes(name: str, values: Mapping[str, Any], settings: Any) -> None:
    """Says which settings are not the paper's."""
    given = {each: getattr(settings, each) for each in values}
    changes = [f"{each}={given[each]} for {value}" for each, value in values.items() if given[each] != value]
    if changes:
        warnings.warn(f"{name} with {', '.join(changes)}", ChangedPaperWarning, stacklevel=3)


def paper_method(paper: str, authors: bool = False) -> str:
    """The name of the method that ``paper`` and ``authors`` choose."""
    return f"paper({paper}, {AUTHORS})" if authors else f"paper({paper})"
