"""``auto``: every round drafts what promises most tokens a second."""

from selfspec.methods.auto.method import Auto

__all__ = ["Auto"]
