"""What ``auto`` knows of the coming tokens: prompt lookup, what a probe chose, and what a grammar forces."""

from collections.abc import Callable, Sequence

import pytest

from selfspec.decoding.drafter import Prefill
from selfspec.methods.auto.known import FORCED, LOOKUP, PROBED, Experience, KnownTokens
from selfspec.methods.auto.mask_embeddings import MaskEmbeddings
from selfspec.planning.acceptance_tables import CONFIDENCE, MATCH_LENGTH, PROBABILITY, AcceptanceRate

PROMPT = (1, 2, 3, 4, 9, 8)
"""After it comes 1, which 2, 3 and 4 followed before."""


def experience_of() -> Experience:
    return Experience(*(AcceptanceRate(feature) for feature in (MATCH_LENGTH, PROBABILITY, CONFIDENCE)))


def known_tokens(experience: Experience, forced: Callable[[Sequence[int]], Sequence[int]] | None = None) -> KnownTokens:
    prefill = Prefill(PROMPT, 1, probe=None, forced=forced)  # type: ignore[arg-type]
    known = KnownTokens(prefill, experience, MaskEmbeddings())
    known.read_prompt(len(PROMPT) + 1)
    return known


def probed(known: KnownTokens, token: int, confidence: float, *others: tuple[int, float]) -> None:
    """A probe of the last round chose a token; ``others`` may come, too."""
    known.read_probe(((token, confidence), *others))


def test_a_token_that_lookup_and_a_probe_give_is_likelier_than_either() -> None:
    known = known_tokens(experience_of())
    copied = known.likeliest()
    assert copied.name == LOOKUP
    assert copied.token_ids[:3] == [2, 3, 4]
    probed(known, 7, 0.5)
    other = known.likeliest()
    assert (other.name, list(other.token_ids)) == (PROBED, [7])
    probed(known, 2, 0.5)
    agreed = known.likeliest()
    assert (agreed.name, agreed.token_ids) == (LOOKUP, copied.token_ids)
    assert agreed.survival[0] > 0.7, "much more than if one of the two were right by chance"
    assert agreed.survival[0] > copied.survival[0] + other.survival[0]
    ratios = [own / before for own, before in zip(agreed.survival, copied.survival, strict=True)]
    assert ratios == pytest.approx([ratios[0]] * len(ratios)), "the tokens after it are as likely as before"


@pytest.mark.parametrize("right", [True, False])
def test_how_often_both_are_right_is_learned(right: bool) -> None:
    experience = experience_of()
    known = known_tokens(experience)
    before = experience.agreed.rate(1)
    for _ in range(40):
        text = known_tokens(experience)
        probed(text, 2, 0.5)
        text.extend([2 if right else 5])
        probed(text, 77, 0.5)  # no copy
        text.extend([3])
    assert (experience.agreed.rate(1) > before) == right
    probed(known, 2, 0.5)
    assert known.likeliest().survival[0] == pytest.approx(experience.agreed.rate(1))


def test_a_probe_that_lookup_confirms_promises_nothing() -> None:
    """What a probe is worth is what it says beyond them, lately."""
    known, experience = known_tokens(experience_of()), experience_of()
    first = known.gain_of_probe(0.0, 1.0)
    assert first == pytest.approx(experience.probes.outlook().mean)
    for token in (2, 3, 4, 9, 8) * 4:
        probed(known, token, 0.5)
        known.extend([token])
        if token == 8:
            known.extend([1])
    copied = known.gain_of_probe(0.0, 1.0)
    rate = known._probes.outlook().mean
    assert copied < 0.25 * rate
    for token in range(100, 140):
        probed(known, token, 0.5)
        known.extend([token])
    assert known.gain_of_probe(0.0, 1.0) > 0.8 * known._probes.outlook().mean
    before = known.gain_of_probe(0.0, 1.0) / known._probes.outlook().mean
    probed(known, 5, 0.5)
    known.extend([6])
    assert known.gain_of_probe(0.0, 1.0) == pytest.approx(before * known._probes.outlook().mean), "it was wrong"


def test_that_lookup_gives_what_probes_give_is_forgotten() -> None:
    known = known_tokens(experience_of())
    for token in (2, 3, 4, 9, 8):
        probed(known, token, 0.5)
        known.extend([token])
    low = known.gain_of_probe(0.0, 1.0)
    known.fade(0.5)
    assert low < known.gain_of_probe(0.0, 1.0) < known._probes.outlook().mean
    known.fade(1.0)
    assert known.gain_of_probe(0.0, 1.0) == pytest.approx(known._probes.outlook().mean)


def test_what_else_may_come_is_verified_beside_the_likeliest() -> None:
    known = known_tokens(experience_of())
    probed(known, 7, 0.5, (20, 0.2), (21, 0.1), (22, 0.01))
    alone, chain = known.likeliest(), known.likeliest(beside=True)
    assert (alone.name, list(alone.token_ids), alone.siblings) == (PROBED, [7], ())
    assert (chain.name, list(chain.token_ids), chain.survival) == (PROBED, [7], alone.survival)
    chances = dict(chain.siblings)
    assert [*chances] == [2, 20, 21], "what lookup gives, and the likeliest others"
    assert chances[2] == pytest.approx(known.lookup.likelihood)
    assert list(chances.values()) == sorted(chances.values(), reverse=True)
    assert chain.survival[0] + sum(chances.values()) <= 1
    probed(known, 2, 0.5, (20, 0.2), (21, 0.1), (22, 0.01))
    agreed = known.likeliest(beside=True)
    assert (agreed.name, [token for token, _ in agreed.siblings]) == (LOOKUP, [20, 21, 22])


def test_siblings_are_never_likelier_than_what_is_left() -> None:
    experience = experience_of()
    for _ in range(200):
        experience.others.note(True, 0.2)
    known = known_tokens(experience)
    probed(known, 2, 0.9, *((token, 0.2) for token in (20, 21, 22)))
    chain = known.likeliest(beside=True)
    assert chain.survival[0] + sum(chance for _, chance in chain.siblings) == pytest.approx(1.0)


def test_what_siblings_bring_is_learned_and_makes_probes_worth_more() -> None:
    experience = experience_of()
    before = experience.others.rate(0.2)
    known = known_tokens(experience)
    first = known.gain_of_probe(0.0, 1.0)
    for token in range(40, 60):
        probed(known, 7, 0.5, (token, 0.2))
        known.extend([token, 99], siblings=[token])
    learned = experience.others.rate(0.2)
    assert learned > 2 * before
    more = known.gain_of_probe(0.0, 1.0)
    assert more > 0.3
    for token in range(60, 120):
        probed(known, 7, 0.5, (20, 0.2))
        known.extend([token, 99], siblings=[20])
    assert experience.others.rate(0.2) < learned / 2
    assert known.gain_of_probe(0.0, 1.0) < min(more, first) / 2


def test_what_a_grammar_forces_comes_first_and_lookup_goes_on_after_it() -> None:
    asked: list[list[int]] = []

    def forced(output: Sequence[int]) -> Sequence[int]:
        asked.append(list(output))
        return [5, 3] if output[-1] == 1 else []

    known = known_tokens(experience_of(), forced)
    probed(known, 7, 0.5)
    assert known.any
    offered = known.likeliest()
    assert offered.name == FORCED
    assert offered.token_ids[:4] == [5, 3, 4, 9]
    assert offered.survival[:2] == pytest.approx([0.95, 0.95**2])
    assert offered.survival[2] < offered.survival[1]
    known.extend([5, 3])
    assert known.likeliest().name == LOOKUP
    assert asked == [[1], [1, 5, 3]], "once a round"


@pytest.mark.parametrize("right", [True, False])
def test_how_models_spell_what_is_forced_is_learned(right: bool) -> None:
    experience = experience_of()
    for _ in range(40):
        known = known_tokens(experience, lambda _: [5, 6])
        known.likeliest()
        known.extend([5, 6] if right else [9])
    rate = known_tokens(experience, lambda _: [5, 6]).likeliest().survival[0]
    assert rate > 0.98 if right else rate < 0.3
