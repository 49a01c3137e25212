"""``auto``: every round drafts what promises most tokens a second, and is never slower than plain decoding."""

from selfspec.methods.auto.method import Auto

__all__ = ["Auto"]
