"""``mixed``: drafts with bits for each sublayer, chosen by a knapsack over latency and divergence."""
