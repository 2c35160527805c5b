"""Run the command line with `python -m samestep`."""

import sys

from samestep.ranks.startup import die_with_parent

die_with_parent()  # before the imports, which take seconds on a busy machine

from samestep.cli import main  # noqa: E402

sys.exit(main())
