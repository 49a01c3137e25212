"""Runs the kernels for AMX under Bochs, with the real instructions, and compares them with the emulation in C++.

See ``README.md`` beside this file for what it needs. Example:

    python tests/bochs/run.py --bochs bochs --kernel vmlinuz --bios BIOS-bochs-latest --vga-bios vgabios.bin
"""

import argparse
import gzip
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from selfspec.runtimes.kernel_build import _FLAGS, LEVELS, SOURCE

HERE = Path(__file__).parent
PROGRAMS = {"products": "tile_products.cpp", "forwards": "whole_forward.cpp"}
FLAGS = {level.name: level.flags for level in LEVELS}
TILES = '-DTILE_INSTRUCTIONS="tile_emulation.h"'

BOCHSRC = """
display_library: nogui
cpu: model=sapphire_rapids, ips=100000000, reset_on_triple_fault=0, exclude_features="cet,la57,pks,pku,uintr"
memory: guest=512, host=512
romimage: file={bios}
vgaromimage: file={vga_bios}
ata0-master: type=cdrom, path={folder}/boot.iso, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev={folder}/serial.txt
log: {folder}/bochs.log
clock: sync=none
"""
ISOLINUX = (
    "DEFAULT linux\nLABEL linux\n KERNEL /vmlinuz\n INITRD /initrd.gz\n APPEND console=ttyS0 quiet mitigations=off\n"
)


def compile_program(name: str, to: Path, *options: str) -> None:
    """Builds one of ``PROGRAMS``, static."""
    folder = HERE.parent / "runtimes"
    sources = ["-I", str(SOURCE.parent), "-I", str(folder), str(folder / PROGRAMS[name]), "-o", str(to)]
    subprocess.run(["g++", *_FLAGS, "-fopenmp", "-static", *options, *sources], check=True, stderr=subprocess.DEVNULL)


def write_iso(folder: Path, kernel: Path, isolinux: list[Path]) -> None:
    """Writes ``boot.iso``: the kernel, and the programs in its first file system."""
    root, disc = folder / "root", folder / "disc"
    (root / "dev").mkdir(parents=True)
    (disc / "isolinux").mkdir(parents=True)
    subprocess.run(["gcc", "-O1", "-static", str(HERE / "init.c"), "-o", str(root / "init")], check=True)
    for name in PROGRAMS:
        compile_program(name, root / name, *FLAGS["amx"])
    files = "\n".join(str(path.relative_to(root)) for path in sorted(root.rglob("*")))
    packed = subprocess.run(
        ["cpio", "-o", "-H", "newc", "--quiet"], cwd=root, input=files.encode(), check=True, capture_output=True
    )
    (disc / "initrd.gz").write_bytes(gzip.compress(packed.stdout, 1))
    (disc / "vmlinuz").write_bytes(kernel.read_bytes())
    (disc / "isolinux/isolinux.cfg").write_text(ISOLINUX)
    for path in isolinux:
        (disc / "isolinux" / path.name).write_bytes(path.read_bytes())
    boot = ["-b", "isolinux/isolinux.bin", "-c", "isolinux/boot.cat", "-no-emul-boot", "-boot-load-size", "4"]
    command = [
        "xorriso",
        "-as",
        "mkisofs",
        "-quiet",
        "-o",
        str(folder / "boot.iso"),
        *boot,
        "-boot-info-table",
        str(disc),
    ]
    subprocess.run(command, check=True)


def emulated(name: str, folder: Path) -> str:
    """What a program prints with the instructions emulated in C++, on this processor."""
    compile_program(name, folder / f"{name}-emulated", *FLAGS["avx512-bf16"], TILES)
    return subprocess.run([folder / f"{name}-emulated"], check=True, capture_output=True, text=True).stdout


def run_under_bochs(folder: Path, options: argparse.Namespace) -> str:
    """What the machine writes to its serial port until it switches itself off, or the time is over."""
    write_iso(folder, options.kernel, [options.isolinux, options.ldlinux])
    bios, vga_bios = options.bios.resolve(), options.vga_bios.resolve()
    (folder / "bochsrc").write_text(BOCHSRC.format(folder=folder, bios=bios, vga_bios=vga_bios))
    command = [str(options.bochs), "-q", "-f", str(folder / "bochsrc")]
    with suppress(subprocess.TimeoutExpired):  # what is missing is noticed below
        subprocess.run(command, timeout=options.seconds, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    return (folder / "serial.txt").read_text(errors="replace").replace("\r", "")


def differences(serial: str, folder: Path) -> Iterator[str]:
    """What is not as it should be in what the machine wrote."""
    for name in PROGRAMS:
        printed = re.search(f"^begin {name}\n(.*)^end {name} succeeded", serial, re.DOTALL | re.MULTILINE)
        if not printed:
            yield f"{name} did not succeed under Bochs"
        elif printed[1] != emulated(name, folder):
            yield f"{name}: the emulation in C++ gives other bits"
    if "side by side succeeded" not in serial:
        yield "side by side, the programs do not print what they print alone"


def main() -> None:
    """Builds, boots and compares; ends with an error where anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("bochs", "kernel", "bios", "vga-bios"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--isolinux", type=Path, default=Path("/usr/lib/ISOLINUX/isolinux.bin"))
    parser.add_argument("--ldlinux", type=Path, default=Path("/usr/lib/syslinux/modules/bios/ldlinux.c32"))
    parser.add_argument("--seconds", type=float, default=900)
    with tempfile.TemporaryDirectory() as folder:
        serial = run_under_bochs(Path(folder), parser.parse_args())
        if found := [*differences(serial, Path(folder))]:
            raise SystemExit("\n".join([serial[-2000:], *found]))
    sys.stdout.write("the instructions and their emulation in C++ give the same bits, alone and side by side\n")


if __name__ == "__main__":
    main()
