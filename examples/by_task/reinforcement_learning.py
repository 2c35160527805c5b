"""REINFORCE with a learned baseline (Williams, 1992) balances a pole on a cart."""

import sys

import torch
from torch import Tensor, nn

import samestep

STEPS = 100
"""After which an episode ends well."""


def moved(state: Tensor, right: Tensor) -> Tensor:
    """Return where carts and poles (episodes, 4) are 0.02 s later (Barto et al., 1983)."""
    _, speed, angle, spin = state.T
    sine, cosine = angle.sin(), angle.cos()
    push = (torch.where(right, 10.0, -10.0) + 0.05 * spin.square() * sine) / 1.1
    turn = (9.8 * sine - cosine * push) / (2 / 3 - 0.05 * cosine.square() / 1.1)
    return state + 0.02 * torch.stack([speed, push - 0.05 * turn * cosine / 1.1, spin, turn], 1)


def played(policy: nn.Module, start: Tensor, draws: Tensor) -> tuple[Tensor, ...]:
    """Return states (episodes, steps, 4), actions and whether the pole stood (episodes, steps)."""
    state, stands, steps = start, start[:, 0] < 1, []
    for draw in draws.T:
        right = draw < policy(state)[:, 0].sigmoid()
        steps.append((state, right, stands))
        state = moved(state, right)
        stands = stands & (state[:, 0].abs() < 2.4) & (state[:, 2].abs() < 0.21)
    return tuple(torch.stack(column, dim=1) for column in zip(*steps, strict=True))


def main() -> None:
    with samestep.open_run(*sys.argv[1:2], seed=0, resume=True) as run:
        policy = run.place(nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1)))
        critic = run.place(nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1)))
        models = nn.ModuleList([policy, critic])
        optimizer = torch.optim.Adam(models.parameters(), lr=0.01)
        for epoch in run.epochs(8, state={"models": models, "optimizer": optimizer}):
            for batch in run.batches(torch.arange(240), 24):  # numbers of episodes
                with torch.no_grad():
                    start, draws = 0.1 * batch.uniform(4) - 0.05, batch.uniform(STEPS)
                    states, right, stands = played(policy, start, draws)
                still = stands.flip(1).cumsum(1).flip(1) / STEPS  # how long it stands from here on
                scores, guess = policy(states)[..., 0], critic(states)[..., 0]
                log_p = nn.functional.logsigmoid(torch.where(right, scores, -scores))
                of_policy = -log_p * (still - guess.detach())
                loss = ((of_policy + (still - guess).square()) * stands).sum(dim=1).mean()
                optimizer.zero_grad()
                run.backward(loss, models)
                optimizer.step()
                run.log(loss=loss, steps=stands.sum() / batch.rows)
            print(f"epoch {epoch + 1}: stands for {run.means['steps']:.1f} of {STEPS} steps")


if __name__ == "__main__":
    main()
