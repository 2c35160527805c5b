"""Forecast time series with an LSTM and LBFGS, which calls the loss many times in each step."""

import sys

import torch
from torch import Tensor, nn

import samestep


def series(number: int, length: int = 80) -> tuple[Tensor, Tensor]:
    """Return sums of two waves (number, length, 1), and the values one step later."""
    rate, phase, height = torch.rand(3, number, 2, 1, dtype=torch.float64)
    waves = height * ((0.1 + 0.3 * rate) * torch.arange(length + 1) + 6.3 * phase).sin()
    values = waves.sum(dim=1)[:, :, None]
    return values[:, :-1], values[:, 1:]


class Forecast(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, width, batch_first=True, dtype=torch.float64)
        self.head = nn.Linear(width, 1, dtype=torch.float64)

    def forward(self, values: Tensor) -> Tensor:
        return values + self.head(self.lstm(values)[0])


def main() -> None:
    with samestep.open_run(*sys.argv[1:2], seed=0, resume=True) as run:
        train, held_out = series(90), series(30)
        model = run.place(Forecast())
        optimizer = torch.optim.LBFGS(
            model.parameters(), max_iter=10, line_search_fn="strong_wolfe"
        )
        mse = nn.functional.mse_loss
        for epoch in run.epochs(10, state={"model": model, "optimizer": optimizer}):
            for batch in run.batches(train, len(train[0])):  # all of it: LBFGS wants no noise
                values, following = batch.data

                def closure(values: Tensor = values, following: Tensor = following) -> Tensor:
                    optimizer.zero_grad()
                    loss = mse(model(values), following)
                    return run.backward(loss, model)  # over all ranks, so they decide alike

                run.log(loss=optimizer.step(closure))
            with torch.no_grad():
                for batch in run.validation(held_out, 30):
                    values, following = batch.data
                    run.log(loss=mse(model(values), following), as_before=mse(values, following))
            print(f"epoch {epoch + 1}  loss {run.means['loss']:.6f}")


if __name__ == "__main__":
    main()
