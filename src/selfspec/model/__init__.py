"""The model as ``2L`` sublayers: what is computed."""
