"""``mixed``: drafts with bits for each sublayer, as a knapsack over latency and divergence chooses them."""

from selfspec.methods.mixed.method import Mixed, MixedSettings

__all__ = ["Mixed", "MixedSettings"]
