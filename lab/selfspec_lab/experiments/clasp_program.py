"""Claim 4: CLaSp's dynamic program is close to brute force, and adjacent tokens have similar sets."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from selfspec.errors import UnsupportedModelError
from selfspec_lab.checks import Check
from selfspec_lab.decide import SEEDS
from selfspec_lab.experiments.base import Data, Experiment, register
from selfspec_lab.experiments.clasp_program_checks import (
    NEAR,
    Searched,
    falls_with_distance,
    far_above_random,
    near_brute_force,
    neighbours_similar,
)
from selfspec_lab.experiments.clasp_program_picture import draw_cosines, draw_similarity
from selfspec_lab.experiments.lab import Lab
from selfspec_lab.experiments.panels import make_panels
from selfspec_lab.experiments.reading import Reading, read_own_texts
from selfspec_lab.experiments.sampled import TEMPERATURE

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Amounts:
    """How much is measured.

    Attributes:
        prompts: prompts per domain.
        seeds: texts per prompt.
        written_tokens: tokens that the model writes for each text.
        searched_tokens: tokens per text at which every set is tried.
        free_layers: most middle layers that sets choose from in the comparison with brute force.
        longest_distance: greatest distance of two tokens whose sets are compared.
    """

    prompts: int
    seeds: int
    written_tokens: int
    searched_tokens: int
    free_layers: int = 12
    longest_distance: int = 128


@register
class ClaspProgram(Experiment):
    """CLaSp, figures 3a and 3b: every set of layers at some tokens, the program's sets at all tokens of a text."""

    number = 4
    name = "clasp-program"
    claim = (
        "The layers that CLaSp's dynamic program skips leave the hidden state nearly as close to the full model's as "
        "those that a brute-force search skips, and far closer than random ones. Adjacent tokens have similar sets, "
        "and the similarity falls with the distance of the tokens."
    )
    source = "CLaSp (Chen et al. 2025), figures 3a and 3b"
    method = (
        f"The model writes {SEEDS} texts of each prompt (sampled, temperature {TEMPERATURE}, each with a seed of its "
        "own); what is compared is a prompt's mean over them. At some of their tokens, with the target's keys and "
        "values of the tokens before, each of the 924 sets of 6 of the 12 middle layers is skipped in turn; the paper "
        "chooses from 12 of 32. Two figures are compared: the cosine similarity of the final hidden state to the "
        "target's, and the share of greedy tokens that are the target's. Random is the mean over all sets. The paper "
        f"shows near and far in a picture without numbers; the limit of {NEAR} is our choice. For the similarity over "
        "distance the program picks half of all layers at every token."
    )
    model = "tiny"

    def __init__(self, amounts: Amounts | None = None) -> None:
        self.amounts = amounts

    @torch.inference_mode()
    def measure(self, lab: Lab) -> Data:
        """Tries every set at some tokens of each text and runs the program at all of them."""
        amounts = self.amounts or lab.pick(Amounts(7, 1, 48, 1), Amounts(7, SEEDS, 160, 3))
        engine = lab.engine(self.model)
        layers = engine.target.layer_count
        free = middle(layers, amounts.free_layers)
        distances = _distances(min(amounts.longest_distance, 4 * amounts.written_tokens // 5))
        texts = []
        task = "every set of layers"
        for domain, reading, positions in read_own_texts(
            lab, engine, amounts.prompts, amounts.written_tokens, task, seeds=amounts.seeds
        ):
            searched = [positions[at] for at in _spread(amounts.searched_tokens, len(positions))]
            sets = [set(reading.choose_skipped(at, range(layers), layers // 2)) for at in positions]
            texts.append(
                {
                    "domain": domain,
                    **_search(reading, searched, free, len(free) // 2),
                    "similarity": [_similarity_at(sets, distance) for distance in distances],
                }
            )
        return {
            "seeds": amounts.seeds,
            "layers": layers,
            "skipped_layers": layers // 2,
            "free_layers": len(free),
            "free_skipped_layers": len(free) // 2,
            "sets": math.comb(len(free), len(free) // 2),
            "tokens": amounts.searched_tokens * len(texts),
            "distances": distances,
            "texts": texts,
        }

    def judge(self, data: Data) -> Sequence[Check]:
        """Near brute force and far above random; similar sets at adjacent tokens, less similar ones further apart."""
        return [
            near_brute_force(data, "cosine", "in the final hidden state's cosine similarity to the target's"),
            far_above_random(data),
            near_brute_force(data, "agreement", "in the share of greedy tokens that are the target's"),
            neighbours_similar(data),
            falls_with_distance(data),
        ]

    def draw(self, data: Data) -> "Figure":
        """Draws similarity over distance as in figure 3a, cosines by text as in figure 3b."""
        figure, (left, right) = make_panels(2)
        draw_similarity(left, data)
        draw_cosines(right, data)
        return figure


def middle(layers: int, most: int) -> range:
    """Up to ``most`` layers in the middle, with equally many layers before and after them, at least one.

    Raises:
        UnsupportedModelError: fewer than two layers are left.
    """
    fixed = max(1, (layers - most + 1) // 2)
    if layers - 2 * fixed < 2:
        raise UnsupportedModelError(f"sets of layers are compared in models of 4 layers or more; this one has {layers}")
    return range(fixed, layers - fixed)


def _spread(count: int, length: int) -> list[int]:
    """``count`` evenly spread indices below ``length``."""
    return [int((index + 0.5) * length / count) for index in range(count)]


def _distances(longest: int) -> list[int]:
    return [2**power for power in range(longest.bit_length())]


def _search(reading: Reading, positions: Sequence[int], free: range, skips: int) -> dict[str, Any]:
    """Means over some tokens of a text, with every set of ``skips`` free layers skipped in turn."""
    cosines: list[list[float]] = []
    agreements: list[list[float]] = []
    beaten: list[float] = []
    bands: list[list[float]] = []
    for position in positions:
        skipped, states = final_states(reading, position, free, skips)
        aim = reading.states[-1, position][None]
        cosine = functional.cosine_similarity(states.cpu().double(), aim.cpu().double(), dim=-1)
        same = (reading.target.logits(states).argmax(-1) == reading.target.logits(aim).argmax(-1)).cpu()
        program, best = skipped.index(reading.choose_skipped(position, free, skips)), int(cosine.argmax())
        for kept, values in ((cosines, cosine), (agreements, same.double())):
            kept.append([float(values[program]), float(values[best]), float(values.mean())])
        beaten.append(float((cosine < cosine[program]).sum()) / max(len(skipped) - 1, 1))
        bands.append([float(value) for value in cosine.quantile(cosine.new_tensor([0.05, 0.95]))])
    return {
        "cosine": asdict(Searched(*map(fmean, zip(*cosines, strict=True)))),
        "agreement": asdict(Searched(*map(fmean, zip(*agreements, strict=True)))),
        "beaten": fmean(beaten),
        "band": list(map(fmean, zip(*bands, strict=True))),
    }


def final_states(
    reading: Reading, position: int, free: range, skips: int
) -> tuple[list[tuple[int, ...]], torch.Tensor]:
    """The state after the last layer, for every set of ``skips`` skipped layers; sets share their common beginnings.

    Args:
        reading: the text.
        position: index of the token.
        free: the layers to choose from; layers before and after them all run.
        skips: number of skipped layers.

    Returns:
        The sets, and ``[sets, hidden]``.
    """
    skipped: list[tuple[int, ...]] = [()]
    states = reading.states[free.start, position][None]
    for done, layer in enumerate(free, start=1):
        left = len(free) - done
        running = [index for index, layers in enumerate(skipped) if len(layers) + left >= skips]
        skipping = [index for index, layers in enumerate(skipped) if len(layers) < skips]
        states = torch.cat([reading.run_layer(layer, position, states[running]), states[skipping]])
        skipped = [skipped[index] for index in running] + [(*skipped[index], layer) for index in skipping]
    for layer in range(free.stop, reading.target.layer_count):
        states = reading.run_layer(layer, position, states)
    return skipped, states


def jaccard(one: set[int], other: set[int]) -> float:
    """Jaccard similarity: size of the intersection ÷ size of the union."""
    return len(one & other) / len(one | other)


def _similarity_at(sets: Sequence[set[int]], distance: int) -> float:
    return fmean(jaccard(one, other) for one, other in zip(sets, sets[distance:], strict=False))
