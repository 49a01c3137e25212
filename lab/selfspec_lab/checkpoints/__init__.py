"""The bundled checkpoints, one folder each."""

from pathlib import Path

TINY = Path(__file__).with_name("tiny")
TINY_EARLY_EXIT = Path(__file__).with_name("tiny_early_exit")
TINY_MTP = Path(__file__).with_name("tiny_mtp")
