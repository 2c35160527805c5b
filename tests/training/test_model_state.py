"""State of a model that changes its form is loaded as its module says, or refused in time."""

import pytest
import torch

from tests import tiny

GROWS = """
class Grows(nn.Linear):
    def __init__(self):
        super().__init__(8, 2)
        self.register_buffer("seen", torch.zeros(0))
        self.register_buffer("none", None)
        self.layers = nn.ModuleList()
        self.calls = 0
    LOADING
    def get_extra_state(self):
        return {"calls": self.calls}
    def set_extra_state(self, state):
        self.calls = state["calls"]
    def forward(self, x):
        if self.training:
            self.calls += 1
            FORWARD
        return super().forward(x) + self.seen.sum()
recipe = replace(recipe, model=lambda: Grows().double())
"""
GROWING = "self.seen = torch.cat([self.seen, self.seen.new_full((1,), 1e-3 * self.calls)])"
MAKES_ROOM = """
    def _load_from_state_dict(self, state, prefix, *others):
        self.seen = torch.zeros_like(state[prefix + "seen"])
        super()._load_from_state_dict(state, prefix, *others)
"""


def write(folder, forward: str, loading: str = "", **other: str):
    text = GROWS.replace("FORWARD", forward).replace("    LOADING", loading)
    for old, new in other.items():
        text = text.replace(old, new)
    imports = "from dataclasses import dataclass"
    return tiny.write_recipe(
        folder, tiny.RECIPE.replace(imports, f"{imports}, replace") + text, "grows.py"
    )


def test_a_buffer_for_which_its_module_makes_room_resumes_to_the_last_bit(tmp_path):
    recipe = write(tmp_path, GROWING, MAKES_ROOM)
    tiny.trained(recipe, tmp_path / "whole", "--max-steps", "13")
    tiny.trained(recipe, tmp_path / "stopped", "--max-steps", "9")
    tiny.resumed(tmp_path / "stopped", "--max-steps", "13")
    one, other = (tiny.last_state(tmp_path / name)["model"] for name in ("stopped", "whole"))
    assert (one["_extra_state"], len(one["seen"])) == ({"calls": 13}, 13)
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("forward", "other", "named"),
    [
        (GROWING, {}, "seen has shape (1,), the model (0,)"),
        (f"if self.calls == 2: {GROWING}", {}, "seen has shape (1,), the model (0,)"),
        ("self.none = x[:1].detach()", {}, "none is not in the model"),
        ("self.layers.append(nn.Linear(2, 2))", {}, "layers.0.weight is not in the model"),
        (
            "pass",
            {"self.calls = state": "self.kept = state"},
            "['_extra_state']['calls'] is 1, and 0",
        ),
    ],
    ids=[
        "grows",
        "grows in step 2",
        "begins as None",
        "gets layers",
        "extra state that is not restored",
    ],
)
def test_state_that_no_checkpoint_leads_back_to_is_named_after_the_step(
    tmp_path, refused, forward, other, named
):
    recipe = write(tmp_path, forward, **other)
    run = tmp_path / "run"
    told = refused("train", str(recipe), "--run-dir", str(run), "--checkpoint-every-steps", "1")
    assert named in told
    assert f"{recipe.name}:" in told
    assert len(list(run.rglob("*.pt"))) <= 1
