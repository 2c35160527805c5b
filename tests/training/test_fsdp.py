"""FSDP is the same training as DDP and as one process, tried with real ranks."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from samestep import Recipe
from samestep.errors import UserError
from samestep.settings import Settings
from samestep.training.sharding import find_blocks
from tests import tiny
from tests.processes import free_port, run_ranks, samestep

pytestmark = pytest.mark.xdist_group("fsdp")

# Blocks that repeat, of which the ranks share out rows that they do not divide; 101 samples in
# batches of 12: no world size here divides the last batch of an epoch.
BLOCKS = """
import torch
from torch import nn
from samestep import Recipe, Splits

class Block(nn.Module):
    checkpoint_activations = True

    def __init__(self):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(7), nn.Linear(7, 9)
        self.drop, self.outer = nn.Dropout(DROPOUT), nn.Linear(9, 7)

    def forward(self, x):
        return x + self.outer(self.drop(torch.tanh(self.inner(self.norm(x)))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 7)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.norm = nn.BatchNorm1d(7) if BATCHNORM else nn.LayerNorm(7)
        self.last = nn.Linear(7, 2)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(self.norm(x))

def model():
    made = Net()
    if FROZEN:
        made.blocks[1].inner.requires_grad_(False)
        made.first.weight.requires_grad_(False)
    return made

def data():
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(150, 8, generator=generator, dtype=torch.float64)
    y = (x[:, 0] * x[:, 1] > 0).long()
    return Splits(train=(x[:101], y[:101]), validation=(x[101:128], y[101:128]),
                  test=(x[128:], y[128:]))

recipe = Recipe(model=model, data=data, SHARD settings={
    "epochs": 2, "batch_size": 12, "lr": 0.01, "precision": "fp64", "log_every": 1,
    "pictures": False,
})
"""


def write_blocks(
    folder: Path,
    *,
    shard: str = "shard=(Block,),",
    dropout: float = 0.0,
    frozen: bool = False,
    batchnorm: bool = False,
) -> Path:
    text = BLOCKS.replace("SHARD", shard).replace("DROPOUT", str(dropout))
    text = text.replace("FROZEN", str(frozen)).replace("BATCHNORM", str(batchnorm))
    return tiny.write_recipe(folder, text, "blocks.py")


FSDP = ("--strategy", "fsdp")

HOW = {
    "adam": (),
    "sgd": ("--optimizer", "sgd", "--momentum", "0.9", "--lr", "0.1"),
    "clipped, averaged, accumulated": (
        *("--optimizer", "adamw", "--weight-decay", "0.1", "--clip-norm", "0.3", "--ema", "0.9"),
        *("--micro-batch-size", "2"),
    ),
    "kept gathered, recomputed": ("--no-reshard-after-forward", "--checkpoint-activations"),
}


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_fsdp_takes_the_steps_of_one_process(tmp_path, world_size):
    recipe = write_blocks(tmp_path)
    trainings = []
    for number, flags in enumerate(HOW.values()):
        own = ("--no-reshard-after-forward",)
        alone = tuple(flag for flag in flags if flag not in own)
        tiny.trained(recipe, tmp_path / f"one-{number}", *alone)
        trainings.append([recipe, "--run-dir", tmp_path / f"all-{number}", *FSDP, *flags])
    tiny.train_all(trainings, on=world_size, folder=tmp_path)
    for number in range(len(HOW)):
        tiny.assert_same_training(tmp_path / f"all-{number}", tmp_path / f"one-{number}")


@pytest.mark.slow
@pytest.mark.xdist_group("compiled")
def test_compiled_block_by_block_it_takes_the_steps_of_one_process(tmp_path):
    recipe = write_blocks(tmp_path)
    tiny.trained(recipe, tmp_path / "one")
    tiny.trained(recipe, tmp_path / "all", *FSDP, "--compile", "on", on=2)
    tiny.assert_same_training(tmp_path / "all", tmp_path / "one")


def train_on_two_nodes(trainings: list[list[str]], ports: list[int]) -> None:
    """Train as rank 0 to 3 of two nodes with two ranks each."""
    rank = int(os.environ["RANK"])
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(rank % 2)}
    os.environ |= {"GROUP_WORLD_SIZE": "2", "GROUP_RANK": str(rank // 2)}
    tiny.train_one_by_one(trainings, ports)


def test_sharded_within_each_of_two_nodes_it_takes_the_steps_of_one_process(tmp_path):
    recipe = write_blocks(tmp_path)
    clipped = HOW["clipped, averaged, accumulated"]
    tiny.trained(recipe, tmp_path / "one", *clipped)
    words = [str(recipe), "--run-dir", str(tmp_path / "all"), *FSDP, "--shard-within", "node"]
    run_ranks(train_on_two_nodes, 4, tmp_path / "out", [[*words, *clipped]], [free_port()])
    tiny.assert_same_training(tmp_path / "all", tmp_path / "one")


ALIKE = {"dropout": {"dropout": 0.3}, "batchnorm": {"batchnorm": True}, "frozen": {"frozen": True}}


def test_what_each_rank_computes_of_its_own_is_the_same_as_with_ddp(tmp_path):
    trainings = []
    for name, how in ALIKE.items():
        (tmp_path / name).mkdir()
        recipe = write_blocks(tmp_path / name, shard="", **how)
        # A share of one sample has no variance. Adam divides by gradients that are 0 but for
        # rounding: those of a bias before BatchNorm.
        words = [recipe, "--drop-last", *HOW["sgd"], "--run-dir"]
        trainings.append([*words, tmp_path / f"{name}-ddp"])
        trainings.append([*words, tmp_path / f"{name}-fsdp", *FSDP])
    tiny.train_all(trainings, on=3, folder=tmp_path)
    for name in ALIKE:
        tiny.assert_same_training(tmp_path / f"{name}-fsdp", tmp_path / f"{name}-ddp")


@pytest.mark.parametrize(
    ("before", "after"),
    [((2, FSDP), (3, FSDP)), ((3, FSDP), (2, ("--strategy", "ddp"))), ((2, ()), (3, FSDP))],
    ids=["fsdp to fsdp", "fsdp to ddp", "ddp to fsdp"],
)
def test_a_run_goes_on_with_another_strategy_on_another_number_of_ranks(tmp_path, before, after):
    recipe = write_blocks(tmp_path)
    flags = ("--optimizer", "adamw", "--ema", "0.9")
    tiny.trained(recipe, tmp_path / "one", *flags)
    run = tmp_path / "run"
    size, strategy = before
    tiny.trained(recipe, run, *flags, *strategy, "--epochs", "1", on=size)
    size, strategy = after
    tiny.resumed(run, "--epochs", "2", *strategy, on=size)
    tiny.assert_same_training(run, tmp_path / "one")


TIED = """
from dataclasses import replace

def tied():
    made = Net()
    made.blocks[0].outer.weight = made.blocks[2].outer.weight
    return made

recipe = replace(recipe, model=tied)
"""
ONE_NUMBER = """
from dataclasses import replace

def scaled():
    made = Net()
    made.scale = nn.Parameter(torch.ones(()))
    return made

recipe = replace(recipe, model=scaled)
"""
ABSENT = """
from dataclasses import replace

recipe = replace(recipe, shard=(nn.TransformerEncoderLayer,))
"""
REFUSED = {
    "tied": (TIED, (), ("blocks.0.outer.weight", "blocks.2.outer.weight")),
    "one number": (ONE_NUMBER, (), ("scale",)),
    "absent": (ABSENT, (), ("TransformerEncoderLayer", "Block")),
    "offload": ("", ("--cpu-offload",), ("--cpu-offload",)),
    "virtual": ("", ("--virtual-ranks", "2"), ("--virtual-ranks",)),
    "lightning": ("", ("--engine", "lightning"), ("--engine lightning",)),
    "gathered": ("", ("--gather-dtype", "bf16"), ("--gather-dtype bf16", "--precision")),
    "fp16": ("", ("--precision", "fp16"), ("--precision fp16",)),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_fsdp_cannot_train_is_refused_by_name(tmp_path, what):
    more, flags, named = REFUSED[what]
    recipe = write_blocks(tmp_path)
    recipe.write_text(recipe.read_text() + more)
    words = ("train", str(recipe), "--run-dir", str(tmp_path / "run"), *FSDP, *flags)
    ranks = samestep(*words, world_size=2, folder=tmp_path / "out")
    assert ranks.wait() == [2, 2], ranks.output()
    shown = ranks.printed(0)
    assert all(name in shown for name in named), shown
    assert "Traceback" not in shown
    assert not (tmp_path / "run").exists()


def test_what_is_no_class_of_a_block_is_refused_at_once():
    for given in (("Block",), nn.Linear, (torch.Tensor,)):
        with pytest.raises(UserError, match="shard"):
            Recipe(model=list, data=list, shard=given)


def test_settings_of_fsdp_without_it_are_refused():
    for how in (
        {"shard_within": "node"},
        {"cpu_offload": True},
        {"reshard_after_forward": False},
        {"gather_dtype": "bf16", "precision": "bf16"},
    ):
        with pytest.raises(UserError, match="--strategy ddp"):
            Settings(**how)


def test_blocks_are_those_of_the_classes_or_repeated_ones_and_large_layers_of_sequences():
    inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    other = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    model = nn.Sequential(nn.Linear(8, 8), nn.ModuleList([inner, other]), nn.LayerNorm(4))
    assert find_blocks(model, ()) == [other, inner, model[0]]
    assert find_blocks(model, (nn.LayerNorm,)) == [model[2]]
    attention = nn.MultiheadAttention(8, 2)  # uses the weight of its layer without calling it
    assert find_blocks(nn.ModuleDict({"attention": attention}), ()) == []


LOOKS = """
from dataclasses import replace

class Scaled(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("offset", torch.rand(2), persistent=False)
        HOW

    def forward(self, x):
        return self.times * super().forward(x) + self.offset

def model():
    made = Scaled()
    made.last.weight = made.tied.weight if hasattr(made, "tied") else made.last.weight
    return made

recipe = replace(recipe, model=model)
"""
# How a constructor goes about its numbers, which ranks other than 0 do not have at first.
CONSTRUCTORS = {
    "draws": "self.times = 2.0",
    "reads": "self.times = float(self.first.weight.abs().mean())",
    "keeps": "self.times = torch.rand(1)",
    "ties": "self.times, self.tied = 2.0, nn.Linear(7, 2, bias=False)",
}


def test_the_model_begins_as_on_one_process_whatever_its_constructor_does(tmp_path):
    trainings = []
    for name, how in CONSTRUCTORS.items():
        (tmp_path / name).mkdir()
        recipe = write_blocks(tmp_path / name)
        recipe.write_text(recipe.read_text() + LOOKS.replace("HOW", how))
        tiny.trained(recipe, tmp_path / f"{name}-one")
        trainings.append([recipe, "--run-dir", tmp_path / f"{name}-all", *FSDP])
    tiny.train_all(trainings, on=3, folder=tmp_path)
    for name in CONSTRUCTORS:
        tiny.assert_same_training(tmp_path / f"{name}-all", tmp_path / f"{name}-one")


def test_other_ranks_build_no_numbers(tmp_path):
    recipe = write_blocks(tmp_path)
    more = """
from dataclasses import replace

def model():
    made = Net()
    with open(f"{__file__}.{os.environ.get('RANK', '0')}", "w") as file:
        file.write(made.first.weight.device.type)
    return made

recipe = replace(recipe, model=model)
"""
    recipe.write_text("import os\n" + recipe.read_text() + more)
    tiny.trained(recipe, tmp_path / "run", *FSDP, "--epochs", "1", on=2)
    assert [recipe.with_name(f"blocks.py.{r}").read_text() for r in (0, 1)] == ["cpu", "meta"]


OWN = {
    "forward of two calls": """
def forward(model, batch):  # calls parts of the model, and not the model itself
    hidden = model.first(batch[0])
    for block in model.blocks:
        hidden = block(hidden)
    return model.last(model.norm(hidden))

recipe = replace(recipe, forward=forward, loss=lambda outputs, batch: mean(outputs, batch[1]),
                 metrics={})
""",
    "terms": """
def terms(batch):
    return (1 + batch[1]).sum()

def weighted(outputs, targets):
    each = nn.functional.cross_entropy(outputs, targets, reduction="none")
    return (each * (1 + targets)).sum() / (1 + targets).sum()

recipe = replace(recipe, loss=weighted, loss_terms=terms)
""",
    "loss over the batch": """
def spread(outputs, targets):
    return mean(outputs, targets) + torch.cdist(outputs, outputs).pow(2).mean()

recipe = replace(recipe, loss=spread, loss_over="batch")
""",
    "optimizer": """
def optimizer(model, settings):
    groups = [{"params": model.blocks.parameters()},
              {"params": [p for n, p in model.named_parameters() if "blocks" not in n], "lr": 0.1}]
    return torch.optim.SGD(groups, lr=settings.lr, momentum=0.9, nesterov=True)

recipe = replace(recipe, optimizer=optimizer)
""",
    "read one by one": """
class Rows(torch.utils.data.Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y
    def __len__(self):
        return len(self.x)
    def __getitem__(self, index):
        return self.x[index], int(self.y[index])

def rows():
    splits = data()
    return Splits(train=Rows(*splits.train), validation=Rows(*[t[:1] for t in splits.validation]))

recipe = replace(recipe, data=rows)
""",
}
_BEFORE = """
from dataclasses import replace
mean = nn.functional.cross_entropy
"""


@pytest.mark.parametrize("micro", [(), ("--micro-batch-size", "2")], ids=["whole", "micro-steps"])
def test_recipes_with_parts_of_their_own_are_trained_as_on_one_process(tmp_path, micro):
    trainings = []
    for name, text in OWN.items():
        (tmp_path / name).mkdir()
        recipe = write_blocks(tmp_path / name)
        recipe.write_text(recipe.read_text() + _BEFORE + text)
        tiny.trained(recipe, tmp_path / f"{name} one", *micro)
        trainings.append([recipe, "--run-dir", tmp_path / f"{name} all", *FSDP, *micro])
    tiny.train_all(trainings, on=3, folder=tmp_path)
    for name in OWN:
        tiny.assert_same_training(tmp_path / f"{name} all", tmp_path / f"{name} one")


def test_in_bf16_it_computes_what_ddp_computes(tmp_path):
    recipe = write_blocks(tmp_path)
    flags = ("--precision", "bf16", *HOW["sgd"])
    trainings = [
        [recipe, "--run-dir", tmp_path / strategy, "--strategy", strategy, *flags]
        for strategy in ("ddp", "fsdp")
    ]
    tiny.train_all(trainings, on=2, folder=tmp_path)
    tiny.assert_same_training(tmp_path / "fsdp", tmp_path / "ddp", tolerance=1e-6)


IN_BF16 = """
from dataclasses import replace

class Looking(Block):
    def forward(self, x):
        assert self.norm.weight.dtype == self.inner.weight.dtype == torch.bfloat16
        return super().forward(x)

def looking():
    made = Net()
    made.blocks[1].__class__ = Looking  # a new one would draw other weights
    return made

recipe = replace(recipe, model=looking)
"""


def test_gathered_in_bf16_it_trains_float32_weights_close_to_ddp_and_resumes_exactly(tmp_path):
    recipe = write_blocks(tmp_path)
    flags = ("--precision", "bf16", *HOW["sgd"])
    tiny.trained(recipe, tmp_path / "ddp", *flags, on=2)
    recipe.write_text(recipe.read_text() + IN_BF16)
    own = ("--gather-dtype", "bf16")
    once, twice = tmp_path / "once", tmp_path / "twice"
    tiny.trained(recipe, once, *flags, *FSDP, *own, on=2)
    tiny.trained(recipe, twice, *flags, *FSDP, *own, "--epochs", "1", on=2)
    tiny.resumed(twice, "--epochs", "2", on=2)
    tiny.assert_same_training(twice, once)
    tiny.assert_same_training(once, tmp_path / "ddp", tolerance=0.1)
    weights = tiny.last_state(once)["model"]
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    rounded = [torch.equal(w, w.bfloat16().float()) for w in weights.values()]
    assert not any(rounded)


STREAM = """
from dataclasses import replace

class Read(torch.utils.data.IterableDataset):
    def __init__(self, x, y):
        self.x, self.y = x, y
    def __iter__(self):
        return ((x, int(y)) for x, y in zip(self.x, self.y))

def read():  # the last step has one sample, so that two of three ranks have none
    splits = data()
    return Splits(train=Read(*[t[:97] for t in splits.train]), validation=splits.validation)

recipe = replace(recipe, data=read)
"""


def test_a_stream_ends_where_some_ranks_have_no_samples_left(tmp_path):
    recipe = write_blocks(tmp_path)
    recipe.write_text(recipe.read_text() + STREAM)
    flags = ("--micro-batch-size", "2")
    tiny.trained(recipe, tmp_path / "one", *flags)
    tiny.trained(recipe, tmp_path / "all", *flags, *FSDP, on=3)
    tiny.assert_same_training(tmp_path / "all", tmp_path / "one")
