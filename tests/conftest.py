"""Fixtures and settings of the library's tests. Helpers that a test imports by name are in ``helpers``."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported, and torch may import it

import pytest

from helpers.checkpoints import save_checkpoint
from helpers.suite import (
    auto_that_drafts,
    cheap_collections,
    no_kept_profiles,
    pytest_collection_modifyitems,
    set_up,
)

__all__ = ["auto_that_drafts", "cheap_collections", "no_kept_profiles", "pytest_collection_modifyitems"]

set_up()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny Llama model and its tokenizer, without a chat template. No test changes it."""
    return str(save_checkpoint(tmp_path_factory.mktemp("checkpoint")))
