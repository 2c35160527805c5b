"""What the fork server holds before it forks the first rank: see processes.py."""

import contextlib
import gc
import os

# As samestep's command line does before it imports torch: threads that spin take the cores from the
# other tests.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import lightning.pytorch  # noqa: F401
import matplotlib.backends.backend_agg
import matplotlib.backends.backend_svg
import matplotlib.figure  # noqa: F401 - each run of the spiral ends with a picture
import torch._dynamo  # DDP imports it when it is built: a second of each rank's
import torch.distributed

# Half a second of each rank that trains on graphs. On import it asks PyTorch for its configuration,
# which asks the CUDA driver; no process that is forked after that can use a GPU.
if torch.version.cuda is None:
    with contextlib.suppress(ImportError):
        import torch_geometric  # noqa: F401


# A rank's own full collection would look at these 400,000 objects and copy their pages: a quarter
# of a second, more than all else that a short test of two ranks takes.
gc.collect()
gc.freeze()
