"""The laboratory's tests run under the settings of the library's, and measure nothing of the machine."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.suite import auto_that_drafts, cheap_collections, no_kept_profiles, set_up
from measured_runs import LATENCIES, measure

__all__ = ["auto_that_drafts", "cheap_collections", "no_kept_profiles"]

set_up()


@pytest.fixture(autouse=True, scope="session")
def _no_measuring_of_the_machine() -> Iterator[None]:
    """Copies are small, and runs take given latencies."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("selfspec.measuring.bandwidth.CPU_COPY_BYTES", 2**16)
        patch.setattr("selfspec_lab.bench.run.runner.kept_profile", lambda *_: {"latencies": LATENCIES.to_dict()})
        yield


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run with the standard options; tests only read it."""
    path = tmp_path_factory.mktemp("run") / "out"
    measure(path)
    return path
