"""How threads of a server wait for each other."""

import os
import subprocess
import sys

import pytest

from selfspec.serve.waits import brief_waits

READ = "import os; from selfspec.serve.waits import brief_waits; os.environ.update(brief_waits()); import torch"
"""``OMP_DISPLAY_ENV`` prints what OpenMP has read where torch is loaded."""


@pytest.mark.skipif(sys.platform != "linux", reason="the variable is that of GCC's OpenMP")
def test_threads_of_a_server_soon_sleep() -> None:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("GOMP_", "OMP_WAIT"))}
    command = [sys.executable, "-c", READ]
    environment = {**inherited, "OMP_DISPLAY_ENV": "verbose"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert "GOMP_SPINCOUNT = '2000'" in ran.stderr


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_what_the_environment_says_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "77")
    assert brief_waits() == {}
