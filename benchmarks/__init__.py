"""Runs of the benchmark suite (``conditioned_kernels.bench``) and their committed results; see the README."""
