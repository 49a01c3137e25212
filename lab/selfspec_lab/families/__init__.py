"""All decoder-only families of transformers, each as a tiny random model, and what holds for it."""
