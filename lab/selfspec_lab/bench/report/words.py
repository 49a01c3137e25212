"""What the reports of a run say in words: title, facts, notes, and how to read it."""

from collections.abc import Mapping, Sequence
from typing import Any

from selfspec_lab.bench.options import PLAIN

_MOST_NAMED = 8

HOW_TO_READ = (
    (
        "speedup",
        "Tokens a second after the first token, over those of plain decoding (autoregressive) of the same prompt in "
        "the same repeat and runtime: the median over the repeats, then over the prompts. The interval is a 95 % "
        "bootstrap interval over the prompts; with few prompts it says little. Speedup with prefill is of whole "
        "requests.",
    ),
    (
        "identical outputs",
        "Outputs that are token for token those of plain decoding. In float32 all of them have to be. In 16 bits a "
        "verification of several rows rounds otherwise than single steps, and near-ties may fall the other way. "
        "Sampled outputs of peers have nothing to be compared with. ≠ marks contenders with outputs that differ.",
    ),
    ("acceptance", "Accepted ÷ drafted tokens, of all rounds together."),
    ("mean length", "Committed tokens ÷ target forwards, prefill aside. Draft length is drafted tokens a round."),
    (
        "ideal speedup, efficiency",
        "What the bytes that were read allow (weights, keys and values of drafts and verifications as they were) if "
        "all else were free, and the share of it that was reached. Drafts that are found, not computed, read nothing.",
    ),
    (
        "accepted 1st, 2nd, … token",
        "Of the rounds that drafted so many tokens, the share in which the last of them was accepted too.",
    ),
    ("eTPL", "Tokens ÷ loaded layers (DEL), the mean over the prompts; plain decoding has one over its layers."),
    (
        "TPT",
        "Tokens a second, of all outputs together; predicted is KnapSpec's objective (equation 4, with the head) for "
        "this acceptance and draft length at the latencies measured before the run.",
    ),
    (
        "draft, verify, select, other",
        "Shares of the time after the first token. On an accelerator a phase lasts until its work is queued, and the "
        "time until it is done falls into the phase that waits.",
    ),
    (
        "first token, memory",
        "Median time to the first token; highest peak of memory, and the median of what it is above that of plain "
        "decoding. All contenders run in one process, so that on a CPU small differences are those of the process.",
    ),
)
"""Terms of the tables with what they mean."""


def title(summary: Mapping[str, Any]) -> str:
    """What was measured on what."""
    return f"{model_name(summary)} on {summary['options']['suite']}"


def model_name(summary: Mapping[str, Any]) -> str:
    """The model as it was loaded."""
    options = summary["options"]
    widened = f", widened {options['widen']} times" if options["widen"] > 1 else ""
    return f"{options['model']}{widened} ({summary['dtype']})"


def device_text(stamp: Mapping[str, Any]) -> str:
    """The device with the threads that it had."""
    hardware = stamp["hardware"]
    if hardware.get("device") not in (None, "cpu"):
        return str(hardware["device"])
    return (
        f"{hardware.get('processor') or 'cpu'}, {counted(stamp['threads'], 'thread')} on {hardware.get('cores')} cores"
    )


def facts(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What was measured, where and with what: names with values."""
    stamp, options, versions = summary["stamp"], summary["options"], summary["stamp"]["versions"]
    greedy = options["temperature"] == 0
    sampling = "greedy" if greedy else f"temperature {options['temperature']:g}, seed {options['seed']}"
    prompts = counted(summary["prompts"], "prompt")
    categories = counted(len(summary["categories"]), "category", "categories")
    order = ", in a meaningful order" if summary["ordered"] else ""
    form = {None: "", True: ", as chat messages", False: ", as texts to continue"}[summary["chat"]]
    return [
        ("model", f"{model_name(summary)}, {summary['parameters']:,} parameters, {summary['layers']} layers"),
        ("hardware", f"{device_text(stamp)}; copies {summary['copy_bytes_per_second'] / 1e9:.1f} GB/s"),
        ("software", ", ".join(f"{name} {version}" for name, version in versions.items() if version)),
        ("commit", commit_text(stamp)),
        ("date", str(stamp["date"])),
        ("suite", f"{options['suite']}: {prompts} in {categories}{order}{form}"),
        ("outputs", f"up to {options['max_new_tokens']} tokens, {sampling}, {counted(options['repeats'], 'repeat')}"),
        ("plain decoding", _plain_text(summary)),
    ]


def commit_text(stamp: Mapping[str, Any]) -> str:
    """The commit, and whether the checkout differed from it."""
    if not stamp["commit"]:
        return "none (not a checkout)"
    return f"{stamp['commit'][:12]}{', with uncommitted changes' if stamp['dirty'] else ''}"


def counted(number: int, name: str, plural: str = "") -> str:
    """A number of things, in words: ``1 prompt``, ``2 prompts``."""
    return f"{number} {name if number == 1 else plural or name + 's'}"


def notes(summary: Mapping[str, Any]) -> list[str]:
    """What a reader has to know before the figures: what is missing, what differs, what failed."""
    return [
        *_unfinished(summary),
        *_skipped(summary["skipped"]),
        *_differing(summary["contenders"]),
        *_failed(summary),
        *_llama_cpp(summary["llama_cpp"]),
    ]


def _unfinished(summary: Mapping[str, Any]) -> list[str]:
    measured, expected = summary["measured"], summary["expected"]
    if measured >= expected:
        return []
    return [f"The run is not finished: {measured} of {expected} outputs are measured. Go on with it by --resume."]


def _skipped(skipped: Sequence[Mapping[str, Any]]) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for prompt in skipped:
        reasons.setdefault(str(prompt["reason"]), []).append(str(prompt["key"]))
    return [f"{counted(len(keys), 'prompt')} skipped ({_named(keys)}): {reason}" for reason, keys in reasons.items()]


def _differing(contenders: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} wrote other tokens than plain decoding in {each['overall']['differing']} of "
        f"{each['overall']['compared']} outputs."
        for name, each in contenders.items()
        if each["overall"]["differing"]
    ]


def _failed(summary: Mapping[str, Any]) -> list[str]:
    said = []
    for name, contender in summary["contenders"].items():
        why, figures = "; ".join(contender["errors"]), contender["overall"]
        if name in summary["failures"]:
            said.append(f"{name} could not be made: {why}")
        elif why:
            rest = (
                f"its figures are of the {counted(figures['prompts'], 'prompt')} that are left"
                if figures["prompts"]
                else "no prompt is left"
            )
            said.append(f"{name} failed {counted(figures['failures'], 'time')}; {rest}: {why}")
    return said


def _llama_cpp(build: Mapping[str, Any] | None) -> list[str]:
    """What is to be known of llama.cpp, where it was measured."""
    if build is None:
        return []
    said = [
        "llama.cpp keeps a copy of the weights of its own in the same process, which counts into every peak of memory."
    ]
    if build["missing"]:
        said.append(
            f"llama.cpp was not built for this processor: its build does without {', '.join(build['missing'])}, so "
            "that it is slower than it could be. Build it here: "
            "CMAKE_ARGS=-DGGML_NATIVE=ON pip install --no-binary llama-cpp-python llama-cpp-python"
        )
    return said


def _plain_text(summary: Mapping[str, Any]) -> str:
    """How fast plain decoding is, also beside the peers."""
    speed = summary["contenders"][PLAIN]["overall"]["tokens_per_second"]
    said = ["not measured" if speed is None else f"{speed:.1f} tokens/s"]
    for name, each in summary["plain_over"].items():
        if each["speedup"] is not None:
            low, high = each["speedup_interval"]
            said.append(f"{each['speedup']:.2f}× ({low:.2f} to {high:.2f}) as fast as {name}")
    return "; ".join(said)


def _named(keys: Sequence[str]) -> str:
    return ", ".join(keys[:_MOST_NAMED]) + (f" and {len(keys) - _MOST_NAMED} more" if len(keys) > _MOST_NAMED else "")
