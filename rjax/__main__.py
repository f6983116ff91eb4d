"""`python -m rjax` is `rjax`."""

import sys

from rjax.cli import main

if __name__ == "__main__":
    sys.exit(main())
