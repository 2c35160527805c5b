"""With virtual ranks, state that nobody can share ends a run at its first steps, by its name."""

import pytest

from tests import tiny
from tests.command_line import refusal
from tests.training.odd_models import RECIPE

# Each of these trained without a word and had other weights on other numbers of ranks.
HIDDEN = {
    "a tensor in a plain attribute": (
        (
            "self.mean = 0.9 * getattr(self, 'mean', 0.0) + 0.1 * x.detach().mean(0)\n"
            "        out = out + self.mean.sum()"
        ),
        "the model's mean",
    ),
    "a tensor deep in a container": (
        (
            "self.kept = getattr(self, 'kept', {'a': [torch.zeros(8)]})\n"
            "        self.kept['a'][0] += x[0].detach()"
        ),
        "the model's kept",
    ),
    "a counter of forwards": ("self.n = getattr(self, 'n', 0) + 1", "the model's n"),
    "a counter of a part": ("self.head.n = getattr(self.head, 'n', 0) + 1", "the model's head.n"),
    "a generator": ("out = out + float(self.drawn.normal())", "the model's drawn"),
    "a generator of torch": (
        "out = out + torch.rand(1, generator=self.torchs)",
        "the model's torchs",
    ),
    "a list as memory bank": (
        "bank.append(out.detach().mean(0))\n        out = out - torch.stack(bank).mean(0)",
        "outside the model",
    ),
    # The fraction alone: float32 does not tell apart two times of a long uptime within 4 ms.
    "the clock": ("out = out * (1 + time.perf_counter() % 1)", "clock"),
}
OPTIMIZER = """
class Own(torch.optim.SGD):
    def __init__(self, *given, **more):
        super().__init__(*given, **more)
        self.speeds = {}

    @torch.no_grad()
    def step(self, closure=None):
        for weight in self.param_groups[0]["params"]:
            if weight.grad is not None:
                speed = self.speeds.setdefault(weight, torch.zeros_like(weight))
                weight.sub_(speed.mul_(0.9).add_(weight.grad), alpha=0.01)
"""
HARMLESS = """
        self.seen, self.shape = out.detach(), tuple(x.shape)
        self.cache = getattr(self, 'cache', None) or [torch.arange(8.0)]
        x.mul_(0.5)
"""


def with_forward(folder, lines, name="odd.py"):
    text = RECIPE.replace(
        "import torch, torchmetrics",
        "import os, time\nimport numpy as np\nimport torch, torchmetrics\nbank = []",
    )
    text = text.replace(
        "        self.kind, self.head",
        "        self.drawn = np.random.default_rng(0)\n"
        "        self.torchs = torch.Generator()\n        self.kind, self.head",
    ).replace(
        '        if self.kind == "counts":', f'        {lines}\n        if self.kind == "counts":'
    )
    return tiny.write_recipe(folder, text, name)


@pytest.mark.parametrize(("lines", "named"), HIDDEN.values(), ids=HIDDEN)
def test_state_outside_of_buffers_is_named_before_the_first_update(here, refused, lines, named):
    recipe = with_forward(
        here, f"if self.training:\n            {lines.replace(chr(10), chr(10) + '    ')}"
    )
    told = refused("train", str(recipe), "--run-dir", "run")
    assert named in told


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("renormed", "the model's parameter words.weight"),
        ("teacher", "the model's parameter teacher.weight"),
        ("most", "the model's buffer most is infinite"),
        ("synchronised", "the model's norm is a SyncBatchNorm"),
    ],
)
def test_what_a_forward_writes_and_nobody_can_put_together_is_named(here, refused, kind, named):
    recipe = tiny.write_recipe(here, RECIPE, "odd.py")
    assert named in refused("train", str(recipe), "--kind", kind, "--run-dir", "run")


def test_state_of_a_loss_or_an_optimizer_is_named(here, refused):
    recipe = with_forward(here, "pass")
    text = recipe.read_text()
    closure = (
        "def made():\n    kept = []\n    def loss(o, t):\n"
        "        kept.append(o.detach().mean())\n"
        "        return nn.functional.cross_entropy(o, t) * (1 + torch.stack(kept).mean())\n"
        "    return loss\n\nrecipe ="
    )
    recipe.write_text(
        text.replace("recipe =", closure).replace("loss=Scaled(False)", "loss=made()")
    )
    assert "the loss's kept" in refused("train", str(recipe), "--run-dir", "run")
    recipe.write_text(text.replace("Scaled(False)", "Scaled(True)"))
    assert "the loss's buffer scale" in refused("train", str(recipe), "--run-dir", "run2")
    own = "loss=Scaled(False), optimizer=lambda model, s: Own(model.parameters(), lr=s.lr)"
    changed = text.replace("loss=Scaled(False)", own).replace("recipe =", f"{OPTIMIZER}\nrecipe =")
    recipe.write_text(changed)
    assert "the optimizer's speeds" in refused("train", str(recipe), "--run-dir", "run3")


def test_a_loss_times_the_number_of_ranks_is_named_on_two_ranks(tmp_path):
    number = "int(os.environ['WORLD_SIZE'])"
    recipe = with_forward(tmp_path, f"out = out * {number} if self.training else out")
    words = ("train", str(recipe), "--run-dir", str(tmp_path / "run"))
    told = refusal(*words, world_size=2, folder=tmp_path / "output")
    assert "number of ranks" in told


def test_what_forward_only_writes_is_no_state_and_what_is_may_be_let_pass(here):
    tiny.trained(with_forward(here, HARMLESS.strip()), here / "run", "--max-steps", "3")
    recipe = with_forward(here, HIDDEN["a counter of forwards"][0])
    tiny.trained(recipe, here / "run2", "--max-steps", "3", "--no-self-check")
