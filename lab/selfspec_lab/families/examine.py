"""What holds for a family, found out on its tiny random model against transformers' ``generate``."""

import warnings
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, logging

from selfspec import Engine, Generation
from selfspec.errors import SelfSpecError, UnsupportedModelError, first_line
from selfspec.methods import make_method
from selfspec.model.mtp_modules import hold_head
from selfspec.runtimes.precision import Precision
from selfspec.runtimes.target import Target
from selfspec_lab.families.head import TinyHead
from selfspec_lab.families.tiny import LAYERS, VOCABULARY, tiny_model

NEW_TOKENS = 7
_LENGTHS = (11, 19)
"""Of the two prompts; the second is longer than the window of layers that have one."""
_SMALLEST_GAP = 1e-3
"""Between the two best logits of every token; text is comparable only where choices are clearer than rounding."""
_SEEDS = 6
_RUNS: list[tuple[str, dict[str, Any], int]] = [
    ("uniform", {"draft_length": 4}, 1),
    ("layerskip", {"exit_layer": 3, "draft_length": 4}, 2),
    ("token-recycling", {}, 1),
]
"""Method, settings and number of prompts: one that skips attention and MLPs, a batch that skips layers, and trees."""
_HEAD_TOKENS = 5
"""Tokens that are written with a multi-token-prediction head."""


@dataclass(frozen=True)
class Facts:
    """What holds for a family.

    Attributes:
        name: its ``model_type``.
        refusal: why it is not supported; the other attributes are empty then.
        split: how its layers are split: ``row`` of the table, ``looking``, ``some whole layers`` or ``whole layers``.
        identical: greedy text in float32 is transformers' own, with drafts.
        drafted: draft tokens of these runs, all with skipped sublayers.
        accepted: those of them that were accepted.
        fused: sublayers that run as fused blocks, of all.
        native: the whole model runs as native calls.
        batches: the texts of a batch are, with drafts.
        mtp: so is the text with drafts of a multi-token-prediction head that is one more layer of the family.
        low_bits: it can have low-bit weights.
        trees: token trees are verified; else their first path.
        states: layers carry states from token to token.
    """

    name: str
    refusal: str = ""
    split: str = ""
    identical: bool = False
    drafted: int = 0
    accepted: int = 0
    fused: str = ""
    native: bool = False
    batches: bool = False
    mtp: bool = False
    low_bits: bool = False
    trees: bool = False
    states: bool = False


def examine(name: str) -> Facts:
    """Builds the tiny model of a family and runs it."""
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = tiny_model(name)
            prompts, texts = zip(*(_clear_text(model, length) for length in _LENGTHS), strict=True)
        except Exception as error:  # some configs cannot be made small by the names of their sizes
            return Facts(name, refusal=f"no tiny model: {first_line(error)}")
        try:
            return _run(name, model, prompts, texts)
        except UnsupportedModelError as error:
            return Facts(name, refusal=str(error))


def _run(name: str, model: PreTrainedModel, prompts: Many[list[int]], texts: Many[list[int]]) -> Facts:
    target = Target(model)
    results: list[Generation] = []
    for method, settings, many in _RUNS:
        engine = Engine(model, None, make_method(method, target, settings), prefix_cache=0)
        results += engine.generate(list(prompts[:many]), max_new_tokens=NEW_TOKENS)
    found = [list(result.token_ids) for result in results]
    return Facts(
        name,
        split=_split(target),
        identical=found[0] == found[-1] == texts[0],
        batches=found[1:-1] == list(texts),
        mtp=_writes_with_head(model, target, prompts[0], texts[0][:_HEAD_TOKENS]),
        drafted=sum(result.drafted for result in results[:-1]),
        accepted=sum(result.accepted for result in results[:-1]),
        fused=f"{target.fused_count} of {target.sublayer_count}" if target.fused_count else "",
        native=target.at(None).path().native,
        low_bits=_has_low_bits(target),
        trees=target.tree_refusal is None,
        states=target.decoder.has_states,
    )


def _writes_with_head(model: PreTrainedModel, target: Target, prompt: list[int], text: list[int]) -> bool:
    try:
        hold_head(model, TinyHead(model))
        engine = Engine(model, None, make_method("mtp", target, {}), prefix_cache=0)
        result = engine.generate(prompt, max_new_tokens=len(text))
    except SelfSpecError:
        return False
    return list(result.token_ids) == text and result.drafted > 0


def _clear_text(model: Any, length: int) -> tuple[list[int], list[int]]:
    """A random prompt after which all of the model's choices are clear, and its text."""
    for seed in range(_SEEDS):
        generator = torch.Generator().manual_seed(100 * length + seed)
        prompt = torch.randint(3, VOCABULARY, (1, length), generator=generator)
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.cat(output.logits).topk(2).values
        if float((best[:, 0] - best[:, 1]).min()) > _SMALLEST_GAP:
            break
    return prompt[0].tolist(), output.sequences[0, length:].tolist()


def _split(target: Target) -> str:
    whole = target.whole_layers
    if whole is None:
        return "row"
    return "looking" if whole == 0 else "whole layers" if whole == LAYERS else "some whole layers"


def _has_low_bits(target: Target) -> bool:
    try:
        target.check_low_bit(Precision.of(8))
    except UnsupportedModelError:
        return False
    return True
