"""Run the command line with `python -m samestep`."""

import sys

from samestep.cli import main

sys.exit(main())
