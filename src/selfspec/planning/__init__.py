"""What a round is expected to bring and to cost: pure numbers, which need neither a model nor torch."""
