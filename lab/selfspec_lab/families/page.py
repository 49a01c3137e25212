"""The table of families on the page of models, made of the facts of ``examine``."""

from collections.abc import Sequence

from selfspec.loading import architecture_of
from selfspec_lab.families.examine import Facts

BEGIN, END = "<!-- `selfspec families --page` writes this -->", "<!-- up to here -->"
_MARKS = ("native", "batches", "trees", "low bits", "MTP", "states")
_HEADINGS = ("family", "layers split by", "fused", *_MARKS, "GGUF")


def cells(facts: Facts) -> tuple[str, ...]:
    """A family's line of the table."""
    if facts.refusal:
        return facts.name, "refused", *[""] * (len(_HEADINGS) - 2)
    marks = facts.native, facts.batches, facts.trees, facts.low_bits, facts.mtp, facts.states
    split = facts.split if facts.identical else f"{facts.split}, other text"
    architecture = architecture_of(facts.name)
    file = f"`{architecture}`" if architecture else ""
    return (facts.name, split, facts.fused, *("yes" if mark else "" for mark in marks), file)


def line(facts: Facts) -> str:
    """What holds for a family, for a terminal."""
    name, split, fused, *marks, file = cells(facts)
    words = [
        f"{split:<19}",
        f"{fused} fused" if fused else "",
        *(each for each, mark in zip(_MARKS, marks, strict=True) if mark),
        f"GGUF {file}" if file else "",
    ]
    return f"{name:<22}{facts.refusal or '  '.join(filter(None, words))}"


def table(every: Sequence[Facts], version: str) -> str:
    """The Markdown between the marks: a line for each family that runs, and the names of the others."""
    ran = [cells(facts) for facts in every if not facts.refusal]
    lines = [f"With transformers {version}, {len(ran)} families:", ""]
    lines += [" | ".join(("", *row, "")).strip() for row in (_HEADINGS, ["---"] * len(_HEADINGS), *ran)]
    refused = [f"`{facts.name}`" for facts in every if facts.refusal]
    return "\n".join([*lines, "", f"Refused, or not built small: {', '.join(refused)}."])


def generated(page: str) -> str:
    """What a page has between the marks."""
    return page.split(BEGIN)[1].split(END, 1)[0].strip()


def with_table(page: str, made: str) -> str:
    """A page with another table."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{rest.split(END, 1)[1]}"
