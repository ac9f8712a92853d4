"""`python -m launcher` is the `ngsgd` command."""

import sys

from launcher.cli import main

sys.exit(main())
