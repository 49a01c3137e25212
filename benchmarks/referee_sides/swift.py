"""The program of SWIFT's authors on the CPU, watched; runs where transformers 4 is."""

from __future__ import annotations

import contextlib
import runpy
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
import transformers

PROGRAM = "evaluation_llama.inference_swift"
NO_TOKEN = -1
NO_END = 10**9
"""New tokens at which an output would end."""


class Swift:
    """Their program up to its evaluation, which reads data sets and moves to a GPU: texts come from here instead.

    Args:
        clone: their repository.
        model: folder of a Llama checkpoint.
    """

    def __init__(self, clone: str, model: str) -> None:
        sys.path.insert(0, clone)
        self._model_path = model
        self._made: dict[str, Any] = {}
        self._functions: dict[str, Any] = {}
        self._draft: dict[str, Any] = {}
        self._rounds: list[dict[str, Any]] = []
        self._steps: list[dict[str, Any]] = []
        _stand_in("fastchat.utils", str_to_torch_dtype=lambda name: getattr(torch, name))
        _stand_in("evaluation_llama.eval", run_eval=lambda **made: self._made.update(made))
        # Texts are token ids, and none ends an output.
        tokenizer = types.SimpleNamespace(eos_token_id=NO_TOKEN)
        transformers.AutoTokenizer.from_pretrained = lambda *_, **__: tokenizer
        torch.set_num_threads(1)

    def describe(self) -> dict[str, Any]:
        """The versions of what it runs on."""
        return {name: version(name) for name in ("torch", "transformers", "bayesian-optimization", "numpy")}

    def start(self, options: Mapping[str, Any], flags: Sequence[str], seed: int) -> None:
        """Runs their program, which loads the model and makes the first set and the search.

        Args:
            options: of its command line, by name.
            flags: its options without values.
            seed: of their random candidates, which their evaluation would set.
        """
        given = {"model-path": self._model_path, "model-id": "referee", "task-name": "none", **options}
        given |= {"dtype": "float32", "temperature": 0.0}
        words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
        sys.argv = [PROGRAM, *words, *(f"--{flag}" for flag in flags)]
        runpy.run_module(PROGRAM, run_name="__main__")
        self._made["model"].eval()
        self._functions = self._made["forward_func"].__globals__
        self._watch()
        np.random.seed(seed)

    def skip(self, attention: Sequence[int], mlp: Sequence[int]) -> None:
        """Drafts with a given set from now on."""
        self._made["model"].set_skip_layers(list(attention), list(mlp))

    def write(self, token_ids: Sequence[int], rounds: int) -> dict[str, Any]:
        """Writes after a text, greedily.

        Args:
            token_ids: the text.
            rounds: how many rounds.

        Returns:
            Its ``token_ids``, ``rounds`` and ``steps`` of the search.
        """
        self._rounds, self._steps = [], []
        made = {name: self._made[name] for name in ("statistics", "optimizer", "utility", "logits_processor")}
        with torch.inference_mode():
            written, *_ = self._made["forward_func"](
                torch.tensor([token_ids]),
                self._made["model"],
                self._made["tokenizer"],
                NO_END,
                max_steps=rounds,
                **made,
            )
        new = written[0, len(token_ids) :].tolist()
        return {"token_ids": new, "rounds": self._rounds, "steps": self._steps}

    def _watch(self) -> None:
        """Wraps the functions that the decoding calls, so that they say what they returned."""
        utils = vars(sys.modules["model.swift.utils"])
        for name, then in (
            ("initialize_swift", lambda found: self._note_draft(found[0], found[2])),
            ("swift_draft", lambda found: self._note_draft(*found)),
            ("get_choices_list", self._note_choices),
            ("evaluate_posterior", lambda found: self._draft.update(accepted=int(found[1]))),
            ("update_inference_inputs", self._note_round),
        ):
            _call_after(self._functions, name, then)
        for name, bayesian in (("layer_random_search", False), ("layer_bayes_search", True)):
            _call_after(utils, name, lambda found, bayesian=bayesian: self._note_candidate(found, bayesian))
        self._made["optimizer"].register = _before(
            self._made["optimizer"].register, lambda target, **_: self._steps[-1].update(score=float(target))
        )
        _call_after(self._functions, "swift_optimization", self._note_step)

    def _note_draft(self, logits: Any, confidences: list[float]) -> None:
        tokens = logits[0].reshape(len(confidences), -1).tolist()
        self._draft = {"skipped": self._skipped(), "tokens": tokens, "confidences": list(confidences)}

    def _note_choices(self, choices: list[list[int]]) -> None:
        draft = self._draft
        widths = [sum(len(each) == depth for each in choices) for depth in range(1, len(draft["tokens"]) + 1)]
        draft["candidates"] = [tokens[:width] for tokens, width in zip(draft.pop("tokens"), widths, strict=True)]

    def _note_round(self, found: tuple[Any, ...]) -> None:
        text, _, following = found
        count = self._draft["accepted"]
        accepted = text[0, text.shape[1] - count :].tolist() if count else []
        self._rounds.append({**self._draft, "accepted": accepted, "next": int(following)})

    def _note_candidate(self, found: tuple[Any, ...], bayesian: bool) -> None:
        self._steps.append({"bayesian": bayesian, "skipped": _sublayers(*found[-2:])})

    def _note_step(self, _: None) -> None:
        self._steps[-1] |= {"kept": self._skipped(), "ended": not self._made["statistics"]["optimization"]}

    def _skipped(self) -> list[int]:
        return _sublayers(*self._made["model"].get_skip_layers())


def _sublayers(attention: Sequence[int], mlp: Sequence[int]) -> list[int]:
    """Skipped layers of both kinds as sublayers: attention of layer ``i`` is ``2i``, its MLP ``2i + 1``."""
    return sorted([2 * int(layer) for layer in attention] + [2 * int(layer) + 1 for layer in mlp])


def _stand_in(name: str, **members: Any) -> None:
    """A module in the place of one that only the evaluation uses."""
    package, _, _ = name.rpartition(".")
    with contextlib.suppress(ImportError):
        __import__(package)
    sys.modules.setdefault(package, types.ModuleType(package))
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(members)


def _call_after(functions: dict[str, Any], name: str, then: Callable[[Any], None]) -> None:
    """Lets a function say what it returned; what an earlier call of this did is replaced."""
    original = getattr(functions[name], "original", functions[name])

    def watched(*arguments: Any, **named: Any) -> Any:
        found = original(*arguments, **named)
        then(found)
        return found

    watched.original = original  # type: ignore[attr-defined]
    functions[name] = watched


def _before(original: Callable[..., Any], then: Callable[..., None]) -> Callable[..., Any]:
    def watched(**named: Any) -> Any:
        then(**named)
        return original(**named)

    return watched
