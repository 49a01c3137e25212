"""The model card: what a checkpoint was trained on and how, its figures as tables, its limits, samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_TITLES = {
    "tiny": "a small model whose sublayers are redundant",
    "tiny-early-exit": "a small model whose early layers draft",
}

_RECIPES = {
    "tiny": """Stochastic depth over sublayers: sublayer `2i` is the attention branch of layer `i`, `2i + 1` its MLP
branch. In the phases `start` and `base` half of the steps leave out a random subset of the middle sublayers (a share
uniform between 0 and 0.6). In `subsets` every step runs the full model, which learns the next token, and on half of the
rows a random subset (0.2 to 0.6 of the middle sublayers left out), which learns the full model's distribution. From
`half-depth` on the share is 0.4 to 0.6, on all rows, and the distance counts double; in `mutual-half-depth` the full
model learns to be close to its subsets, too, which costs some of its text, and `tiny` mends that. Every middle sublayer
is left out equally often; no subset is favoured. Rows are 256 tokens long, then 512, at the end 2048.""",
    "tiny-early-exit": """Trained on from the phase `half-depth` of `tiny`, which see. The phases added are LayerSkip
(arXiv 2404.16710): layers are left out with a chance that rises with depth up to 0.1, and in every step three exits
learn through the shared final norm and LM head, a third of the rows each. They learn the distribution of the step's
last layer rather than the next token. They are rotated over the first three quarters of the layers, in the last two
phases with layer 6 always among them; in `mutual-exits` the last layer learns to be close to the exits, too, which
costs some of its text, and `tiny-early-exit` mends that.""",
}


def write_card(folder: Path, training: dict[str, Any], figures: dict[str, Any]) -> None:
    """Write ``README.md`` into a checkpoint's folder.

    Args:
        folder: of the checkpoint.
        training: contents of its ``training.json``.
        figures: contents of its ``evaluation.json``.
    """
    name = training["recipe"]
    sections = [
        _front_matter(),
        f"# {name}: {_TITLES[name]}",
        f"A Llama of {figures['parameters'] / 1e6:.1f} million parameters for tests, examples and experiments of "
        "self-speculative decoding. It writes text that looks like its three domains and knows next to nothing.",
        _data(training),
        f"## Recipe\n\n{_RECIPES[name]}\n\n{_phases(training)}",
        _loss(figures),
        _skip(figures),
        _exits(figures),
        _limits(),
        _samples(figures),
    ]
    (folder / "README.md").write_text("\n\n".join(sections) + "\n", encoding="utf-8")


def _front_matter() -> str:
    return "---\nlanguage: en\nlibrary_name: transformers\npipeline_tag: text-generation\n---"


def _data(training: dict[str, Any]) -> str:
    sizes = training["domain_tokens"]
    return f"""## Data

| domain | text | held out | licence | training tokens |
| --- | --- | --- | --- | --- |
| math | GSM8K train, `Question: ...` and `Answer: ...` | GSM8K test (a part) | MIT | {sizes["math"]:,} |
| code | the Python standard library, no tests | 1 file in 32, by the hash of its name | PSF-2.0 | {sizes["code"]:,} |
| prose | eight novels of Project Gutenberg | the last 4 % of each book | public domain | {sizes["prose"]:,} |

The tokenizer is a byte-level BPE of 4096 entries, trained on the same training text; digits are single tokens. A
document is `<|bos|>`, text, `<|eos|>`; the tokenizer adds `<|bos|>` itself."""


def _phases(training: dict[str, Any]) -> str:
    rows = [
        f"| {name} | {each['steps']:,} | {each['tokens']:,} | "
        + " | ".join(f"{share:.0%}" for share in each["mixture"].values())
        + " |"
        for name, each in training["phases"].items()
    ]
    return "\n".join(
        [
            "| phase | steps | tokens | math | code | prose |",
            "| --- | --- | --- | --- | --- | --- |",
            *rows,
            "",
            f"Seed {training['seed']}; {training['tokens']:,} tokens in all; Muon for the matrices, AdamW for the "
            f"embedding and the norms, bfloat16 arithmetic over float32 weights; torch {training['torch']}, Python "
            f"{training['python']} (whose standard library is the code). `recipes/` makes it again.",
            *_blend(training),
        ]
    )


def _blend(training: dict[str, Any]) -> list[str]:
    blended = training["blended"]
    if blended is None:
        return []
    return [
        "",
        f"The weights are a mean: {1 - blended['share']:.0%} those of the last phase, {blended['share']:.0%} those of "
        f"`{blended['phase']}`.",
    ]


def _loss(figures: dict[str, Any]) -> str:
    rows = [
        f"| {name} | {each['documents']} | {each['tokens']:,} | "
        + " | ".join(f"{bits:.3f}" for bits in each["bits_per_byte"].values())
        + " |"
        for name, each in figures["held_out"].items()
    ]
    return "\n".join(
        [
            "## Held-out loss",
            "",
            f"Bits per UTF-8 byte, teacher-forced, {figures['dtype']} arithmetic; longer documents are cut into "
            "windows of 1024 tokens, or of 2048.",
            "",
            "| domain | documents | tokens | windows of 1024 | windows of 2048 |",
            "| --- | --- | --- | --- | --- |",
            *rows,
        ]
    )


def _skip(figures: dict[str, Any]) -> str:
    sets = figures["skip_half"]
    size = len(next(iter(sets.values()))["skipped_sublayers"])
    table = [
        f"| {name} | " + " | ".join(f"{each['agreement'][other]:.3f}" for other in sets) + " |"
        for name, each in sets.items()
    ]
    lists = [f"- {name}: {', '.join(map(str, each['skipped_sublayers']))}" for name, each in sets.items()]
    return "\n".join(
        [
            "## Half of the middle sublayers skipped",
            "",
            f"Share of the full model's greedy choices, at held-out positions, that it still makes with {size} of its "
            f"{figures['middle_sublayers']} middle sublayers skipped. One set for each domain, chosen greedily one by "
            f"one on {figures['calibration_tokens']:,} tokens of training text.",
            "",
            "| set chosen on | " + " | ".join(f"on {name}" for name in sets) + " |",
            "| --- |" + " --- |" * len(sets),
            *table,
            "",
            "The sets skipped:",
            "",
            *lists,
        ]
    )


def _exits(figures: dict[str, Any]) -> str:
    exits = figures["exit_agreement"]
    layers = list(next(iter(exits.values())))
    rows = [f"| {layer} | " + " | ".join(f"{each[layer]:.3f}" for each in exits.values()) + " |" for layer in layers]
    return "\n".join(
        [
            "## Early exits",
            "",
            "Share of the full model's greedy choices made after the first layers, the final norm and the LM head.",
            "",
            "| layers | " + " | ".join(exits) + " |",
            "| --- |" + " --- |" * len(exits),
            *rows,
        ]
    )


def _limits() -> str:
    return """## Limits

It has the form of reasoning, code and prose without the substance: its sums are mostly wrong, its functions do not do
what they say, its facts are made up. English only, 2048 positions. Use it to exercise decoding, never for answers."""


def _samples(figures: dict[str, Any]) -> str:
    counts = {name: f"{each['well_formed']} of {each['documents']}" for name, each in figures["held_out_form"].items()}
    parts = [
        "## Samples\n\n"
        f"Greedy continuations. Of held-out text, {counts['math']} math answers end in `#### number`, {counts['code']} "
        f"pieces of code parse up to the statement they are cut short in, {counts['prose']} of prose end a sentence. "
        "Shown are continuations of prompts written for this project, the first of `selfspec_lab.prompts` in each "
        "domain; the prompt ends at `>>>`."
    ]
    for name, (first, *_) in figures["samples"].items():
        parts.append(f"{name}:\n\n````text\n{first['prompt']}>>>{first['completion']}\n````")
    return "\n\n".join(parts)
