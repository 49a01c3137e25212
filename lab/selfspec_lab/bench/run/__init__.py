"""``selfspec bench run``: every method and peer on every prompt of a suite, side by side."""
