"""Where the tests of Triton's kernels run: in its interpreter on the CPU, or, with TRITON_INTERPRET=0, on CUDA."""

import os

import torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""``tests/conftest.py`` sets it where it is not set, before Triton is imported."""

DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
"""Of what the kernels get."""
