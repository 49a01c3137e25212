"""A C++ compiler that keeps the object files it made, so that building all levels takes its time once a machine.

``CXX="python caching_compiler.py g++"``: an object is used again where compiler, options and sources are the same.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from selfspec.files import cache_folder


def key_of(command: list[str], source: Path) -> str:
    """A name of what an object file is made from: the compiler, the options, the source and the headers beside it."""
    version = subprocess.run([command[0], "--version"], check=True, capture_output=True).stdout
    files = b"".join(path.read_bytes() for path in (source, *sorted(source.parent.glob("*.h"))))
    return hashlib.sha256(version + repr(command).encode() + files).hexdigest()[:24]


def main(command: list[str]) -> int:
    """Runs the command, or copies what it gave before; returns its exit status."""
    if "-c" not in command or "-o" not in command:
        return subprocess.run(command, check=False).returncode
    place = command.index("-o")
    output, options = Path(command[place + 1]), command[:place] + command[place + 2 :]
    kept = cache_folder() / "test-objects" / key_of(options, Path(command[command.index("-c") + 1]))
    if not kept.exists():
        if status := subprocess.run(command, check=False).returncode:
            return status
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as folder:  # appears at once, for other workers
            Path(shutil.copy(output, folder)).replace(kept)
        return 0
    shutil.copy(kept, output)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
