"""Programs of papers' authors, in processes with what they need (``benchmarks/referee_swift.py``)."""
