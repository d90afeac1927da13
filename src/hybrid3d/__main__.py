"""`python -m hybrid3d` is `hybrid3d`."""

import sys

from hybrid3d.cli import main

if __name__ == "__main__":
    sys.exit(main())
