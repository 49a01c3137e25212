"""Predicts decoding of the papers' models on named devices: ``python benchmarks/roofline.py``.

From published bandwidths and peaks, the sizes of the models, and the fraction of the bandwidth that the kernels' bytes
and instructions allow (``benchmarks/results/triton/kernels.json``). Writes ``benchmarks/results/triton/roofline.json``
and the table of ``docs/kernels.md``. Nothing of it is measured but the acceptance, which by default is that of drafts
of 4 bits in ``benchmarks/results/exported-drafts-smollm2.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from selfspec.files import replace_file
from selfspec_lab.roofline import DEVICES, MODELS, predict
from triton_kernels import PAGE, ROOT, replace_section

RESULTS = ROOT / "benchmarks" / "results"
KERNELS, ROOFLINE = RESULTS / "triton" / "kernels.json", RESULTS / "triton" / "roofline.json"
ACCEPTANCE = RESULTS / "exported-drafts-smollm2.json"
NAMED = ("A100", "H100", "RTX 4090", "MI300X")


def measured_acceptance() -> float:
    """The share of a model's own tokens that its copy of 4 bits has as its first choice, as committed."""
    exports = json.loads(ACCEPTANCE.read_text(encoding="utf-8"))["exports"]
    return next(float(each["acceptance"]) for each in exports if each["bits"] == "Q4_0")


def predictions(acceptance: float, context: int, reached: Mapping[str, Mapping[int, float]]) -> list[dict[str, Any]]:
    """By model and device; ``reached`` has by device and bits the fraction of the bandwidth that products reach."""
    rows = []
    for model, shape in MODELS.items():
        for device in NAMED:
            found = predict(shape, DEVICES[device], acceptance, context=context, reached=reached.get(device, {}))
            rows.append({"model": model, "device": device, **found._asdict()})
    return rows


def table(result: Mapping[str, Any]) -> str:
    """Step, 8 rows and draft in milliseconds, tokens a round and speedup, as Markdown."""
    lines = [
        f"Acceptance {result['acceptance']:.3f}, {result['context']} tokens of context, bfloat16, drafts of 4 bits.",
        "",
        "| model | device | step, ms | 8 rows, ms | draft, ms | tokens a round | predicted speedup |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in result["predictions"]:
        seconds = " | ".join(f"{1000 * row[name]:.2f}" for name in ("step", "eight_rows", "draft"))
        lines.append(f"| {row['model']} | {row['device']} | {seconds} | {row['tokens']:.2f} | {row['speedup']:.2f} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--acceptance", type=float, help="of a draft token, if those before it are accepted")
    parser.add_argument("--context", type=int, default=1024)
    options = parser.parse_args(arguments)
    acceptance = measured_acceptance() if options.acceptance is None else options.acceptance
    reached = reached_fractions(json.loads(KERNELS.read_text())["kernels"])
    result = {
        "predicted": True,
        "acceptance": acceptance,
        "context": options.context,
        "reached": reached,
        "predictions": predictions(acceptance, options.context, reached),
    }
    print(table(result))
    if options.acceptance is None and options.context == parser.get_default("context"):
        replace_file(ROOFLINE, json.dumps(result, indent=1) + "\n")
        replace_file(PAGE, replace_section(PAGE.read_text(encoding="utf-8"), "roofline", table(result)))
    return 0


def reached_fractions(kernels: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[int, float]]:
    """By device and bits of a weight the least predicted fraction of the forms of products; forms may be missing."""
    reached: dict[str, dict[int, float]] = {}
    for targets in kernels.values():
        for each in targets.values():
            for device, fraction in each["fraction"].items():
                if each["bits"] is not None:
                    own = reached.setdefault(device, {})
                    own[each["bits"]] = min(fraction, own.get(each["bits"], 1.0))
    return reached


if __name__ == "__main__":
    sys.exit(main())
