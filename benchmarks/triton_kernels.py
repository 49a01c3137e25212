"""Compiles every form of every Triton kernel offline: ``PYTHONPATH=... python benchmarks/triton_kernels.py``.

For five targets, without a driver, each form is compiled twice. Registers, memory, spills and digests go to
``benchmarks/results/triton/kernels.json``, with the fraction of the memory bandwidth that bytes and instructions
predict for one row, and to the tables of ``docs/kernels.md``. All take half an hour.

With ``--check`` nothing is written: it fails where a form spills, two compilations differ, or the committed table does
not have a form. ``--only TEXT`` takes forms whose name begins with it, and leaves the others in the tables as they are.
``--missing`` takes those that the tables lack, and then those that they have of other sources of the kernel; what is
done is kept if it is stopped. ``--targets`` takes some of the targets, with ``--check``.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from selfspec.files import replace_file
from selfspec_lab.offline.compiling import TARGETS, compile_form
from selfspec_lab.offline.fraction import predicted_fraction, weight_bits
from selfspec_lab.roofline import DEVICES

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "triton" / "kernels.json"
PAGE = ROOT / "docs" / "kernels.md"
NAMED = {"sm_80": ("A100", "RTX 4090"), "sm_90": ("H100",), "sm_100": (), "sm_120": (), "gfx942": ("MI300X",)}
"""Devices for which a fraction is predicted from the binary of a target."""


def all_forms(target: str = "sm_80") -> list[Any]:
    """The forms of every kernel for a target; programs of products have 16 rows on ROCm, as its instructions have."""
    from selfspec_lab.offline.block_forms import block_forms
    from selfspec_lab.offline.product_forms import product_forms

    forms = [*block_forms(), *product_forms(16 if TARGETS[target][0] == "hip" else 8)]
    assert len({form.name for form in forms}) == len(forms), "two forms have one name"
    return forms


def examine(form: Any, target: str) -> dict[str, Any]:
    """What one form is for one target, compiled twice."""
    binary, again = compile_form(form, target), compile_form(form, target)
    fractions = {name: predicted_fraction(form, binary, DEVICES[name]) for name in NAMED[target]}
    return {
        "registers": binary.registers,
        "shared": binary.shared,
        "spilled": binary.spilled,
        "digest": binary.digest,
        "source": source_of(form),
        "bits": weight_bits(form),
        "deterministic": binary.code == again.code,
        "fraction": {name: round(value, 3) for name, value in fractions.items() if value is not None},
    }


def source_of(form: Any) -> str:
    """A digest of the source of a form's kernel, and of all that it calls."""
    return hashlib.sha256(form.kernel.cache_key.encode()).hexdigest()[:16]


def complaints(results: Mapping[str, Mapping[str, Mapping[str, Any]]], known: Mapping[str, Any]) -> list[str]:
    """What is wrong with results, by form and target, and with the committed ones, ``known``, which may be none."""
    found = []
    for form, targets in results.items():
        for target, each in targets.items():
            if each["spilled"]:
                found.append(f"{form} spills for {target}")
            if not each["deterministic"]:
                found.append(f"two compilations of {form} for {target} differ")
            if known and target not in known.get(form, {}):
                found.append(f"{form} for {target} is not in the committed table")
    return found


def table(results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """Registers and shared memory by form and target, as Markdown."""
    lines = [f"| kernel | {' | '.join(TARGETS)} |", "| --- |" + " --- |" * len(TARGETS)]
    for form, targets in results.items():
        cells = (targets.get(target) for target in TARGETS)
        shown = ("" if each is None else f"{each['registers']}, {each['shared'] / 1024:.1f}" for each in cells)
        lines.append(f"| {form} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def fractions_table(results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """The predicted fraction of the memory bandwidth by form and device, as Markdown."""
    names = [name for named in NAMED.values() for name in named]
    lines = [f"| kernel, one row | {' | '.join(names)} |", "| --- |" + " --- |" * len(names)]
    for form, targets in results.items():
        found = {name: value for each in targets.values() for name, value in each["fraction"].items()}
        if found:
            lines.append(f"| {form} | {' | '.join(f'{found[name]:.2f}' if name in found else '' for name in names)} |")
    return "\n".join(lines) + "\n"


def replace_section(page: str, name: str, text: str) -> str:
    """A page with other text in the block of a name."""
    start, end = f"<!-- benchmarks/triton_kernels.py writes this: {name} -->\n", "<!-- up to here -->"
    before, _, rest = page.partition(start)
    assert end in rest, f"the page has no section {name}"
    return before + start + "\n" + text + "\n" + end + rest.partition(end)[2]


def committed() -> dict[str, Any]:
    """The results of forms by target that are in the file now."""
    return dict(json.loads(RESULT.read_text())["kernels"]) if RESULT.exists() else {}


def is_known(form: Any, known: Mapping[str, Any]) -> bool:
    """Whether the tables have a form for all targets, of the source that its kernel has now."""
    results = known.get(form.name, {})
    return set(results) == set(TARGETS) and all(each.get("source") == source_of(form) for each in results.values())


def write(results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    """Writes the results and the tables of the page."""
    triton = importlib.import_module("triton")
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    replace_file(RESULT, json.dumps({"triton": triton.__version__, "kernels": results}, indent=1) + "\n")
    page = replace_section(PAGE.read_text(encoding="utf-8"), "kernels", table(results))
    replace_file(PAGE, replace_section(page, "fractions", fractions_table(results)))


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--missing", action="store_true")
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    options = parser.parse_args(arguments)
    every = {target: {form.name: form for form in all_forms(target)} for target in options.targets}
    names = list(every[options.targets[0]])
    known, first = committed(), every[options.targets[0]]
    chosen = [name for name in names if name.startswith(options.only)]
    assert chosen, f"no form's name begins with {options.only!r}"
    if options.missing:
        chosen = sorted((name for name in chosen if not is_known(first[name], known)), key=known.__contains__)
    assert options.check or set(options.targets) == set(TARGETS), "the tables have all targets"
    results: dict[str, dict[str, Any]] = {}
    for name in chosen:
        results[name] = {target: examine(every[target][name], target) for target in options.targets}
        print(name, *(f"{target}: {each['registers']}" for target, each in results[name].items()), flush=True)
        if not options.check:
            together = {**committed(), **results}
            write({each: together[each] for each in names if each in together})
    for complaint in (found := complaints(results, known if options.check else {})):
        print(complaint, file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
