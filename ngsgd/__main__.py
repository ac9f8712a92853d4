"""`python -m ngsgd` is the `ngsgd` command."""

import sys

from ngsgd.launcher.cli import main

# tools that import every module run no command
if __name__ == "__main__":
    sys.exit(main())
