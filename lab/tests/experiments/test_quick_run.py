"""All claims, measured a little: within 20 minutes on two cores."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from selfspec_lab.experiments import EXPERIMENTS

MOST_SECONDS = 20 * 60


@pytest.mark.slow
@pytest.mark.trained
def test_all_claims_are_measured_within_20_minutes(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "selfspec",
        "experiments",
        "run",
        "all",
        "--quick",
        "--dirty",
        "--out",
        str(tmp_path),
    ]
    subprocess.run(command, check=True, timeout=MOST_SECONDS)
    results = [json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8")) for name in EXPERIMENTS]
    assert all(any(check["test"] for check in result["checks"]) for result in results)
