"""`python -m ngsgd.launcher` is the `ngsgd` command."""

import sys

from ngsgd.launcher.cli import main

sys.exit(main())
