"""A GAN on points near eight places of a circle: two models with an optimizer each, in one loop.

Goodfellow et al. (2014), "Generative adversarial nets". Alone, under torchrun, srun or mpirun.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

import samestep

NOISE = 8


def network(num_inputs: int, num_outputs: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(num_inputs, 64), nn.LeakyReLU(0.2)),
        *(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, num_outputs)),
    )


def circle(num_points: int) -> Tensor:
    """Return points (num_points, 2), each near one of eight places."""
    angle = torch.randint(8, (num_points,)) * torch.pi / 4
    return torch.stack([angle.cos(), angle.sin()], dim=1) + 0.05 * torch.randn(num_points, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a GAN on eight clouds of points.")
    parser.add_argument("run_dir", nargs="?")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--points", type=int, default=2000)
    parser.add_argument("--checkpoint-every-steps", type=int)
    args = parser.parse_args()
    with samestep.open_run(
        args.run_dir,
        seed=0,
        resume=True,
        log_every=10,
        checkpoint_every_steps=args.checkpoint_every_steps,
    ) as run:
        points = circle(args.points)
        g, d = run.place(network(NOISE, 2)), run.place(network(2, 1))
        g_opt = torch.optim.Adam(g.parameters(), lr=1e-3, betas=(0.5, 0.9))
        d_opt = torch.optim.Adam(d.parameters(), lr=1e-3, betas=(0.5, 0.9))
        state = {"g": g, "d": d, "g_opt": g_opt, "d_opt": d_opt}
        for epoch in run.epochs(args.epochs, state=state):
            for batch in run.batches(points, global_batch_size=100):
                real = batch.data
                # Noise that belongs to the sample, so it is the same on any number of ranks.
                fake = g(batch.normal(NOISE))
                d_loss = (softplus(-d(real)) + softplus(d(fake.detach()))).mean()
                d_opt.zero_grad()
                run.backward(d_loss, d)
                d_opt.step()

                g_loss = softplus(-d(g(batch.normal(NOISE)))).mean()
                g_opt.zero_grad()
                run.backward(g_loss, g)
                g_opt.step()
                run.log(loss=d_loss, g_loss=g_loss)
            radius = g(torch.randn(1000, NOISE, device=run.device)).norm(dim=1).mean()
            d_mean, g_mean = run.means["loss"], run.means["g_loss"]
            print(f"epoch {epoch + 1}  d {d_mean:.4f}  g {g_mean:.4f}  radius {radius:.3f}")


if __name__ == "__main__":
    main()
