"""Let frameworks that count devices themselves start on the ranks of a check.

Lightning takes one device of a CPU, and as many ranks as torchrun started only if it was asked for
as many devices: on the CPU, every rank would train on its own.
"""

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from samestep.checking.job import Job
from samestep.checking.watch.files import WhenImported
from samestep.script.patches import Patch, patched

_CONNECTORS = {
    "lightning.pytorch.trainer.connectors.accelerator_connector": "_AcceleratorConnector",
    "pytorch_lightning.trainer.connectors.accelerator_connector": "_AcceleratorConnector",
    "lightning.fabric.connector": "_Connector",
    "lightning_fabric.connector": "_Connector",
}


@contextmanager
def frameworks_adapted(job: Job) -> Iterator[None]:
    """Give Lightning's Trainer and Fabric the ranks that there are, once they are imported."""

    def around(original: Callable[..., Any], connector: Any, *args: Any, **given: Any) -> None:
        if given.get("devices") not in (1, "1", [0]) and not job.alone:
            given["devices"] = 1 if job.one_per_node else job.nproc
            given["num_nodes"] = job.nproc if job.one_per_node else 1
        if job.substitute and given.get("accelerator") in ("auto", "gpu", "cuda"):
            given["accelerator"] = "cpu"
        original(connector, *args, **given)

    def patch_of(name: str) -> Callable[[types.ModuleType], list[Patch]]:
        return lambda module: [(getattr(module, name), "__init__", around)]

    with contextlib.ExitStack() as stack:
        finder = WhenImported(
            {module: patch_of(name) for module, name in _CONNECTORS.items()},
            lambda patches: stack.enter_context(patched(*patches)),
        )
        finder.begin()
        stack.callback(sys.meta_path.remove, finder)
        yield
