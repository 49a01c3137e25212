"""The text of a report: title, facts, notes, and definitions of the terms."""

from collections.abc import Mapping, Sequence
from typing import Any

from selfspec_lab.bench.options import PLAIN
from selfspec_lab.bench.stamp import commit_text

_MOST_NAMED = 8

HOW_TO_READ = (
    (
        "speedup",
        "Tokens per second after the first token ÷ those of plain decoding (autoregressive) for the same prompt in the "
        "same repeat and runtime; median over the repeats, then over the prompts. The interval is a 95 % bootstrap "
        "interval over the prompts; with few prompts it is unreliable. Speedup with prefill is that of whole requests.",
    ),
    (
        "identical outputs",
        "Outputs with exactly the tokens of plain decoding. In float32 all outputs must be identical. In 16 bits a "
        "verification of several rows may round differently from single steps, so near-ties can be resolved "
        "differently. Sampled outputs of peers are not compared. ≠ marks candidates with outputs that differ.",
    ),
    ("acceptance", "Accepted ÷ drafted tokens, over all rounds."),
    (
        "mean length",
        "Committed tokens ÷ target forwards, without the prefill. Draft length is drafted tokens per round.",
    ),
    (
        "ideal speedup, efficiency",
        "The speedup if reading memory took all the time: bytes that plain decoding reads ÷ bytes that the drafts and "
        "verifications of this run read (weights, keys and values). Drafts that need no forward read nothing. "
        "Efficiency is speedup ÷ ideal speedup.",
    ),
    (
        "accepted 1st, 2nd, … token",
        "Of the rounds that drafted at least n tokens, the share that accepted the n-th.",
    ),
    ("eTPL", "Tokens ÷ loaded layers (DEL), mean over the prompts; plain decoding has 1 ÷ number of layers."),
    (
        "TPT",
        "Tokens per second over all outputs. Predicted is KnapSpec's objective (equation 4, with the head) for this "
        "acceptance and draft length, with the latencies measured before the run.",
    ),
    (
        "draft, verify, select, other",
        "Shares of the time after the first token. On an accelerator a phase ends when its work is queued; time until "
        "the work is done belongs to the phase that waits for it.",
    ),
    (
        "first token, memory",
        "Median time to the first token; highest peak memory, and the median of peak memory over that of plain "
        "decoding. All candidates run in one process, so on a CPU small differences are noise of the process.",
    ),
)
"""Terms of the tables and their definitions."""


def title(summary: Mapping[str, Any]) -> str:
    """Title of the report: model and suite."""
    return f"{model_name(summary)} on {summary['options']['suite']}"


def model_name(summary: Mapping[str, Any]) -> str:
    """Name of the model, with widening and dtype."""
    options = summary["options"]
    widened = f", widened {options['widen']} times" if options["widen"] > 1 else ""
    return f"{options['model']}{widened} ({summary['dtype']})"


def device_text(stamp: Mapping[str, Any]) -> str:
    """The device, with its threads on a CPU."""
    hardware = stamp["hardware"]
    if hardware.get("device") not in (None, "cpu"):
        return str(hardware["device"])
    return (
        f"{hardware.get('processor') or 'cpu'}, {counted(stamp['threads'], 'thread')} on {hardware.get('cores')} cores"
    )


def facts(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What was measured, where and with which software, as names and values."""
    stamp, options, versions = summary["stamp"], summary["options"], summary["stamp"]["versions"]
    greedy = options["temperature"] == 0
    sampling = "greedy" if greedy else _sampling_text(options)
    prompts = counted(summary["prompts"], "prompt")
    categories = counted(len(summary["categories"]), "category", "categories")
    order = ", in the order of a stream" if summary["ordered"] else ""
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


def _sampling_text(options: Mapping[str, Any]) -> str:
    """How tokens were drawn; older runs were coupled, without top-p."""
    top_p = f", top-p {options['top_p']:g}" if options.get("top_p", 1) < 1 else ""
    return (
        f"temperature {options['temperature']:g}{top_p}, {options.get('sampling', 'coupled')}, seed {options['seed']}"
    )


def counted(number: int, name: str, plural: str = "") -> str:
    """A number with its noun: ``1 prompt``, ``2 prompts``."""
    return f"{number} {name if number == 1 else plural or name + 's'}"


def notes(summary: Mapping[str, Any]) -> list[str]:
    """Notes on the figures: missing measurements, differing outputs, failures."""
    return [
        *_unfinished(summary),
        *_skipped(summary["skipped"]),
        *_differing(summary["candidates"]),
        *_failed(summary),
        *_llama_cpp(summary["llama_cpp"]),
    ]


def _unfinished(summary: Mapping[str, Any]) -> list[str]:
    measured, expected = summary["measured"], summary["expected"]
    if measured >= expected:
        return []
    return [f"The run is not finished: {measured} of {expected} outputs are measured. Continue it with --resume."]


def _skipped(skipped: Sequence[Mapping[str, Any]]) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for prompt in skipped:
        reasons.setdefault(str(prompt["reason"]), []).append(str(prompt["key"]))
    return [f"{counted(len(keys), 'prompt')} skipped ({_named(keys)}): {reason}" for reason, keys in reasons.items()]


def _differing(candidates: Mapping[str, Any]) -> list[str]:
    return [
        f"The output of {name} differs from plain decoding in {each['overall']['differing']} of "
        f"{each['overall']['compared']} cases."
        for name, each in candidates.items()
        if each["overall"]["differing"]
    ]


def _failed(summary: Mapping[str, Any]) -> list[str]:
    said = []
    for name, candidate in summary["candidates"].items():
        why, figures = "; ".join(candidate["errors"]), candidate["overall"]
        if name in summary["failures"]:
            said.append(f"{name} could not be set up: {why}")
        elif why:
            rest = (
                f"its figures cover the remaining {counted(figures['prompts'], 'prompt')}"
                if figures["prompts"]
                else "no prompt succeeded"
            )
            said.append(f"{name} failed {counted(figures['failures'], 'time')}; {rest}: {why}")
    return said


def _llama_cpp(build: Mapping[str, Any] | None) -> list[str]:
    """Notes on llama.cpp, if it was measured."""
    if build is None:
        return []
    said = ["llama.cpp keeps its own copy of the weights in the same process, which is part of every peak memory."]
    if build["missing"]:
        said.append(
            f"llama.cpp was not built for this processor: its build lacks {', '.join(build['missing'])}, so it is "
            "slower than it could be. Build it on this machine: "
            "CMAKE_ARGS=-DGGML_NATIVE=ON pip install --no-binary llama-cpp-python llama-cpp-python"
        )
    return said


def _plain_text(summary: Mapping[str, Any]) -> str:
    """Speed of plain decoding, also relative to the peers."""
    speed = summary["candidates"][PLAIN]["overall"]["tokens_per_second"]
    said = ["not measured" if speed is None else f"{speed:.1f} tokens/s"]
    for name, each in summary["plain_over"].items():
        if each["speedup"] is not None:
            low, high = each["speedup_interval"]
            said.append(f"{each['speedup']:.2f}× ({low:.2f} to {high:.2f}) as fast as {name}")
    return "; ".join(said)


def _named(keys: Sequence[str]) -> str:
    return ", ".join(keys[:_MOST_NAMED]) + (f" and {len(keys) - _MOST_NAMED} more" if len(keys) > _MOST_NAMED else "")
