"""Writes a model as GGUF files by llama.cpp's own quantiser: ``python benchmarks/quantised_files.py --out FOLDER``.

They are what ``gguf_files.py`` measures: of each type in ``--types`` one file, NAME-xFACTOR-TYPE.gguf, all matrices of
that type. The model is ``tiny``, eight times as wide, if no other is named; its tokenizer goes with it.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from selfspec_lab.bench.gguf_names import check_writable
from selfspec_lab.bench.gguf_writer import write_gguf
from selfspec_lab.bench.llama_cpp import quantise_gguf
from selfspec_lab.widening import load_model

_MIXED = ("Q4_K", "Q5_K", "Q3_K")
"""Types that llama.cpp knows as mixtures alone, which are of one type where they are to be pure."""


def main() -> None:
    """Writes the files and prints their names and sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--widen", type=int, default=8)
    parser.add_argument("--types", default="Q4_0,Q8_0,Q4_K,Q6_K", metavar="A,B", help="BF16 is not quantised")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    model, tokenizer = load_model(options.model, dtype="bfloat16", device="cpu", widen=options.widen, unpack=True)
    check_writable(model, 1024)
    with tempfile.TemporaryDirectory(dir=options.out) as folder:
        plain = Path(folder) / "plain.gguf"
        write_gguf(model, plain, tokenizer)
        for kind in options.types.split(","):
            path = options.out / f"{options.model}-x{options.widen}-{kind}.gguf"
            quantise_gguf(plain, path, f"MOSTLY_{kind}{'_S' if kind in _MIXED else ''}")
            print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
