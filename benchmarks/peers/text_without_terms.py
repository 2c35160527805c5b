"""The example of padded sentences without its `loss_terms`: what counting them costs."""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from padded_text import recipe as with_terms

recipe = replace(with_terms, loss_terms=None)
