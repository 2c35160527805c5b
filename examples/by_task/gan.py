"""A GAN on images, as DCGAN (Radford et al., 2016): two models with an optimizer each."""

import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

import samestep

NOISE, SIDE = 16, 8


def discs(number: int) -> Tensor:
    """Return images (number, 1, 8, 8) of a disc somewhere, from -1 to 1."""
    x, y = 2 + 3 * torch.rand(2, number, 1, 1)
    places = torch.arange(SIDE)
    far = (places - x).hypot(places[:, None] - y)
    return (4 - 2 * far).clamp(-1, 1)[:, None]


def generator() -> nn.Module:
    return nn.Sequential(
        *(nn.Unflatten(1, (NOISE, 1, 1)), nn.ConvTranspose2d(NOISE, 32, 4), nn.GroupNorm(4, 32)),
        *(nn.ReLU(), nn.ConvTranspose2d(32, 1, 4, stride=2, padding=1), nn.Tanh()),
    )


def discriminator() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 4, stride=2, padding=1), nn.LeakyReLU(0.2)),
        *(nn.Conv2d(16, 32, 4, stride=2, padding=1), nn.LeakyReLU(0.2)),
        *(nn.Flatten(), nn.Linear(32 * 2 * 2, 1)),
    )


def main() -> None:
    with samestep.open_run(*sys.argv[1:2], seed=0, resume=True) as run:
        images = discs(600)
        g, d = run.place(generator()), run.place(discriminator())
        g_opt, d_opt = (torch.optim.Adam(m.parameters(), 2e-3, betas=(0.5, 0.9)) for m in (g, d))
        for epoch in run.epochs(10, state={"g": g, "d": d, "g_opt": g_opt, "d_opt": d_opt}):
            for batch in run.batches(images, 40):
                fake = g(batch.normal(NOISE))
                d_loss = (softplus(-d(batch.data)) + softplus(d(fake.detach()))).mean()
                d_opt.zero_grad()
                run.backward(d_loss, d)
                d_opt.step()
                g_loss = softplus(-d(fake)).mean()
                g_opt.zero_grad()
                run.backward(g_loss, g)
                g_opt.step()
                run.log(loss=d_loss, g_loss=g_loss)
            made = g(torch.randn(1000, NOISE, device=run.device)).cpu()
            off = (made.mean(dim=0) - images.mean(dim=0)).abs().mean()
            print(f"epoch {epoch + 1}: the mean image is off by {off:.3f}")


if __name__ == "__main__":
    main()
