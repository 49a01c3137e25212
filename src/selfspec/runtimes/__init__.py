"""How the sublayers of a model run: eager, fused, compiled, native, as CUDA graphs."""
