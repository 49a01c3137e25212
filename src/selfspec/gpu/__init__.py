"""Triton kernels for accelerators: what torch does badly for 1 to 16 rows. Norms, rope and activations stay torch's."""
