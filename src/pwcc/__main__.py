"""Run the command line: ``python -m pwcc``."""

import sys

from pwcc.cli import main

if __name__ == "__main__":
    sys.exit(main())
