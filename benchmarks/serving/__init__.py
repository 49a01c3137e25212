"""Clients and figures of ``benchmarks/serve.py``: load, soak and faults of an OpenAI-compatible server."""
