"""Drafting inside transformers' own ``generate``."""
