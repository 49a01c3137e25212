"""Settings of the whole suite: one thread (tiny models gain nothing from more), reproducible property tests."""

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("selfspec", deadline=None, derandomize=True)
settings.load_profile("selfspec")
