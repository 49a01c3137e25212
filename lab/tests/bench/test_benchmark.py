"""Candidates take turns on the same prompts."""

from typing import Any

from selfspec_lab.bench.benchmark import Sample, run_benchmark


def test_candidates_take_turns_and_one_that_fails_leaves_the_others_alone() -> None:
    written: list[tuple[str, int]] = []

    def candidate(name: str, fails_at: int = -1) -> Any:
        def write(prompt_ids: list[int]) -> Sample:
            written.append((name, len(prompt_ids)))
            if sum(each == name for each, _ in written) == fails_at:
                raise ValueError("no\nmore")
            return Sample((), 1.0, 0)

        return write

    candidates = {"a": candidate("a"), "b": candidate("b", 4), "c": candidate("c", 1), "d": candidate("d")}
    outcome = run_benchmark(candidates, [[0], [0, 0]], 2)
    assert outcome.failures == {"b": "ValueError: no more", "c": "ValueError: no more"}
    assert {name: [len(repeat) for repeat in repeats] for name, repeats in outcome.samples.items()} == {
        "a": [2, 2],
        "d": [2, 2],
    }
    assert written[:4] == [("a", 2), ("b", 2), ("c", 2), ("d", 2)]  # warm-up on the longest prompt
    assert written[4:10] == [("a", 1), ("b", 1), ("d", 1), ("b", 2), ("d", 2), ("a", 2)]
