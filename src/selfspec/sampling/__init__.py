"""Sampling and acceptance: pure functions of scores and random numbers."""
