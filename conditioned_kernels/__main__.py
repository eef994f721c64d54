"""``python -m conditioned_kernels`` and the command ``conditioned-kernels``."""

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line, or say which extra it needs."""
    try:
        from .cli import main as run
    except ModuleNotFoundError as missing:
        sys.exit(f"conditioned-kernels needs {missing.name}: pip install 'conditioned_kernels[cli]'")
    run()


if __name__ == "__main__":
    main()
