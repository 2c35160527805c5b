"""`samestep explain`: what it tells is what the training then does, and it leaves no trace."""

import json
import shutil

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from samestep import read_records
from samestep.base.settings import Settings
from samestep.prove.explanation.rank_memory import whole_matrices
from tests import streams, tiny
from tests.command_line import tree

CASES = {
    "micro-steps, scaled": (
        1,
        "--micro-batch-size 3 --epochs 1 --lr-scaling linear --base-batch-size 4 --warmup-steps 3",
    ),
    "best kept": (1, "--epochs 3 --keep-top-k 1 --checkpoint-every-epochs 2 --eval-every-steps 5"),
    "cut short": (1, "--max-steps 15 --ema 0.9 --optimizer sgd --momentum 0.9 --drop-last"),
    "virtual ranks": (2, "--virtual-ranks 3 --micro-batch-size 2 --epochs 1 --schedule cosine"),
}


@pytest.fixture
def explained(output_of):
    return lambda *arguments: json.loads(output_of("explain", *arguments, "--json"))


@pytest.fixture
def shown(output_of):
    return lambda *arguments: " ".join(output_of("explain", *arguments).split())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of the tiny recipe's first epoch, to be copied or looked at."""
    folder = tmp_path_factory.mktemp("explain")
    tiny.trained(tiny.write_recipe(folder), folder / "run", "--epochs", "1")
    return folder / "run"


def bytes_of(tensors):
    return sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))


def assert_as_trained(told, run):
    """Compare what was told with the records and the checkpoints of the training itself."""
    records = list(read_records(run))
    start = [r for r in records if r["event"] == "start"][-1]
    assert told["plan"] == {name: start[name] for name in told["plan"]}
    assert told["memory"]["weights"]["elements"] == start["parameters"]
    assert told["evaluations"]["monitor"] == start["monitor"]
    rates = {r["step"]: r["lr"] for r in records if r["event"] == "step"}
    assert [rate["lr"] for rate in told["rates"]] == [rates[r["step"]] for r in told["rates"]]
    begin = told["goes_on"]["step"] if told["goes_on"] else 0
    since = [r for r in records if r.get("step", 0) > begin]
    saved = [(r["step"], r["path"]) for r in since if r["event"] == "checkpoint"]
    events = told["events"]
    assert [(e["step"], f"checkpoints/{e['saves']}") for e in events if e["saves"]] == saved
    evaluated = [r["step"] for r in since if r["event"] == "evaluation" and r["split"] != "test"]
    assert [e["step"] for e in events if e["evaluates"]] == evaluated
    files = list((run / "checkpoints").glob("*.pt"))
    assert told["kept"]["fewest"] <= len(files) <= told["kept"]["most"]
    state, memory = tiny.last_state(run), told["memory"]
    model = memory["weights"]["bytes"] + memory["buffers"]["bytes"]
    assert model == bytes_of(state["model"].values())
    kept = [v for own in state["optimizer"]["state"].values() for v in own.values()]
    assert sum(part["bytes"] for part in memory["optimizer"].values()) == bytes_of(kept)
    assert memory["average"]["bytes"] == bytes_of(state.get("ema", {}).values())
    real = (run / "checkpoints" / tiny.read_index(run)["last"]["path"]).stat().st_size
    assert told["checkpoint_bytes"] == pytest.approx(real, rel=0.03)


@pytest.mark.parametrize("case", CASES)
def test_what_is_told_is_what_is_trained(case, tmp_path, explained):
    ranks, flags = CASES[case]
    recipe, flags = tiny.write_recipe(tmp_path), flags.split()
    before = tree(tmp_path)
    told = explained(recipe, *flags, "--nproc", ranks)
    assert tree(tmp_path) == before
    tiny.trained(recipe, tmp_path / "run", *flags, on=ranks)
    assert_as_trained(told, tmp_path / "run")


def test_a_run_is_explained_as_it_goes_on_on_another_number_of_ranks(trained, tmp_path, explained):
    run = shutil.copytree(trained, tmp_path / "run")
    anew = explained(run, "--new")
    assert (anew["goes_on"], anew["events"][0]["step"]) == (None, 4)
    told = explained(run, "--max-steps", "30", "--epochs", "9", "--nproc", "2")
    assert tiny.files(run) == tiny.files(trained)
    assert told["plan"]["global_batch_size"] == 12
    assert (told["goes_on"]["step"], told["goes_on"]["ranks_before"]) == (tiny.STEPS_PER_EPOCH, 1)
    tiny.resumed(run, "--max-steps", "30", "--epochs", "9", on=2)
    assert_as_trained(told, run)


def test_the_text_tells_the_same_numbers_and_of_another_training_as_train(trained, shown, refused):
    text = shown(trained, "--max-steps", "30", "--epochs", "9", "--nproc", "2")
    assert f"from checkpoint_epoch_1.pt, step {tiny.STEPS_PER_EPOCH}; " in text
    assert f"{30 - tiny.STEPS_PER_EPOCH} steps are left" in text
    assert "30 steps (--max-steps)" in text
    cut = "--drop-last --optimizer sgd --micro-batch-size 4 --patience 2 --epochs 3"
    recipe = trained.parent / "tiny.py"
    text = shown(recipe, *cut.split(), "--num-workers", 1, "--eval-every", "1steps")
    assert "12 per step = 4 × 1 rank × 3 micro-steps" in text
    assert f"{131 % 12} samples per epoch" in text
    assert "2 evaluations without improvement" in text
    assert "after every step" in text
    for change in (("--lr", "0.5"), ("--batch-size", "24"), ("--seed", "1")):
        told = refused("explain", str(trained), *change)
        assert told == refused("train", str(trained), "--resume", *change)


def test_streams_have_no_length_and_what_differs_by_ranks_is_found(tmp_path, explained, shown):
    recipe = streams.write_recipe(tmp_path)
    told = explained(recipe, "--nproc", 2)
    unknown = ("num_samples", "steps_per_epoch", "total_steps")
    assert [told["plan"][name] for name in unknown] == [None] * 3
    assert told["events"] is None
    assert [share["samples"] for share in told["step"]["shares"]] == [6]
    assert told["memory"]["data"]["bytes"] == 0
    assert "at most 7 steps" in shown(recipe, "--max-steps", 7)
    plain = explained(tiny.write_recipe(tmp_path))["drawn"]
    assert (plain["batch_norms"], plain["draws"]) == ([], {})
    one, two = "(x[n:n + 37], y[n:n + 37])", "(x[n:n + 10], y[n:n + 10])"  # each is shared out
    several = tiny.RECIPE.replace(one, f'{{"a": {two}, "b": {two.replace("10", "11")}}}')
    told = explained(tiny.write_recipe(tmp_path, several), "--nproc", 3)
    assert told["evaluations"]["share"] == [6, 8]
    text = (RANDOM + tiny.RECIPE).replace("model=model", "model=noisy")
    recipe = tiny.write_recipe(tmp_path, text)
    drawn = explained(recipe)["drawn"]
    assert drawn["batch_norms"] == ["1"]
    assert drawn["draws"]
    assert all(part in shown(recipe) for part in ("batch normalisation (1)", "--virtual-ranks"))
    ways = (("--nproc", 2), ("--nproc", 2, "--virtual-ranks", 2), ())
    notes = [" ".join(explained(recipe, *way)["notes"]) for way in ways]
    assert ["BatchNorm" in note for note in notes] == [True, False, False]


def test_eight_gpus_on_two_nodes_are_explained_without_any_in_80_columns(explained, output_of):
    flags = "--nproc 4 --nodes 2 --device cuda --precision fp16"
    told = explained("spiral", *flags.split())
    ranks = told["ranks"]
    assert (told["device"], ranks["world_size"], ranks["num_nodes"]) == ("cuda", 8, 2)
    assert told["plan"]["global_batch_size"] == 32
    assert [other["ranks"] for other in told["others"]] == [1, 4, 8, 16]
    assert told["memory"]["optimizer"]["exp_avg"]["elements"] == 2834
    flags = "--nproc 3 --virtual-ranks 5 --keep-top-k 2 --ema 0.9"
    lines = output_of("explain", "spiral", "--batch-size", "120", *flags.split()).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines == [line.rstrip() for line in lines]


def test_activations_are_those_of_a_forward_and_gradients_of_virtual_ranks(tmp_path, explained):
    text = tiny.RECIPE.replace("def data(options):", "def data(options):\n    print('reading')")
    told = explained(tiny.write_recipe(tmp_path, text))  # what it prints is not in the object
    tanh, log_softmax, num_targets = 12 * 16 * 8, 12 * 2 * 8, 8
    assert told["memory"]["activations"]["bytes"] == tanh + log_softmax + num_targets
    assert told["memory"]["batch"]["bytes"] == 12 * 8 * 8 + 12 * 8
    assert told["memory"]["data"]["bytes"] == (131 + 37) * (8 * 8 + 8)
    recipe = tiny.write_recipe(tmp_path)
    copies = [
        explained(recipe, "--virtual-ranks", 4, "--nproc", ranks)["memory"]["gradients"]["copies"]
        for ranks in (1, 2, 4)
    ]
    assert copies == [3, 2, 1]


def test_muon_takes_the_operations_that_pytorch_counts_and_fsdp_gathers_its_matrices():
    matrices = [torch.nn.Parameter(torch.randn(shape)) for shape in ((64, 256), (300, 20))]
    taken = whole_matrices(torch.optim.Muon(matrices), Settings(strategy="fsdp"))
    with FlopCounterMode(display=False) as counted:
        for matrix in matrices:
            torch.optim._muon._zeropower_via_newtonschulz(matrix.data, (3.4, -4.7, 2.0), 5, 1e-7)
    assert taken.flops == counted.get_total_flops()
    assert taken.gathered_bytes == bytes_of(matrices)


RANDOM = """
from torch import nn
def noisy(options):
    return nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
"""


def test_a_model_for_a_gpu_is_explained_without_its_memory(tmp_path, explained, shown, refused):
    text = tiny.RECIPE.replace("time.sleep(seconds)", "raise RuntimeError('no kernel')  #")
    recipe = tiny.write_recipe(tmp_path, text)
    told = explained(recipe, "--device", "cuda")
    assert told["memory"] is None
    assert "no kernel" in told["not_measured"]
    assert told["plan"]["total_steps"] == tiny.STEPS
    assert "no kernel" in shown(recipe, "--device", "cuda")
    assert "no kernel" in refused("explain", str(recipe), "--device", "cpu")


@pytest.mark.parametrize("arguments", ["spirla", "mnist --data-dir nowhere"])
def test_a_mistake_is_told_as_train_tells_it(arguments, here, refused):
    words = arguments.split()
    assert refused("explain", *words) == refused("train", *words)
    assert tree(here) == set()
