"""Python's garbage collector while modules are imported: a fifth of a start's processor time.

Torch's modules are 180,000 objects that stay, with Lightning's 430,000, and every full collection
looks at all that came so far. The command line puts collections off until a rank joins the others;
what is there by then is left alone for good, so that one in training looks only at what came after.
"""

import gc

_usual = gc.get_threshold()
_OF_A_START = (10_000, 1_000, 1_000)  # not never: a command that joins no others ends with these


def put_off() -> None:
    """Collect little until `take_up`."""
    gc.set_threshold(*_OF_A_START)


def take_up() -> None:
    """Collect as usual again, after `put_off`; without it, do nothing."""
    if gc.get_threshold() == _OF_A_START:
        gc.freeze()
        gc.set_threshold(*_usual)
