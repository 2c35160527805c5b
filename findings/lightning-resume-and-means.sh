#!/usr/bin/env bash
# Lightning: other samples after a resume, means above their maximum, exit code 0 after SIGTERM.
#
# - With loader workers, the first epoch after a resume has the order of epoch 0: the order is drawn
#   before `set_epoch` is called (Lightning-AI/pytorch-lightning#21938). Without workers it is the
#   right one if the sampler has set_epoch, as DistributedSampler has.
# - A checkpoint within an epoch brings back the number of batches, not the place in the loader. The
#   resumed epoch takes as many batches as were left, but from the beginning.
# - At an epoch's end `self.log(..., sync_dist=True)` divides by the mean number of samples per
#   rank, rounded down. If ranks have different numbers of samples, the mean can be too large
#   (#21838).
# - By default, DistributedSampler gives some samples twice, so that all ranks have equally many.
#   The mean of a validation is then that of another set.
# - SIGTERM ends the script with exit code 0, as if it were done, and without a checkpoint: its own
#   exception is a SystemExit without a code. (In a Slurm job, Lightning can requeue instead.)
#
# Seen: lightning 2.6.6, torch 2.13.0 (CPU, Gloo).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 lightning==2.6.6
cat >"$folder/fit.py" <<'PYTHON'
import os
import signal
import sys

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Order(Sampler):
    """An order by epoch, drawn when an iteration begins, as DistributedSampler draws it."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 24

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(24, generator=generator).tolist())


class Module(pl.LightningModule):
    def __init__(self, stop=False):
        super().__init__()
        self.layer, self.seen, self.stop = nn.Linear(1, 1), [[], [], []], stop

    def training_step(self, batch, index):
        self.seen[self.current_epoch] += batch.tolist()
        if self.stop and index == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return self.layer(batch[:, None].float()).mean()

    def validation_step(self, batch, _):
        self.log("mean", batch.mean(), batch_size=len(batch), sync_dist=True, on_epoch=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.001)


def fit(workers, every=None, resume=None, stop=False):
    """Return the samples of each of three epochs of six steps."""
    saves = pl.callbacks.ModelCheckpoint(
        "out", filename="{step}", every_n_train_steps=every, save_top_k=-1
    )
    callbacks = {"callbacks": [saves]} if every else {"enable_checkpointing": False}
    module = Module(stop)
    loader = DataLoader(range(24), 4, sampler=Order(), num_workers=workers)
    pl.Trainer(max_epochs=3, **QUIET, **callbacks).fit(module, loader, ckpt_path=resume)
    return module.seen


def resumes():
    print("lightning", pl.__version__, "torch", torch.__version__, flush=True)
    for workers in (0, 2):
        whole = fit(workers, every=3)
        epoch = fit(workers, resume="out/step=6.ckpt")[1]
        like = [number for number in (0, 1) if epoch == whole[number]]
        print(f"{workers} workers, resumed after epoch 0: epoch 1 has the order of epoch {like[0]}")
        assert like == [0 if workers else 1]
        rest = fit(workers, resume="out/step=9.ckpt")[1]
        both = whole[1][:12] + rest
        never = 24 - len(set(both))
        print(f"{workers} workers, resumed in the middle of epoch 1: ", end="")
        print(f"{never} of its 24 samples twice, {never} never", flush=True)
        assert len(both) == 24 and rest == whole[0 if workers else 1][:12]


def means():
    rank = int(os.environ["RANK"])
    for name, samples, own, expected in (
        ("3 ones", [1.0] if rank else [1.0, 1.0], True, 1.5),
        ("10 zeros and a 1", [1.0] if rank else [0.0] * 10, True, 0.1),
        ("a 1 and 10 zeros, DistributedSampler", [1.0] + [0.0] * 10, False, 1 / 6),
    ):
        how = {"strategy": "ddp", "use_distributed_sampler": not own, "enable_checkpointing": False}
        trainer = pl.Trainer(devices=2, **how, **QUIET)
        (got,) = trainer.validate(Module(), DataLoader(samples, 5), verbose=False)
        if rank == 0:
            print(f"mean of {name}: {got['mean']:.4f}", flush=True)
        assert abs(got["mean"] - expected) < 1e-6
    trainer.strategy.barrier()
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "stop":
        fit(0, every=100, stop=True)
    else:
        {"resumes": resumes, "means": means}[sys.argv[1]]()
PYTHON
cd "$folder"
export PATH="$folder/venv/bin:$PATH" PYTHONWARNINGS=ignore
python fit.py resumes 2>/dev/null
torchrun --standalone --nproc-per-node 2 fit.py means 2>/dev/null
rm -r out
python fit.py stop 2>/dev/null # its exit code is 0, or `set -e` would end here
test ! -e out
echo "after SIGTERM: exit code 0, no checkpoint"
# lightning 2.6.6 torch 2.13.0+cpu
# 0 workers, resumed after epoch 0: epoch 1 has the order of epoch 1
# 0 workers, resumed in the middle of epoch 1: 12 of its 24 samples twice, 12 never
# 2 workers, resumed after epoch 0: epoch 1 has the order of epoch 0
# 2 workers, resumed in the middle of epoch 1: 6 of its 24 samples twice, 6 never
# mean of 3 ones: 1.5000
# mean of 10 zeros and a 1: 0.1000
# mean of a 1 and 10 zeros, DistributedSampler: 0.1667
# after SIGTERM: exit code 0, no checkpoint
