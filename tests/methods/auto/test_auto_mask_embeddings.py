"""The embedding of probes after which guesses are best is found out, and used."""

import random

import pytest
import torch

from helpers.models import build, prompt
from selfspec.decoding.drafter import Prefill
from selfspec.methods.auto.drafting import AutoDrafter
from selfspec.methods.auto.known import Experience
from selfspec.methods.auto.mask_embeddings import MaskEmbeddingRates, MaskEmbeddings, MaskEmbeddingsOfModel
from selfspec.planning.acceptance_tables import CONFIDENCE, MATCH_LENGTH, PROBABILITY, AcceptanceRate
from selfspec.runtimes.costs.live import LiveCosts
from selfspec.runtimes.costs.rows import RowCosts
from selfspec.runtimes.target import Target


@pytest.mark.parametrize("rates", [(0.1, 0.08, 0.2), (0.31, 0.36, 0.02), (0.3, 0.0, 0.0)])
@pytest.mark.parametrize(("guesses", "share"), [(100, 0.75), (2000, 0.93)])
def test_probes_are_soon_nearly_as_good_as_with_the_best_embedding(
    rates: tuple[float, ...], guesses: int, share: float
) -> None:
    expected = 0.0
    for seed in range(20):
        draws, record = random.Random(seed), MaskEmbeddingRates(len(rates))
        for _ in range(guesses):
            kind = record.best()
            expected += rates[kind] / (20 * guesses)
            record.note(kind, draws.random() < rates[kind])
    assert expected > share * max(rates)


def test_what_changes_is_followed() -> None:
    record = MaskEmbeddingRates(2)
    for rates in ((1.0, 0.0), (0.0, 1.0)):
        for _ in range(1500):
            kind = record.best()
            record.note(kind, rates[kind] > 0)
        assert record.best() == rates.index(1.0)


def test_the_embeddings_are_means() -> None:
    target, given = Target(build("llama")), prompt(12)
    of_model = MaskEmbeddingsOfModel(target)
    mask_embeddings = of_model.of_request(given)
    weight = target.model.get_input_embeddings().weight.detach()
    wanted = [None, weight[torch.tensor(given)].mean(0), weight.mean(0)]
    seen = set()
    for _ in range(6):
        mask_embeddings.choose()
        seen.add(mask_embeddings.kind)
        mean = wanted[mask_embeddings.kind]
        assert (mask_embeddings.chosen is None) == (mean is None)
        if mean is not None:
            torch.testing.assert_close(mask_embeddings.chosen, mean)
        mask_embeddings.note(mask_embeddings.kind, right=False)
    assert seen == set(range(len(wanted)))


def test_one_is_made_as_the_round_is_planned_and_counts_as_no_planning() -> None:
    """What asks for it afterwards is the verification, whose time says what rows cost."""
    now, made = [0.0], list[float]()

    def make() -> torch.Tensor:
        now[0] += 5.0
        made.append(now[0])
        return torch.ones(1)

    mask_embeddings = MaskEmbeddings((make, make))
    experience = Experience(*(AcceptanceRate(feature) for feature in (MATCH_LENGTH, PROBABILITY, CONFIDENCE)))
    prefill = Prefill((1, 2, 3), 4, probe=None, room=99)  # type: ignore[arg-type]
    verify = LiveCosts(RowCosts((1, 64), (1.0, 1.001)))
    drafter = AutoDrafter(prefill, experience, verify, None, 0.02, lambda: now[0], mask_embeddings)
    for _ in range(2):
        drafter.plan()
        assert len(made) == 1, "once"
        assert drafter.mask_embedding is not None
    assert made == [5.0]
    assert drafter._planned == 0.0
