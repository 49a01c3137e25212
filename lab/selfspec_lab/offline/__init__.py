"""Triton kernels compiled for named targets without a driver, and what their binaries say."""
