"""What `samestep profile` says of a real GPU: how much of a step it idles."""

import json

import pytest

from tests.command_line import typed

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("compiles", ["off", "on"])
def test_a_profile_says_how_much_of_a_step_the_gpu_idles(cuda, tmp_path, compiles):
    words = ("spiral", "--batch-size", "32", "--compile", compiles, "--seconds", "1", "--json")
    done = typed("-m", "samestep", "profile", *words, "--run-dir", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    measured = found["measured"]
    (rank,) = measured["ranks"]
    assert measured["device"] == cuda.type
    assert 0 < rank["operations"]["gpu_busy"] < 1.05 * measured["wall"]
    assert 0 <= measured["gpu_idle"] < 1
    if compiles == "off":
        assert measured["gpu_idle"] > 0.3, "an eager step of a model this small waits for the host"


def test_busy_steps_leave_the_gpu_no_idle_time(cuda, tmp_path):
    """Products of large matrices: a kernel that runs for milliseconds hides all the rest."""
    recipe = tmp_path / "large.py"
    recipe.write_text(
        "import torch\n"
        "from torch import nn\n"
        "from samestep import Recipe, Splits\n"
        "def data():\n"
        "    return Splits(train=(torch.randn(16384, 4096), torch.zeros(16384).long()))\n"
        "def model():\n"
        "    wide = [layer for _ in range(4) for layer in (nn.Linear(4096, 4096), nn.ReLU())]\n"
        "    return nn.Sequential(*wide, nn.Linear(4096, 2))\n"
        "recipe = Recipe(model=model, data=data, settings={'epochs': 9, 'batch_size': 4096})\n"
    )
    words = (str(recipe), "--seconds", "1", "--json", "--run-dir", str(tmp_path / "run"))
    done = typed("-m", "samestep", "profile", *words)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["measured"]["gpu_idle"] < 0.1
