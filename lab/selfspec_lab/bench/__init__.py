"""Benchmarks: what is measured, how, and stamped with where it was measured."""
