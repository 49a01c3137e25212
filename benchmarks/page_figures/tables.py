"""Tables of results that no benchmark prints itself."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from gguf_sides.figures import LABELS, LLAMA, PLAIN
from page_figures.results import read
from serving.figures import summarise
from serving.pairs import figures_of_pairs

Results = Mapping[str, Any]
"""Results files by name, at least one."""

_SHORT = (
    "tokens_per_second",
    "sampled_tokens_per_second",
    "edit_tokens_per_second",
    "call_tokens_per_second",
    "busy_tokens_per_second",
    "prompt_tokens_per_second",
)


def grid(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def model_name(result: Mapping[str, Any]) -> str:
    """The model of a result, as pages write it."""
    options = result.get("options", result)
    return f"`{options['model']}`" + (f" ×{options['widen']}" if options.get("widen", 1) > 1 else "")


def gguf_in_short(results: Results) -> str:
    """The medians of a comparison with llama.cpp."""
    (result,) = results.values()
    names, found = result["candidates"], result["figures"]
    scales = {**dict.fromkeys(_SHORT, (1.0, 1)), "peak_bytes": (2**-20, 0), "first_token_seconds": (1.0, 1)}
    rows = []
    for figure, (scale, digits) in scales.items():
        if figure not in found:
            continue
        spreads = (found[figure].get(name) for name in names)
        cells = ("" if each is None else f"{each['median'] * scale:,.{digits}f}" for each in spreads)
        rows.append([LABELS[figure], *cells])
    return grid(["", *names], rows)


def gguf_types(results: Results) -> str:
    """Plain decoding beside llama.cpp, by the type of a file's weights."""
    columns = {"answers ÷ llama.cpp": "tokens_per_second", "prompts ÷ llama.cpp": "prompt_tokens_per_second"}
    return grid(
        ["type", *columns],
        (
            [name.rpartition("-")[2], *(f"{_to_llama(result, figure):.2f}" for figure in columns.values())]
            for name, result in results.items()
        ),
    )


def _to_llama(result: Mapping[str, Any], figure: str) -> float:
    ratio: float = result["figures"][figure][PLAIN]["to_llama_cpp"]["median"]
    return ratio


def activations(results: Results) -> str:
    """Rows of 8 bits and exact ones: speed and perplexity."""
    figures = {name: found for each in results.values() for name, found in each["figures"].items()}
    names = (PLAIN, "exact", LLAMA)
    rows = [
        [LABELS[figure], *(f"{figures[figure][name]['median']:.{digits}f}" for name in names)]
        for figure, digits in (("prompt_tokens_per_second", 0), *((f"rows_{count}", 2) for count in (2, 4, 8, 16)))
    ]
    found = [figures["perplexity"][name] for name in names]
    rows.append(["perplexity", *(f"{each['perplexity']:.3f}" for each in found)])
    ratios = (f"{each['ratio']:.4f} ± {each['standard_error']:.4f}" for each in found)
    rows.append(["÷ that of float32 weights", *ratios])
    return grid(["", "rows of 8 bits", "exact rows", LLAMA], rows)


def categories(results: Results) -> str:
    """Speed ÷ plain decoding by method and category of one run."""
    (result,) = results.values()
    drafts = {name: each["categories"] for name, each in result["candidates"].items() if each["kind"] == "method"}
    head = list(next(iter(drafts.values())))
    rows = ([f"`{name}`", *(f"{found[each]['speedup']:.2f}" for each in head)] for name, found in drafts.items())
    return grid(["", *(each.replace("_", " ") for each in head)], rows)


def candidates(results: Results) -> str:
    """Speed ÷ plain decoding, acceptance and tokens a round by method, and by suite where there are several."""
    rows = []
    for result in results.values():
        suite = [result["options"]["suite"].partition(":")[0]] if len(results) > 1 else []
        for name, each in result["candidates"].items():
            found = each["overall"]
            low, high = found["speedup_interval"]
            speed = f"{found['speedup']:.2f} ({low:.2f} to {high:.2f})"
            rates = _number(found["acceptance_rate"]), _number(found["mean_generated_length"])
            rows.append([*suite, f"`{name}`", speed, *rates])
    suites = ["suite"] if len(results) > 1 else []
    return grid([*suites, "method", "speed ÷ plain decoding (95 %)", "acceptance", "tokens a round"], rows)


def llama_bits(results: Results) -> str:
    """Steps at fewer bits ÷ the bfloat16 step of the same runtime, beside llama.cpp's."""
    kinds = next(iter(results.values()))["steps"]

    def cell(found: Mapping[str, float]) -> str:
        return f"{_range(found, 'ratio')}, {found['milliseconds']:.1f} ms"

    return _by_model("step", results, kinds, lambda result, kind: cell(result["steps"][kind]))


def draft_precisions(results: Results) -> str:
    """Acceptance, tokens a round and speed ÷ plain decoding of drafts at several precisions."""
    kinds = next(iter(results.values()))["drafts"]

    def cell(found: Mapping[str, Any]) -> str:
        low, high = found["speedup_spread"]
        figures = (_number(found["acceptance"]), f"{found['tokens_per_round']:.2f}", f"{found['speedup']:.2f}")
        return f"{', '.join(figures)} ({low:.2f} to {high:.2f})"

    return _by_model("drafts", results, kinds, lambda result, kind: cell(result["drafts"][kind]))


def overhead(results: Results) -> str:
    """Plain decoding beside llama.cpp, transformers and the speed of memory."""
    rows: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "tokens/s": lambda result: f"{result['plain']['tokens_per_second']:.0f}",
        "÷ llama.cpp": lambda result: _number((result["llama_cpp"] or {}).get("plain_speedup")),
        "÷ transformers' `generate`": lambda result: _number((result["transformers"] or {}).get("plain_speedup")),
        "÷ copy bandwidth": lambda result: f"{result['plain']['bandwidth_fraction']:.2f}",
    }
    return _by_model("plain decoding", results, rows, lambda result, row: rows[row](result))


def batches(results: Results) -> str:
    """Tokens a second of several prompts together: median, lowest and highest; and the ratio to plain decoding."""
    (result,) = results.values()
    found = result["batches"]
    sizes = list(next(iter(found.values())))

    def cell(each: Mapping[str, Any]) -> str:
        low, high = each["tokens_per_second_spread"]
        return f"{each['tokens_per_second']:.0f} ({low:.0f} to {high:.0f})"

    def ratio(each: Mapping[str, Any]) -> str:
        low, high = each["over_plain_spread"]
        return f"{each['over_plain']:.2f} ({low:.2f} to {high:.2f})"

    plain = next(iter(found))
    rows = [[f"`{name}`", *(cell(each[size]) for size in sizes)] for name, each in found.items()]
    rows += [
        [f"`{name}` ÷ `{plain}`", *(ratio(each[size]) for size in sizes)]
        for name, each in found.items()
        if name != plain and "over_plain" in each[sizes[0]]
    ]
    return grid(["tokens/s", *(f"{size} prompts" if size != "1" else "1 prompt" for size in sizes)], rows)


def adversaries(results: Results) -> str:
    """Speed of ``auto`` ÷ plain decoding where known tokens mislead it."""
    (result,) = results.values()
    rows = []
    for name, found in result["adversaries"].items():
        low, high = min(found["ratios"]), max(found["ratios"])
        right = f"{found['accepted']:,} of {found['drafted']:,}"
        rows.append([name, right, f"{found['median']:.2f} ({low:.2f} to {high:.2f})"])
    return grid(["known tokens that are offered", "right of those drafted", "speed ÷ plain decoding"], rows)


def first_requests(results: Results) -> str:
    """Seconds of the first request of a process that knows nothing, beside later ones."""
    (result,) = results.values()
    rows = []
    for name, found in result["first"].items():
        seconds = (f"{statistics.median(found[each]):.2f}" for each in ("first", "later"))
        rows.append([name, *seconds, f"{found['ratio']:.2f}"])
    rows.append(["median", "", "", f"{statistics.median(each['ratio'] for each in result['first'].values()):.2f}"])
    return grid(["chat", "first request, s", "the same later, s", "÷"], rows)


def host_time(results: Results) -> str:
    """Milliseconds of the host between native calls, by method."""
    (result,) = results.values()
    rows = []
    for name, kinds in result["host"].items():
        gaps = (f"{kind} {found['median_ms']:.3f}" for kind, found in kinds.items() if kind != "forward")
        rows.append([f"`{name}`", ", ".join(gaps), f"{kinds['forward']['median_ms']:.2f}"])
    return grid(["method", "between calls, ms", "a forward, ms"], rows)


def device_speeds(results: Results) -> str:
    """Tokens a second on an accelerator: transformers, plain decoding and methods."""
    (result,) = results.values()
    found = {"transformers' `generate`": result["transformers"], "plain decoding": result["plain"]}
    found |= {f"`{name}`": each for name, each in result["methods"].items()}
    rows = []
    for name, each in found.items():
        low, high = each["tokens_per_second_spread"]
        ratio = each["tokens_per_second"] / result["plain"]["tokens_per_second"]
        texts = f"{each['identical_texts']} of {each['texts']}" if "texts" in each else ""
        rows.append([name, f"{each['tokens_per_second']:.0f} ({low:.0f} to {high:.0f})", f"{ratio:.2f}", texts])
    return grid([model_name(result), "tokens/s", "÷ plain decoding", "texts that are those of plain decoding"], rows)


def device_trial(results: Results) -> str:
    """Milliseconds of forwards by their rows, of each runtime that a trial found right, and of low-bit weights."""
    rows = []
    for result in results.values():
        trial = result["trial"]
        for each in (*trial["runtimes"], *trial["weights"].values()):
            if each["reason"] is None:
                times = (f"{1000 * seconds:.2f}" for seconds in each["seconds"].values())
                chosen = ", chosen" if each["name"] == result["runtime"] else ""
                rows.append([model_name(result), f"`{each['name']}`{chosen}", *times])
    counts = next(each["seconds"] for each in trial["runtimes"] if each["seconds"])
    return grid(["model", "runtime", *(f"{rows} rows, ms" if rows != "1" else "1 row, ms" for rows in counts)], rows)


def soak(results: Results) -> str:
    """What came of ten minutes of mixed clients."""
    (result,) = results.values()
    statuses = result["statuses"]
    errors = sum(count for status, count in statuses.items() if status.startswith("5"))
    rows = [
        ["requests", f"{result['requests']:,}, of which {statuses['200']:,} were answered by status 200"],
        ["wrong, mixed up or lost", str(sum(result["wrong"].values()))],
        ["status 5xx", str(errors)],
        ["status 429, for which clients try again", str(statuses.get("429", 0))],
        ["resident memory, from after the warm-up to the end", f"{result['memory_growth']:+.2%}".replace("%", " %")],
        ["requests left at the end", f"{sum(result['left'].values()):.0f}"],
    ]
    return grid(["", ""], rows)


def attacks(results: Results) -> str:
    """What attacks on a server do to other clients."""
    (result,) = results.values()
    samples = result["samples"]
    rows = []
    for what, figure in (("`/health` answers", "health"), ("a stream waits for a piece", "gap")):
        worst = max(samples, key=lambda sample: sample[figure])
        median = statistics.median(sample[figure] for sample in samples)
        rows.append([what, f"{1000 * median:.0f}", f"{1000 * worst[figure]:.0f} ({worst['attack']})"])
    return grid(["", f"median of {len(samples)} attacks, ms", "longest, ms"], rows)


def pairs(results: Results) -> str:
    """What one client of a server gets, as a share of what an engine without a server does."""
    rows = []
    for result in results.values():
        for method in dict.fromkeys(sample["method"] for sample in result["samples"]):
            found = figures_of_pairs([sample for sample in result["samples"] if sample["method"] == method])
            share = f"{found['ratio']:.3f} ({found['low']:.3f} to {found['high']:.3f})"
            later, client = f"{1000 * found['later']:+.1f}", f"{found['client']:.1%}".replace("%", " %")
            rows.append([model_name(result), f"`{method}`", share, later, client])
    head = [
        "model",
        "method",
        "tokens/s ÷ the engine's (95 %)",
        "first text, ms later",
        "client's processor time ÷ time",
    ]
    return grid(head, rows)


def conversation(results: Results) -> str:
    """How long the turns of a long conversation wait."""
    (result,) = results.values()
    kinds = [[each for each in result["samples"] if each["beside"] is beside] for beside in (False, True)]
    rows = []
    for number, _ in enumerate(kinds[0][0]["turns"]):
        alone, beside = ([each["turns"][number] for each in kind] for kind in kinds)
        firsts = [f"{max(turn['first'] for turn in turns):.2f}" for turns in (alone, beside)]
        gap = f"{1000 * max(turn['gap'] for turn in beside):.0f}"
        rows.append([f"turn {number + 1}", f"{alone[0]['prompt']:,}", f"{alone[0]['new']:,}", *firsts, gap])
    short = [[each["short"] for each in kind] for kind in kinds]
    firsts = [f"{max(turn['first'] for turn in turns):.2f}" for turns in short]
    rows.append(["a short chat", f"{short[0][0]['prompt']:,}", f"{short[0][0]['new']:,}", *firsts, ""])
    head = ["", "tokens of the prompt", "of them new", "first token, s", "beside a stream, s", "that stream waits, ms"]
    return grid(head, rows)


def load(results: Results) -> str:
    """The picture of what drafts bring as load rises, and its figures for one acceptance."""
    (result,) = results.values()
    chosen = {draft: by_acceptance["0.8"] for draft, by_acceptance in result["table"].items()}
    loads = [each["load"] for each in next(iter(chosen.values()))]
    names = {"known": "known tokens", "low-bit": f"drafts at {result['draft_bits']} bits"}
    rows = [[names[draft], *(f"{each['speedup']:.1f}" for each in found)] for draft, found in chosen.items()]
    points = {each["load"]: f"{each['speedup']:.1f}" for each in result.get("points", ())}
    rows.append(["measured", *(points.get(count, "") for count in loads)])
    picture = "![Expected speedup by the number of sequences, for known tokens and for low-bit drafts](load.svg)"
    return f"{picture}\n\n{grid(['sequences at once', *map(str, loads)], rows)}"


_SERVERS = {
    "selfspec:autoregressive": "one process, plain",
    "selfspec:auto": "one process, `auto`",
    "selfspec-ray:auto": "Ray, one replica, `auto`",
    "selfspec-ray-2:autoregressive": "Ray, two replicas, plain",
    "selfspec-ray-2:auto": "Ray, two replicas, `auto`",
}
_REPLICAS = {"one process": ("selfspec", 1), "two replicas": ("selfspec-ray-2", 2)}


def load_of_replicas(results: Results) -> str:
    """Tokens a second with and without Ray, and what drafts bring beside what is expected of as many sequences."""
    (run,) = results.values()
    speeds = {key: median for key, (median, _, _) in summarise(run["samples"], "tokens_per_second").items()}
    clients = sorted({count for _, count in speeds})
    plot = read("load-smollm2-bf16-cpu")["table"]["low-bit"]["0.8"]
    expected = {each["load"]: each["speedup"] for each in plot}
    rows = [
        [f"tokens/s: {name}", *(f"{speeds[key, count]:.0f}" for count in clients)] for key, name in _SERVERS.items()
    ]
    for name, (server, replicas) in _REPLICAS.items():
        found = [speeds[f"{server}:auto", count] / speeds[f"{server}:autoregressive", count] for count in clients]
        rows.append([f"`auto` ÷ plain: {name}", *(f"{each:.2f}" for each in found)])
        rows.append(["expected", *(f"{expected[max(1, count // replicas)]:.2f}" for count in clients)])
    return grid(["clients", *map(str, clients)], rows)


def _by_model(label: str, results: Results, kinds: Iterable[str], cell: Callable[[Mapping[str, Any], str], str]) -> str:
    """A row for each kind, a column for each model."""
    rows = ([kind, *(cell(result, kind) for result in results.values())] for kind in kinds)
    return grid([label, *map(model_name, results.values())], rows)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _range(found: Mapping[str, float], name: str) -> str:
    return f"{found[name]:.2f} ({found['lowest']:.2f} to {found['highest']:.2f})"
