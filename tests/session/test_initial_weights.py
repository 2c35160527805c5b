"""A training starts from the weights of a run or a file, and is a new one otherwise."""

import json
import signal

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torchmetrics import MaxMetric

from samestep.base.errors import UserError
from samestep.core.session.initial_weights import start_from
from samestep.launch.ranks.world import World
from tests import tiny
from tests.faults import Fault

STAYS = ("--lr", "1e-30", "--max-steps", "1", "--init-from")
"""A step that is too small to change a weight."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a recipe, and a run whose evaluated weights are averages."""
    made = tmp_path_factory.mktemp("initial")
    tiny.trained(tiny.write_recipe(made), made / "run", "--epochs", "1", "--ema", "0.9")
    return made


def weights_of(run):
    state = tiny.last_state(run)
    return {**state["model"], **state.get("ema", {})}


def test_on_any_ranks_and_with_any_strategy_the_first_step_starts_from_them(folder, tmp_path):
    hows = {"fsdp": ("--strategy", "fsdp"), "virtual": ("--virtual-ranks", "2")}
    words = [
        [folder / "tiny.py", "--run-dir", tmp_path / name, *STAYS, folder / "run", *more]
        for name, more in hows.items()
    ]
    tiny.train_all(words, on=2, folder=tmp_path)
    for name in hows:
        tiny.assert_close(weights_of(tmp_path / name), weights_of(folder / "run"), 0.0)
        (start,) = tiny.events(tmp_path / name, "start")
        assert start["init_from"]["sha256"] == tiny.read_index(folder / "run")["best"]["sha256"]
        assert tiny.last_state(tmp_path / name)["position"]["step"] == 1


def test_a_resume_reads_them_again_only_where_no_checkpoint_is_and_they_are_the_same(
    folder, refused, tmp_path
):
    recipe, file, run = str(folder / "tiny.py"), tmp_path / "weights.pt", tmp_path / "run"
    torch.save(weights_of(folder / "run"), file)
    flags, dead = ("--init-from", str(file)), Fault("after a step", signum=signal.SIGKILL)
    tiny.struck(folder / "tiny.py", run, dead, "--epochs", "1", *flags)
    other = {name: value + 1 for name, value in weights_of(folder / "run").items()}
    torch.save(other, file)
    assert "SHA-256" in refused("train", str(run), "--resume")
    torch.save(weights_of(folder / "run"), file)
    tiny.resumed(run, "--max-steps", "5")
    file.unlink()
    named = ("train", recipe, "--run-dir", str(run), "--resume", "--init-from", str(folder / "run"))
    assert "--init-from" in refused(*named)
    tiny.resumed(run, "--epochs", "1")
    torch.save(weights_of(folder / "run"), file)
    tiny.trained(folder / "tiny.py", tmp_path / "whole", "--epochs", "1", *flags)
    tiny.assert_close(weights_of(run), weights_of(tmp_path / "whole"), 0.0)


def network():
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(4, 3))
    layers[2].weight = layers[1].weight
    return layers


KINDS = {
    ".safetensors": save_file,
    ".pt": torch.save,
    ".pth": lambda weights, file: torch.save({"epoch": 3, "model_state_dict": weights}, file),
    ".ckpt": lambda weights, file: torch.save(
        {"state_dict": {f"model.{n}": v for n, v in weights.items()}, "loops": [1]}, file
    ),
    ".safetensors.index.json": lambda weights, file: (
        [save_file({n: v}, file.with_name(f"{n}.safetensors")) for n, v in weights.items()],
        file.write_text(json.dumps({"weight_map": {n: f"{n}.safetensors" for n in weights}})),
    ),
    ".bin": lambda weights, file: torch.save({f"module.{n}": v for n, v in weights.items()}, file),
}


@pytest.mark.parametrize("suffix", KINDS)
def test_weights_are_read_from_the_files_of_this_field(tmp_path, suffix):
    file, model = tmp_path / f"model{suffix}", network()
    given = {n: torch.full_like(v, 2.0) for n, v in model.state_dict().items()}
    del given["2.weight"]  # tied: files of Hugging Face hold it once
    KINDS[suffix](given, file)
    found = start_from(model, tmp_path if "s" in suffix else file, World(), strict=True)
    assert all(bool((value == 2.0).all()) for value in model.state_dict().values())
    assert (found.path, found.sha256 == tiny.sha256(file)) == (str(file), "json" not in suffix)


def test_what_does_not_fit_is_listed_and_without_strict_the_rest_is_loaded(tmp_path):
    file, model = tmp_path / "weights.pt", network()
    given = {"0.weight": torch.ones(4, 3), "0.bias": torch.ones(5), "head": torch.ones(1)}
    torch.save(given, file)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    named = r"1\.weight is missing; .*head is not in .*0\.bias has shape \(5,\).*--no-init-strict"
    with pytest.raises(UserError, match=named):
        start_from(model, file, World(), strict=True)
    assert len(start_from(model, file, World(), strict=False).left_out) == 6
    after = model.state_dict()
    assert bool((after["0.weight"] == 1.0).all())
    assert all(torch.equal(after[n], before[n]) for n in before if n != "0.weight")
    torch.save({"head": torch.ones(1)}, file)
    with pytest.raises(UserError, match="nothing in it fits"):
        start_from(model, file, World(), strict=False)


def test_the_best_value_of_the_training_before_is_not_that_of_the_new_one(tmp_path):
    before, after = (nn.ModuleDict({"net": nn.Linear(1, 1), "best": MaxMetric()}) for _ in "12")
    for model in (before, after):
        model["best"].persistent(True)
    before["best"].update(3.0)
    torch.save(before.state_dict(), tmp_path / "weights.pt")
    start_from(after, tmp_path / "weights.pt", World(), strict=True)
    assert torch.equal(after["net"].weight, before["net"].weight)
    assert after["best"].max_value < 3


class Runs:
    def __reduce__(self):
        return open, ("executed", "w")


def test_a_file_that_holds_no_weights_is_refused_and_none_of_its_code_is_run(
    folder, refused, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    torch.save({"model": Runs()}, "code.pt")
    torch.save([torch.ones(1)], "list.pt")
    (tmp_path / "torn.safetensors").write_bytes(b"torn")
    for name in ("code.pt", "list.pt", "torn.safetensors", "none.pt", "weights.npz", "."):
        assert name in refused("train", str(folder / "tiny.py"), "--run-dir", "r", *STAYS, name)
    assert not {"executed", "r"} & {one.name for one in tmp_path.iterdir()}
