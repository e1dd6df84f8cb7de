"""``python -m lean_laguna``: the command line, as ``torchrun -m lean_laguna`` needs it."""

import sys

from lean_laguna.cli.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
