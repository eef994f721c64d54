"""``python -m conditioned_kernels``: the command line."""

from .cli import main

main()
