"""The build hook of the wheel: puts the kernels for all levels of the processor's instructions into it.

``SELFSPEC_WHEEL_KERNELS`` says when:

- ``auto``, the default: in a checkout where there is a C++ compiler; else the wheel is pure Python, with a warning. A
  wheel made from a source distribution is pure Python, since who installs one has a compiler or wants none.
- ``always``: always; without a compiler the build fails.
- ``never``: never.

Kernels that a wheel does not carry are built at first use. Editable installs never carry them.
"""

import os
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

VARIABLE = "SELFSPEC_WHEEL_KERNELS"
CHOICES = ("auto", "always", "never")


class KernelHook(BuildHookInterface):  # type: ignore[type-arg]
    """Builds the kernels for the architecture of this machine, and marks the wheel as one for its platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before the wheel is put together."""
        choice = os.environ.get(VARIABLE, "auto")
        if choice not in CHOICES:
            raise ValueError(f"{VARIABLE} is '{choice}'; choose one of {', '.join(CHOICES)}")
        is_from_sdist = Path(self.root, "PKG-INFO").exists()
        if version == "editable" or choice == "never" or (choice == "auto" and is_from_sdist):
            return
        sys.path.insert(0, str(Path(self.root, "src")))
        from selfspec.runtimes.kernel_build import KernelBuildError, build, levels_of, library_name, machine

        self._folder = tempfile.TemporaryDirectory()
        libraries = {level: Path(self._folder.name, library_name(level)) for level in levels_of(machine())}
        try:
            self.app.display_info(f"building the kernels for {', '.join(level.name for level in libraries)}")
            with ThreadPoolExecutor(os.cpu_count()) as threads:  # which wait for compilers
                for _ in threads.map(build, libraries, libraries.values()):
                    pass
        except KernelBuildError as error:
            if choice == "always":
                raise
            self.app.display_warning(f"the wheel carries no kernels: {error}")
            return
        for library in libraries.values():
            build_data["force_include"][str(library)] = f"selfspec/runtimes/built/{library.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called by hatchling after the wheel has been written."""
        if hasattr(self, "_folder"):
            self._folder.cleanup()
