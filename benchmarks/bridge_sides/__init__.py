"""Engines with their own drafts and with those of a bridge, in processes of their own (``benchmarks/bridges.py``)."""
