"""The names of the phases of a training step, as runs record them and every report shows them."""

PHASES = ("data", "to_device", "forward", "backward", "all_reduce", "optimizer", "other")
"""In a step's order. `all_reduce` is the wait for other ranks that backward has not hidden."""
WHOLE = ("data", "to_device", "step", "other")
"""Where forward, backward and update are one graph, or one queue without events."""
WAITS = ("data", "to_device")
COMPUTE = ("forward", "backward", "optimizer", "step")
"""What a rank computes itself, of both kinds."""
IN_ORDER = (*PHASES[:-1], "step", "other")
"""Those of both kinds, as a table shows them."""
