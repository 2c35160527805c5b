"""FSDP is the same training as DDP and as one process, tried with real ranks."""

import os
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from samestep import Recipe
from samestep.base.errors import UserError
from samestep.base.settings import Settings
from samestep.core.learner.sharding import find_blocks, hold_order, shard
from samestep.launch.ranks.world import World
from tests import tiny
from tests.command_line import start
from tests.processes import free_port, run_ranks

pytestmark = pytest.mark.xdist_group("fsdp")
FREES = hasattr(FSDPModule, "reset_iter_state")  # after a forward that failed: since PyTorch 2.13

# Blocks that repeat, of which the ranks share out rows that they do not divide; 29 samples in
# batches of 12: no world size here divides the last batch of an epoch. The steps are few, for each
# takes a rank a tenth of a second.
BLOCKS = """
from dataclasses import replace
import torch
from torch import nn
from samestep import Recipe, Splits
class Block(nn.Module):
    checkpoint_activations = True
    def __init__(self):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(7), nn.Linear(7, 9)
        self.drop, self.outer = nn.Dropout(DROPOUT), nn.Linear(9, 7)
    def forward(self, x): return x + self.outer(self.drop(torch.tanh(self.inner(self.norm(x)))))
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 7)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.norm = nn.BatchNorm1d(7) if BATCHNORM else nn.LayerNorm(7)
        self.last, self.calls = nn.Linear(7, 2), 0
        self.register_buffer("drift", torch.zeros(7), persistent=False)
    def forward(self, x):
        x = self.first(x)
        assert not FREES or torch.is_grad_enabled() or not self.training  # a trial fails
        for block in self.blocks: x = block(x)
        return self.last(self.norm(x))
mean = nn.functional.cross_entropy
def model():
    made = Net()
    if FROZEN:
        made.blocks[1].inner.requires_grad_(False)
        made.first.weight.requires_grad_(False)
    return made
def data():
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(40, 8, generator=generator, dtype=torch.float64)
    y = (x[:, 0] * x[:, 1] > 0).long()
    return Splits(train=(x[:29], y[:29]), validation=(x[29:], y[29:]))
recipe = Recipe(model=model, data=data, SHARD settings={
    "epochs": 2, "batch_size": 12, "lr": 0.01, "precision": "fp64", "log_every": 1,
    "pictures": False,
})
"""

DRIFTS = """
        if self.training:
            self.calls, self.drift = self.calls + 1, self.drift + 0.01
        x = x + self.calls * self.drift"""


def write_blocks(
    folder: Path,
    *,
    shard: str = "shard=(Block,),",
    dropout: float = 0.0,
    frozen: bool = False,
    batchnorm: bool = False,
    drifts: bool = False,
) -> Path:
    text = re.sub("assert.*fails", DRIFTS, BLOCKS) if drifts else BLOCKS
    text = text.replace("SHARD", shard).replace("DROPOUT", str(dropout))
    text = text.replace("FREES", str(FREES)).replace("FROZEN", str(frozen))
    text = text.replace("BATCHNORM", str(batchnorm))
    return tiny.write_recipe(folder, text, "blocks.py")


FSDP = ("--strategy", "fsdp")
SGD = ("--optimizer", "sgd", "--momentum", "0.9", "--lr", "0.1")
CLIPPED = (
    *("--optimizer", "adamw", "--weight-decay", "0.1", "--clip-norm", "0.3", "--ema", "0.9"),
    *("--micro-batch-size", "2"),
)
# The flags of a training, and those that it has only with FSDP. Sharded as usual, with adam and
# without micro-steps, are those of two ranks below.
HOW = {
    "clipped, averaged, accumulated, recomputed, kept gathered": (
        (*CLIPPED, "--checkpoint-activations"),
        ("--no-reshard-after-forward",),
    ),
    "sharded within each node": (CLIPPED, ("--shard-within", "node")),
}


def train_on_two_nodes(trainings: list[list[str]], ports: list[int]) -> None:
    """Train as rank 0 to 3 of two nodes with two ranks each."""
    rank = int(os.environ["RANK"])
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(rank % 2)}
    os.environ |= {"GROUP_WORLD_SIZE": "2", "GROUP_RANK": str(rank // 2)}
    tiny.train_one_by_one(trainings, ports)


def test_fsdp_takes_the_steps_of_one_process(tmp_path):
    recipe, words = write_blocks(tmp_path), []
    for name, (flags, own) in HOW.items():
        train = ("--epochs", "1", *flags)
        tiny.trained(recipe, tmp_path / f"{name} one", *train)
        words.append([str(recipe), "--run-dir", str(tmp_path / f"{name} all"), *FSDP, *train, *own])
    ports = [free_port() for _ in words]
    run_ranks(train_on_two_nodes, 4, tmp_path / "out", words, ports)
    for name in HOW:
        tiny.assert_same_training(tmp_path / f"{name} all", tmp_path / f"{name} one")


@pytest.mark.slow
@pytest.mark.xdist_group("compiled")
def test_compiled_block_by_block_it_takes_the_steps_of_one_process(tmp_path):
    recipe = write_blocks(tmp_path)
    flags = ("--epochs", "1", "--drop-last")  # another size of batches would be compiled anew
    tiny.trained(recipe, tmp_path / "one", *flags)
    tiny.trained(recipe, tmp_path / "all", *flags, *FSDP, "--compile", "on", on=2)
    tiny.assert_same_training(tmp_path / "all", tmp_path / "one")


ALIKE = {name: {name: True} for name in ("batchnorm", "frozen", "drifts")}
ALIKE |= {"dropout": {"dropout": 0.3}}


@pytest.mark.slow
def test_what_each_rank_computes_of_its_own_is_the_same_as_with_ddp(tmp_path):
    trainings = []
    for name, how in ALIKE.items():
        (tmp_path / name).mkdir()
        recipe = write_blocks(tmp_path / name, shard="", **how)
        # A share of one sample has no variance. Adam divides by gradients that are 0 but for
        # rounding: those of a bias before BatchNorm.
        words = [recipe, "--drop-last", *SGD, "--run-dir"]
        trainings.append([*words, tmp_path / f"{name}-ddp"])
        trainings.append([*words, tmp_path / f"{name}-fsdp", *FSDP])
    tiny.train_all(trainings, on=2, folder=tmp_path)
    for name in ALIKE:
        tiny.assert_same_training(tmp_path / f"{name}-fsdp", tmp_path / f"{name}-ddp")
        (start,) = tiny.events(tmp_path / f"{name}-fsdp", "start")
        assert (name == "drifts") == any("persistent=True" in note for note in start["notes"])


@pytest.mark.slow
def test_a_run_goes_on_with_another_strategy_on_another_number_of_ranks(tmp_path):
    recipe, run = write_blocks(tmp_path), tmp_path / "run"
    flags = ("--optimizer", "adamw", "--ema", "0.9")
    tiny.trained(recipe, tmp_path / "one", *flags, "--epochs", "4")
    tiny.trained(recipe, run, *flags, "--epochs", "1")
    tiny.resumed(run, "--epochs", "2", *FSDP, on=2)
    tiny.resumed(run, "--epochs", "3", on=3)
    tiny.resumed(run, "--epochs", "4", "--strategy", "ddp", on=2)
    tiny.assert_same_training(run, tmp_path / "one")


TIED = """
def tied():
    made = Net()
    made.blocks[0].outer.weight = made.blocks[2].outer.weight
    return made
recipe = replace(recipe, model=tied)
"""
TIE = "made.blocks[0].outer.weight = made.blocks[2].outer.weight"
ONE_NUMBER = TIED.replace(TIE, "made.scale = nn.Parameter(torch.ones(()))")
MUON = """
def both(model, settings):
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    return [torch.optim.Muon(matrices, settings.lr), torch.optim.AdamW(others, settings.lr)]
recipe = replace(recipe, optimizer=both)
"""
PRODUCTS = """
class Halved(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            if p.ndim == 2:
                p.grad.bfloat16().T @ p.grad.bfloat16()
recipe = replace(recipe, optimizer=lambda model, settings: Halved(model.parameters()))
"""
PRODUCT = "p.grad.bfloat16().T @ p.grad.bfloat16()"
DRAWS = PRODUCTS.replace(PRODUCT, "torch.randn_like(p)")
SEEDS = PRODUCTS.replace(PRODUCT, "torch.randn(2, generator=torch.Generator())")
NOTES = PRODUCTS.replace(PRODUCT, 'self.state[p]["norm"] = p.detach().norm()')


def test_muon_takes_the_step_of_ddp_to_the_last_bit(tmp_path):
    recipe = write_blocks(tmp_path)
    recipe.write_text(recipe.read_text() + MUON)
    words = [str(recipe), "--max-steps", "2", "--run-dir"]
    trainings = [[*words, tmp_path / "ddp"], [*words, tmp_path / "fsdp", *FSDP]]
    tiny.train_all(trainings, on=2, folder=tmp_path)
    tiny.assert_same_training(tmp_path / "fsdp", tmp_path / "ddp")  # a norm is a sum over parts
    tiny.assert_close(*(tiny.last_state(tmp_path / of)["model"] for of in ("fsdp", "ddp")), 0.0)


def test_a_norm_that_an_optimizer_keeps_is_that_of_the_whole_weight_in_checkpoints(tmp_path):
    recipe, run = write_blocks(tmp_path), tmp_path / "run"
    recipe.write_text(recipe.read_text() + NOTES)
    tiny.trained(recipe, tmp_path / "one", "--max-steps", "6")
    tiny.trained(recipe, run, "--max-steps", "3", *FSDP, on=2)
    tiny.resumed(run, "--max-steps", "6", on=2)
    tiny.assert_same_training(run, tmp_path / "one")


HOOKED = """
def hooked(model): model.weight.register_hook(torch.neg); return model
recipe = replace(recipe, model=lambda: hooked(nn.Linear(8, 2)))
"""
WRITES = """
class Written(nn.Linear):
    def forward(self, x):
        self.weight.data.mul_(0.9)
        return super().forward(x)
recipe = replace(recipe, shard=(), model=lambda: Written(8, 2))
"""
WRITTEN = "writes the model's parameter weight" if FREES else "forward failed"
SPARSE = HOOKED.replace("model.weight.register_hook(torch.neg)", "model.sparse = True")
ABSENT = "recipe = replace(recipe, shard=(nn.TransformerEncoderLayer,))"
REFUSED = {
    "tied": (TIED, (), ("blocks.0.outer.weight", "blocks.2.outer.weight")),
    "hooks": (HOOKED, (), ("hooks: weight", "--strategy ddp")),
    "writes": (WRITES, (), (WRITTEN, "--strategy ddp")),
    "sparse": (SPARSE, (), ("dense gradients", "--strategy ddp")),
    "one number": (ONE_NUMBER, (), ("scale",)),
    "absent": (ABSENT, (), ("TransformerEncoderLayer", "Block")),
    "offload": ("", ("--cpu-offload",), ("--cpu-offload",)),
    "products": (PRODUCTS, (), ("Halved", "bfloat16", "--strategy ddp")),
    "draws": (DRAWS, (), ("Halved", "draws random numbers", "--strategy ddp")),
    "draws by itself": (SEEDS, (), ("Halved", "draws random numbers")),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_fsdp_cannot_train_is_refused_by_name(tmp_path, what):
    more, flags, named = REFUSED[what]
    recipe = write_blocks(tmp_path)
    recipe.write_text(recipe.read_text() + more)
    words = ("train", str(recipe), "--run-dir", str(tmp_path / "run"), *FSDP, *flags)
    ranks = start(*words, world_size=2, folder=tmp_path / "out")
    assert ranks.wait() == [2, 2], ranks.output()
    shown = ranks.printed(0)
    assert all(name in shown for name in named), shown
    assert "Traceback" not in shown
    assert (tmp_path / "run").exists() == what.startswith(("products", "writes", "draws"))


class Skips(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.skipped = nn.ModuleList(nn.Linear(2, 2) for _ in range(3)), None

    def forward(self, x):
        for number, block in enumerate(self.blocks):
            x = x if number == self.skipped else block(x)
        return x


@pytest.mark.parametrize(("skipped", "named"), [(0, "blocks.1"), (2, "blocks.2")])
def test_a_forward_in_training_that_leaves_out_a_block_is_refused(skipped, named):
    """On one rank alone it would gather this block where the others gather another."""
    model = Skips()
    hold_order(model, {model.get_submodule(f"blocks.{n}"): f"blocks.{n}" for n in range(3)})
    x = torch.ones(1, 2)
    for _ in range(2):
        model(x)
    model.skipped = skipped
    model.eval()(x)
    with pytest.raises(UserError, match=named):
        model.train()(x)


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ({"strategy": "fsdp", "virtual_ranks": 2}, "--virtual-ranks"),
        ({"strategy": "fsdp", "engine": "lightning"}, "--engine lightning"),
        ({"strategy": "fsdp", "precision": "fp16"}, "--precision fp16"),
        ({"strategy": "fsdp", "gather_dtype": "bf16"}, "--gather-dtype bf16.*--precision"),
        ({"shard_within": "node"}, "--strategy ddp"),
        ({"cpu_offload": True}, "--strategy ddp"),
        ({"reshard_after_forward": False}, "--strategy ddp"),
        ({"gather_dtype": "bf16", "precision": "bf16"}, "--strategy ddp"),
    ],
)
def test_settings_that_do_not_go_with_the_strategy_are_refused(how, named):
    with pytest.raises(UserError, match=named):
        Settings(**how)


def test_blocks_are_those_of_the_classes_or_repeated_and_what_cannot_be_sharded_is_refused():
    inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    other = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    model = nn.Sequential(nn.Linear(8, 8), nn.ModuleList([inner, other]), nn.LayerNorm(4))
    assert find_blocks(model, ()) == [other, inner, model[0]]
    assert find_blocks(model, (nn.LayerNorm,)) == [model[2]]
    attention = nn.MultiheadAttention(8, 2)  # uses the weight of its layer without calling it
    assert find_blocks(nn.ModuleDict({"attention": attention}), ()) == []
    for given in (("Block",), nn.Linear, (torch.Tensor,)):
        with pytest.raises(UserError, match="shard"):
            Recipe(model=list, data=list, shard=given)
    world = World(rank=0, world_size=2, device=torch.device("cuda", 0), backend="gloo")
    settings = Settings(strategy="fsdp")
    with pytest.raises(UserError, match="needs NCCL on GPUs") as told:
        shard(nn.Linear(2, 2), nn.Linear(2, 2), Recipe(model=list, data=list), settings, world)
    assert told.value.on_all_ranks


LOOKS = """
import os
from pathlib import Path
class Scaled(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("offset", torch.rand(2), persistent=False)
        HOW
    def forward(self, x): return self.times * super().forward(x) + self.offset
def model():
    made = Scaled()
    made.last.weight = made.tied.weight if hasattr(made, "tied") else made.last.weight
    made_on = Path(__file__).with_name(f"made-on-{os.environ.get('RANK', '0')}")
    made_on.write_text(made.first.weight.device.type)
    return made
recipe = replace(recipe, model=model)
"""
# How a constructor goes about its numbers, which ranks other than 0 do not have at first.
CONSTRUCTORS = {
    "draws": "self.times = 2.0",
    "reads": "self.times = float(self.first.weight.abs().mean())",
    "keeps": "self.times = torch.rand(1)",
    "adds": "self.times = 2.0; p = self.last.bias; p.is_meta or self.register_buffer('b', p.data)",
    "ties": "self.times, self.tied = 2.0, nn.Linear(7, 2, bias=False)",
}


def test_the_model_begins_as_on_one_process_whatever_its_constructor_does(tmp_path):
    trainings = []
    for name, how in CONSTRUCTORS.items():
        (tmp_path / name).mkdir()
        recipe = write_blocks(tmp_path / name)
        recipe.write_text(recipe.read_text() + LOOKS.replace("HOW", how))
        tiny.trained(recipe, tmp_path / f"{name}-one", "--epochs", "1")
        trainings.append([recipe, "--run-dir", tmp_path / f"{name}-all", "--epochs", "1", *FSDP])
    tiny.train_all(trainings, on=2, folder=tmp_path)
    for name in CONSTRUCTORS:
        tiny.assert_same_training(tmp_path / f"{name}-all", tmp_path / f"{name}-one")
        made_on = [(tmp_path / name / f"made-on-{rank}").read_text() for rank in range(2)]
        others = "cpu" if name in ("reads", "keeps", "adds") else "meta"
        assert made_on == ["cpu", others], name


OWN = {
    "forward of two calls": """
def forward(model, batch):  # calls parts of the model, and not the model itself
    hidden = model.first(batch[0])
    for block in model.blocks: hidden = block(hidden)
    return model.last(model.norm(hidden))
recipe = replace(recipe, forward=forward, loss=lambda outputs, batch: mean(outputs, batch[1]),
                 metrics={})
""",
    "terms": """
def terms(batch): return (1 + batch[1]).sum()
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
    class Scaled(torch.optim.SGD):  # by a number of the whole weight, as LARS is
        def step(self, closure=None):
            for p in model.parameters(): p.grad.mul_(p.detach().square().mean().item())
            return super().step(closure)
    return Scaled(groups, lr=settings.lr, momentum=0.9, nesterov=True)
recipe = replace(recipe, optimizer=optimizer)
""",
    "stream": """
class Read(torch.utils.data.IterableDataset):
    def __init__(self, x, y): self.x, self.y = x, y
    def __iter__(self): return ((x, int(y)) for x, y in zip(self.x, self.y))
def read():  # the last step has one sample, so that one of two ranks has none
    splits = data()
    return Splits(train=Read(*[t[:25] for t in splits.train]), validation=splits.validation)
recipe = replace(recipe, data=read)
""",
}


@pytest.mark.slow
def test_recipes_with_parts_of_their_own_are_trained_as_on_one_process(tmp_path):
    trainings, pairs = [], []
    for name, text in OWN.items():
        (tmp_path / name).mkdir()
        recipe = write_blocks(tmp_path / name)
        recipe.write_text(recipe.read_text().replace("assert", "# ") + text)  # it has a trial
        for kind, flags in (("whole", ()), ("micro", ("--micro-batch-size", "2"))):
            one, ours = (tmp_path / f"{name} {kind} {on}" for on in ("one", "all"))
            tiny.trained(recipe, one, "--epochs", "1", *flags)
            trainings.append([recipe, "--run-dir", ours, "--epochs", "1", *FSDP, *flags])
            pairs.append((ours, one))
    tiny.train_all(trainings, on=2, folder=tmp_path)
    for ours, one in pairs:
        tiny.assert_same_training(ours, one)


IN_BF16 = """
class Looking(Block):
    def forward(self, x):
        assert self.norm.weight.dtype == self.inner.weight.dtype == torch.bfloat16
        return super().forward(x)
""" + TIED.replace(TIE, "made.blocks[1].__class__ = Looking  # a new one would draw other weights")


def test_in_bf16_it_computes_what_ddp_computes_and_resumes_exactly(tmp_path):
    """Gathered in bf16, its float32 weights are trained close to those of DDP."""
    recipe = write_blocks(tmp_path)
    (tmp_path / "looking").mkdir()
    looking = write_blocks(tmp_path / "looking")
    looking.write_text(looking.read_text() + IN_BF16)
    ddp, fsdp, once, twice = (tmp_path / name for name in ("ddp", "fsdp", "once", "twice"))
    flags = ("--precision", "bf16", *SGD)
    gathered = (*flags, *FSDP, "--gather-dtype", "bf16")
    trainings = [
        [recipe, "--run-dir", ddp, *flags],
        [recipe, "--run-dir", fsdp, *flags, *FSDP],
        [looking, "--run-dir", once, *gathered],
        [looking, "--run-dir", twice, *gathered, "--epochs", "1"],
        [twice, "--resume", "--epochs", "2"],
    ]
    tiny.train_all(trainings, on=2, folder=tmp_path)
    tiny.assert_same_training(fsdp, ddp, tolerance=1e-6)
    tiny.assert_same_training(twice, once)
    tiny.assert_same_training(once, ddp, tolerance=0.1)
    weights = tiny.last_state(once)["model"]
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    assert not any(torch.equal(w, w.bfloat16().float()) for w in weights.values())
