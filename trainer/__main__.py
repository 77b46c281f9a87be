"""`python -m shardwright train …`, the same as `shardwright train …`."""

import sys

from shardwright.scripts.main import main

if __name__ == "__main__":
    sys.exit(main())
