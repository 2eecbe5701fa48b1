"""`python -m quire.cli` is `quire`."""

import sys

from quire.cli.program import main

if __name__ == "__main__":
    sys.exit(main())
