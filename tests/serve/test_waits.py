"""How threads of a server wait for each other."""

import os
import subprocess
import sys

import pytest

READ = "import os; from selfspec.serve.waits import brief_waits; os.environ.update(brief_waits()); import torch"
"""``OMP_DISPLAY_ENV`` prints what OpenMP has read where torch is loaded."""


@pytest.mark.skipif(sys.platform != "linux", reason="the variable is that of GCC's OpenMP")
@pytest.mark.parametrize(("given", "expected"), [({}, "2000"), ({"GOMP_SPINCOUNT": "77"}, "77")])
def test_threads_of_a_server_soon_sleep_unless_the_environment_says_otherwise(
    given: dict[str, str], expected: str
) -> None:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("GOMP_", "OMP_WAIT"))}
    command = [sys.executable, "-c", READ]
    environment = {**inherited, **given, "OMP_DISPLAY_ENV": "verbose"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert f"GOMP_SPINCOUNT = '{expected}'" in ran.stderr
