"""The processes of ``benchmarks/gguf_files.py``: a runtime with a GGUF file, each in one of its own."""
