"""Run the command line with `python -m samestep`."""

import sys

from samestep.base.startup import die_with_parent

die_with_parent()  # before the imports, which take seconds on a busy machine

from samestep.shell.cli import main  # noqa: E402

sys.exit(main())
