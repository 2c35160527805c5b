"""A training loop of your own: on one rank, on several and resumed, it is the same training.

    python NAME.py runs/one                         # train; without a name, in a new folder
    torchrun --nproc_per_node=2 NAME.py runs/two    # the same training, shared by two processes
    samestep verify NAME.py                         # its first steps on 1, 2 and 3 ranks, compared
    samestep compare runs/one runs/two              # is it the same?

It trains at once, on data that it makes up. Change it from the top down. Ctrl-C stops it with a
checkpoint, and the same command continues, also on another number of ranks.
"""

import sys

import torch
from torch import Tensor, nn

import samestep

DATA_FILE = ""  # --- your data here --- such as "data.pt": torch.save((inputs, targets), "data.pt")
EPOCHS = 10
GLOBAL_BATCH_SIZE = 32  # samples per step over all ranks, however many there are
LR = 0.003


def make_data() -> tuple[Tensor, Tensor]:
    """Return inputs (samples, 8) and targets (samples, 1)."""
    if DATA_FILE:
        inputs, targets = torch.load(DATA_FILE)
        return inputs, targets
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(1200, 8, generator=generator)
    noise = 0.1 * torch.randn(1200, 1, generator=generator)
    return inputs, inputs[:, :1] * inputs[:, 1:2] + inputs[:, 2:3] + noise


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))


def main() -> None:
    path = sys.argv[1] if len(sys.argv) > 1 else None
    with samestep.open_run(path, seed=0, resume=True) as run:
        inputs, targets = make_data()
        train, held_out = (inputs[200:], targets[200:]), (inputs[:200], targets[:200])
        model = run.place(make_model())  # on this rank's device
        optimizer = torch.optim.Adam(model.parameters(), lr=LR)
        # `state` is what a checkpoint has to hold: models, optimizers, schedules.
        for epoch in run.epochs(EPOCHS, state={"model": model, "optimizer": optimizer}):
            for batch in run.batches(train, GLOBAL_BATCH_SIZE):  # this rank's share of each
                x, y = batch.data
                loss = nn.functional.mse_loss(model(x), y)  # a mean over these samples
                optimizer.zero_grad()
                run.backward(loss, model)  # adds up the gradients of all ranks
                optimizer.step()
                run.log(loss=loss)  # the exact mean over all ranks
            trained = run.means["loss"]
            with torch.no_grad():
                for batch in run.validation(held_out, 200):
                    x, y = batch.data
                    run.log(loss=nn.functional.mse_loss(model(x), y))
            # Only rank 0 prints on the screen.
            print(f"epoch {epoch + 1}  loss {trained:.4f}  held out {run.means['loss']:.4f}")


if __name__ == "__main__":
    main()
