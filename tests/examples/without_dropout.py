"""Run a program with dropout left out: `without_dropout.py FILE_OR_MODULE ARGUMENTS…`."""

import runpy
import sys

from torch import nn

nn.Dropout.forward = lambda _self, values: values
del sys.argv[0]
if sys.argv[0].endswith(".py"):
    runpy.run_path(sys.argv[0], run_name="__main__")
else:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
