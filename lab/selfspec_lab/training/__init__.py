"""Training of models of one's own."""
