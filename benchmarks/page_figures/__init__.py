"""Figures on pages: what scripts write there, and which numbers nothing accounts for."""
