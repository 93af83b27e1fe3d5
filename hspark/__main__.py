"""`python -m hspark`."""

import sys

from hspark.cli import main

if __name__ == "__main__":
    sys.exit(main())
