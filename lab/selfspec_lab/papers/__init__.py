"""The papers' headline tables: their figures, their machines, and the same tables measured here."""
