"""What a recipe gets wrong is refused before or at the first step, in words, with exit code 2."""

import re
from pathlib import Path

import pytest

from tests import tiny
from tests.command_line import refusal

GOOD = {
    "model": "def model():\n    return nn.Linear(4, 2)",
    "targets": "(x[:, 0] > 0).long()",
    "data": "Splits(train=(x[:48], y[:48]), validation=(x[48:], y[48:]))",
    "more": "",
    "epochs": "1",
    "batch_size": "8",
}
RECIPE = """
import gzip; from dataclasses import dataclass
import torch
from torch import nn
from samestep import Recipe, Splits

{model}

def data():
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    y = {targets}
    return {data}

settings = {{"epochs": {epochs}, "batch_size": {batch_size}}}
recipe = Recipe(model=model, data=data, settings=settings{more})
"""


def write(folder, **wrong) -> Path:
    path = folder / "mine.py"
    path.write_text(RECIPE.format(**{**GOOD, **wrong}))
    return path


def trained(folder, *flags, **how) -> str:
    return tiny.trained(write(folder, **how), folder / "run", *flags)


@pytest.fixture
def told(refused, tmp_path):
    """Train with a recipe that has to be refused; return the message."""

    def told(*flags: str, **wrong: str) -> str:
        path, run = write(tmp_path, **wrong), tmp_path / "run"
        said = refused("train", str(path), "--run-dir", str(run), *flags)
        assert not list(run.rglob("*.pt"))
        return said

    return told


CHECKED = """
@dataclass(frozen=True)
class Own:
    hidden: int = 1

    def __post_init__(self):
        if self.hidden > 0: raise ValueError("hidden must be at most 0")

def model(own): return nn.Linear(4, 2)
"""


def model(returned: str = "nn.Linear(4, 2)", before: str = "", **parts: str) -> dict[str, str]:
    """Return a recipe whose model is this; code before it makes what it needs."""
    return {"model": f"{before}\n\ndef model():\n    return {returned}", **parts}


def raising(text: str, before: str = "") -> dict[str, str]:
    return {"model": f"{before}\n\ndef model():\n    {text}"}


def module(method: str, body: str) -> dict[str, str]:
    before = f"class Model(nn.Linear):\n    def {method}:\n        {body}"
    return model("Model(4, 2)", before)


def more(text: str) -> dict[str, str]:
    return {"more": f", {text}"}


def loss(text: str) -> dict[str, str]:
    return more(f"loss=lambda o, t: {text}")


def metric(text: str) -> dict[str, str]:
    return more(f"metrics={{'f1': {text}}}")


def stepping(line: str) -> dict[str, str]:
    before = (
        "class Own(torch.optim.SGD):\n    def step(self, closure=None):\n"
        f"        with torch.no_grad():\n            {line}"
    )
    return model(before=before) | optimizer("Own(model.parameters(), lr=0.1)")


def optimizer(returned: str) -> dict[str, str]:
    return more(f"optimizer=lambda model, settings: {returned}")


def schedule(text: str) -> dict[str, str]:
    return more(f"schedule=lambda step, total: {text}")


def terms(text: str, **parts: str) -> dict[str, str]:
    return more(f"loss_terms=lambda batch: {text}") | parts


def collate(samples: str) -> dict[str, str]:
    needs = "from torch.utils.data import default_collate, TensorDataset, Subset"
    split = "Subset(TensorDataset(x, y), range({}))"
    train, validation = split.format("48"), split.format("48, 64")
    data = f"Splits(train={train}, validation={validation})"
    return model(before=needs, data=data) | more(f"collate=lambda samples: {samples}")


METRIC = """import torchmetrics

class Reset:
    def reset(self): self.seen = 0

class Metric({base}):
    higher_is_better = True
    def __init__(self):
        super().__init__()
        {init}
    def update(self, outputs, targets): self.seen = self.seen + outputs.sum(dim=0)
    def compute(self): return {computed}
"""
STATE = "self.add_state('seen', torch.zeros(2), dist_reduce_fx='sum')"


def own_metric(
    init: str = STATE, computed: str = "self.seen", base: str = "torchmetrics.Metric"
) -> dict[str, str]:
    made = METRIC.format(base=base, init=init, computed=computed)
    return model(before=made) | more("metrics={'seen': Metric()}")


SQUARES = model("nn.Linear(4, 1)", targets="x[:, 0]")
SQUARES |= more("loss=lambda o, t: (o - t).square().mean(), metrics={}")
ONLY_TRAINED = "Splits(train=(x, y))"
SPARSE = (
    "built = nn.Linear(4, 2)\n    built.register_buffer('graph', torch.eye(4).to_sparse())"
    "\n    return built"
)
UNSAID = "class Bad(Exception):\n    def __str__(self):\n        raise TypeError"
OF_ARGUMENTS = "def model(hidden):\n    return nn.Linear(4, 2)"
REQUIRED = "@dataclass\nclass Own:\n    hidden: int\n\n" + OF_ARGUMENTS
OPTIONS = more("options=Own")
SPOILT = {"model": CHECKED.replace("1", "0"), "flags": "--hidden 2"} | OPTIONS
UNVALIDATED = "Splits(train=(x, y), validation=(x[:0], y[:0]))"
REPLACES = "self.weight = nn.Parameter(self.weight.data); return super().forward(x)"
DETACHED = loss("nn.functional.cross_entropy(o.detach(), t)")
LIGHTNING = {"flags": "--engine lightning"}
UNKEPT = stepping("self.state[0]['own'] = lambda: 0")
FIRST = "self.param_groups[0]['params'][0]"
LBFGS = optimizer("torch.optim.LBFGS(model.parameters())")
INSISTING = stepping("pass")
INSISTING["model"] = INSISTING["model"].replace(
    "with torch", "assert closure is not None; 0\n        with torch"
)
NORMALISED = model("nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))", batch_size="47")
NORMALISED["flags"] = "--no-self-check"
FORCES = module(
    "forward(self, x)",
    "y = super().forward(x.requires_grad_())\n        return y - "
    "torch.autograd.grad(y.sum(), x, create_graph=True)[0].sum()",
)
TABLE = model("nn.EmbeddingBag(9, 2, sparse=True)", data="Splits(train=(x.long().abs(), y))")
OTHER_WEIGHTS = model(before="spare = nn.Parameter(torch.ones(1))")
OTHER_WEIGHTS |= optimizer("torch.optim.SGD([*model.parameters(), spare], lr=0.1)")

# What is wrong, and what the message says of it beside the recipe's file.
WRITES = "model.weight.register_post_accumulate_grad_hook(lambda p: p.detach().__setitem__(0, 1))"
ODD, ALL = "type('Odd', (torch.optim.SGD,), ", "(model.parameters())"
MISTAKES = {
    "no splits": ({"data": "(x, y)"}, "Splits("),
    "a built model": ({"model": "model = nn.Linear(4, 2)"}, "function"),
    "a model of arguments": ({"model": OF_ARGUMENTS}, "model()"),
    "no weights": (model("nn.ReLU()"), "parameters"),
    "a sparse buffer": (raising(SPARSE), "graph"),
    "a model of other inputs": (model("nn.Linear(5, 2)"), "(8, 4)"),
    "labels out of range": ({"targets": "(x[:, 0] > 0).long() + 1"}, "0 to 1"),
    "one label out of range": ({"targets": "(torch.arange(64) == 40).long() * 9"}, "sample 40"),
    "labels of a wrong type": ({"targets": "x[:, 0]"}, "targets.long()"),
    "labels in columns": ({"targets": "(x[:, :1] > 0).long()"}, "targets.squeeze(1)"),
    "a loss a sample": (more("loss=nn.CrossEntropyLoss(reduction='none')"), "scalar"),
    "no loss": (loss("None"), "None"),
    "a loss that raises": (loss("o.nothing"), "mine.py:16"),
    "a loss of all pairs, nothing validated": ({**SQUARES, "data": ONLY_TRAINED}, "(8, 1)"),
    "a loss of all pairs": (SQUARES, "outputs are (8, 1) and targets (8,)"),
    "a loss without gradient": (DETACHED, "gradient"),
    "a loss that is a word": (more("loss='mse'"), "'mse'"),
    "a loss that is a class": (more("loss=nn.CrossEntropyLoss"), "CrossEntropyLoss(…)"),
    "a mean as a metric": (metric("lambda o, t: o.mean()"), "sample"),
    "a metric that is a float": (metric("lambda o, t: 0.5"), "float"),
    "a metric that raises": (metric("lambda o, t: o.nothing"), "mine.py:16"),
    "a list of metrics": (more("metrics=[lambda o, t: o[:, 0]]"), "dict"),
    "a metric named in colour": (more(r"metrics={'\x1b[31m': lambda o, t: o}"), r"\x1b[31m"),
    "a metric that is a word": (metric("'f1'"), "'f1'"),
    "a metric of another shape": (metric("__import__('torchmetrics').F1Score('binary')"), "shape"),
    "a metric that is a class": (metric("__import__('torchmetrics').F1Score"), "F1Score(…)"),
    "a transform that raises": (more("transform=lambda x: x / nothing"), "mine.py:16"),
    "an augment of nothing": (more("augment=lambda x, keys: None"), "None"),
    "sparse inputs": ({"data": "Splits(train=(x.to_sparse(), y))"}, "to_dense()"),
    "a number as inputs": ({"data": "Splits(train=(x.sum(), y))"}, "row"),
    "data that raises": ({"targets": "gzip.open(__file__).read()"}, "mine.py:12"),
    "a missing data file": ({"data": "open('/no/such.csv')"}, "/no/such.csv"),
    "no data": ({"data": "Splits(train=(x[:0], y[:0]))"}, "training data"),
    "no data to validate on": ({"data": UNVALIDATED}, "validation data has no samples"),
    "a tensor as data": ({"data": "Splits(train=x)"}, "a Tensor"),
    "classes that are letters": ({"data": "Splits(train=(x, y), classes='abc')"}, "'abc'"),
    "a setting of a wrong type": ({"epochs": '"one"'}, "epochs"),
    "an option without default": ({"model": REQUIRED} | OPTIONS, "'hidden'"),
    "options that refuse themselves": ({"model": CHECKED} | OPTIONS, "at most 0"),
    "options that a flag spoils": (SPOILT, "at most 0"),
    "no model": (raising("nn.Linear(4, 2)"), "return"),
    "a model that is a class": (model("nn.Linear"), "class Linear"),
    "a frozen model": (model("nn.Linear(4, 2).requires_grad_(False)"), "frozen"),
    "a model without numbers": (model("nn.Linear(4, 2, device='meta')"), "meta"),
    "a model that raises what has no text": (raising("raise Bad", UNSAID), "Bad"),
    "a model that raises half a letter": (raising("raise ValueError('\\udcff')"), "\\udcff"),
    "a model that returns a dict": (module("forward(self, x)", "return {'logits': x}"), "a dict"),
    "float64": (module("forward(self, x)", "return super().forward(x.double())"), "fp64 makes"),
    "a replaced weight": (module("forward(self, x)", REPLACES), "step changes: weight"),
    "state that no checkpoint holds": (module("get_extra_state(self)", "return Model"), "_extra_"),
    "a schedule of several": (schedule("torch.ones(2)"), "at step 0 of 6"),
    "a schedule that is not a number": (schedule("float('nan')"), "nan"),
    "a schedule below 0": (schedule("0.5 - step"), "returned -", "at step"),
    # It is asked for its first, middle and last factor at once, and for the others in turn.
    "a schedule below 0 later": (schedule("-1 if step == 1 else 1"), "step 1 of 6"),
    "a schedule by more than the step": (schedule("torch.rand(())"), "for the same step"),
    "a schedule that raises": (schedule("1 / step"), "ZeroDivisionError", "at step"),
    "an optimizer that is a class": (more("optimizer=torch.optim.SGD"), "(model, settings)"),
    "an optimizer that fails": (stepping("raise ValueError('no step')"), "no step"),
    "an optimizer that no checkpoint holds": (UNKEPT, "checkpoint"),
    "an optimizer of half the model": (optimizer("torch.optim.SGD([model.weight])"), "bias"),
    "an optimizer of other weights": (OTHER_WEIGHTS, "not the model's"),
    "an optimizer without state_dict": (optimizer(f"{ODD}{{'state_dict': None}}){ALL}"), "Odd"),
    "an optimizer within backward": (
        optimizer(f"[{WRITES}, {ODD}{{}}){ALL}][1]"),
        "changes weight",
    ),
    "no optimizer": (optimizer("model.parameters"), "method"),
    "an optimizer that calls the model": (LBFGS, "LBFGS"),
    "an optimizer that asserts a closure": (INSISTING, "calls the model itself"),
    "a scheduler of another's name": (more("schedule=lambda o, plan: o"), "lambda optimizer, plan"),
    "a last batch of one sample": (NORMALISED, "mine.py", "BatchNorm", "The last step of an epoch"),
    "gradients in an evaluation": (FORCES, "torch.enable_grad()"),
    "sparse gradients with Adam": (TABLE, "--optimizer adam", "sparse=False"),
    "an optimizer that raises": (optimizer("model.weights"), "weights"),
    "a loss without gradient in Lightning": (DETACHED | LIGHTNING, "gradient"),
    "terms of nothing": (terms("None"), "loss_terms", "NoneType"),
    "terms below 0": (terms("torch.tensor(-3)"), "loss_terms", "-3"),
    "terms of each sample": (terms("torch.ones(8)", data=ONLY_TRAINED), "loss_terms", "(8,)"),
    "a global batch without terms": (terms("0"), "loss_terms", "counted 0", "step 1"),
    "terms that raise": (terms("batch.tokens"), "loss_terms", "tokens"),
    "a metric object without a state": (own_metric("self.seen = 0"), "'seen'", "state"),
    "a metric object of one's own": (own_metric("self.seen = 0", base="Reset"), "'seen'", "Metric"),
    "a metric object of a vector": (own_metric(), "'seen'", "(2,)", "single number"),
    "a metric object that raises": (own_metric(STATE.replace("2", "3"), "0"), "'seen'", "(8, 2)"),
    "a dropped sample": (collate("default_collate(samples[1:])"), "collate", "leaves out 1 of 8"),
    "a sample that comes twice": (collate("default_collate(samples + samples[:1])"), "adds 1 of 8"),
    "a batch without tensors": (collate("('x', len(samples))"), "collate", "no tensor"),
    "a batch that is no pair": (collate("{'x': torch.ones(8)}"), "collate", "'x'", "forward"),
    "a collate that raises": (collate("samples.tokens"), "collate", "8 samples", "tokens"),
}


@pytest.mark.parametrize(("wrong", "parts"), [(w, p) for w, *p in MISTAKES.values()], ids=MISTAKES)
def test_a_mistake_in_a_recipe_is_told_in_words_with_its_line(told, wrong, parts):
    said = told(*wrong.get("flags", "").split(), **wrong)
    assert [part for part in parts if part not in said] == [], said
    if "epochs" not in wrong:  # of a setting its name is enough
        assert "mine.py:" in said


def refused_on_two(folder: Path, *flags: str, **wrong: str) -> str:
    words = ("train", str(write(folder, **wrong)), "--run-dir", str(folder / "run"), *flags)
    return refusal(*words, world_size=2, folder=folder / "output")


def test_two_ranks_tell_of_a_mistake_as_one_also_where_only_one_drops_a_sample(tmp_path):
    wrong, part = MISTAKES["a loss without gradient"]
    assert part in refused_on_two(tmp_path, **wrong)
    wrong = collate(f"default_collate(samples[1:] if {SECOND_RANK} else samples)")
    (tmp_path / "drops").mkdir()
    told = refused_on_two(tmp_path / "drops", "--num-workers", "1", **wrong)
    assert "leaves out 1 of 8 samples" in told


SECOND_RANK = "int(__import__('os').environ.get('RANK', 0)) == 1"


def test_terms_that_only_one_rank_cannot_count_are_told_at_the_first_step(tmp_path):
    """Of 16 samples of a step, the second rank has the other 8; no metric asks for them before."""
    count = f"loss_terms=lambda batch: float('nan') if {SECOND_RANK} else 8, metrics={{}}"
    told = refused_on_two(tmp_path, **more(count), data=ONLY_TRAINED)
    assert "loss_terms" in told
    assert "returned nan" in told


def test_an_evaluation_over_nothing_is_told_and_the_training_before_it_is_kept(refused, tmp_path):
    path = write(tmp_path, **terms("8 * torch.is_grad_enabled()"))
    said = refused("train", str(path), "--run-dir", str(tmp_path / "run"))
    assert "loss_terms" in said
    assert tiny.newest_announced(tmp_path / "run") == 6


SAMPLES = """
class Samples(torch.utils.data.Dataset):
    def __init__(self, x, y, first=100): self.x, self.y, self.first = x, y, first
    def __len__(self): return {length}
    def __getitem__(self, i):
        x, y = self.x[i], self.y[i]
        return ({sample}) if i >= self.first else (x, y)
"""
# What __getitem__ returns from one sample on, and what the message says.
SAMPLE_MISTAKES = {
    "strings": ("'a cat', y", "a str"),
    "nothing": ("None", "None"),
    "no target": ("x, None", "None"),
    "triples": ("x, y, y", "3 values"),
    "dicts": ("{'image': x, 'label': y}", "'image', 'label'"),
    "changing shapes": ("x[:i % 3], y", "shape"),
    "a sample that raises": ("x / 'broken', y", "failed at sample"),
}


def faulty(sample: str, *, length: str = "len(self.x)", first: int = 20) -> dict[str, str]:
    samples = SAMPLES.replace("{length}", length).replace("{sample}", sample)
    return {
        "model": samples + GOOD["model"],
        "data": f"Splits(train=Samples(x[:48], y[:48], {first}), validation=(x[48:], y[48:]))",
    }


@pytest.mark.parametrize(("sample", "message"), SAMPLE_MISTAKES.values(), ids=list(SAMPLE_MISTAKES))
def test_a_wrong_sample_is_told_with_the_line_of_its_data_set(told, sample, message):
    said = told(**faulty(sample))
    assert message in said
    assert "mine.py:" in said


@pytest.mark.parametrize(
    ("length", "message"), [("60", "of 60: IndexError"), ("-5", "__len__() should return >= 0")]
)
def test_a_data_set_whose_length_is_wrong_is_told(told, length, message):
    assert message in told(**faulty("x, y", length=length))


def test_a_label_out_of_range_that_comes_late_is_told_with_its_step(told):
    said = told(**faulty("x, y + 7", first=47))
    assert re.search(r"at step [1-6], with inputs \(8, 4\)", said) or "first batch" in said
    assert "mine.py:" in said


def test_a_loader_worker_of_two_ranks_tells_of_a_wrong_sample_once(tmp_path):
    sample, message = SAMPLE_MISTAKES["triples"]
    assert message in refused_on_two(tmp_path, "--num-workers", "1", **faulty(sample, first=0))


# A layer that the loss does not depend on, and one whose compilation needs a second graph.
FORGETS = """class Model(nn.Linear):
    def __init__(self):
        super().__init__(4, 2)
        self.forgotten = nn.Linear(4, 2)"""
BRANCHES = module(
    "forward(self, x)", "y = super().forward(x)\n        return y if y.sum() > 0 else -y"
)


@pytest.mark.parametrize("engine", ["native", "lightning"])
def test_a_parameter_that_is_not_used_is_named_before_ranks_wait_for_it(tmp_path, engine):
    told = refused_on_two(tmp_path, "--engine", engine, **model("Model()", FORGETS))
    assert "forgotten.weight, forgotten.bias" in told


def test_a_sparse_table_that_is_not_used_is_told_with_its_remedy(tmp_path):
    tables = FORGETS.replace("nn.Linear(4, 2)", "nn.Embedding(4, 2, sparse=True)")
    sgd = optimizer("torch.optim.SGD(model.parameters(), lr=0.1)")
    told = refused_on_two(tmp_path, "--find-unused", **model("Model()", tables), **sgd)
    assert "sparse=False" in told


def test_one_process_trains_a_model_with_a_parameter_that_is_not_used(tmp_path):
    trained(tmp_path, **model("Model()", FORGETS))


def test_a_model_that_cannot_be_compiled_is_refused_only_when_that_was_asked_for(told, tmp_path):
    assert "--compile off" in told("--compile", "on", **BRANCHES)
    tiny.trained(tmp_path / "mine.py", tmp_path / "eager", "--compile", "off")


FLAGS = {"run-dir": "", "eval-batch-size": "0", "momentum": "2", "batch-size": "1" + 20 * "0"}


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_that_no_training_can_have_is_named(refused, here, flag):
    told = refused("train", str(write(here)), "--optimizer", "sgd", f"--{flag}", FLAGS[flag])
    assert flag.replace("batch-size", "batch") in told
    assert not (here / "runs").exists()


def test_a_global_batch_larger_than_the_data_is_told(tmp_path):
    assert "48 training samples" in " ".join(trained(tmp_path, batch_size="100").split())


REGRESSION = {
    "model": "def model():\n    return nn.Linear(4, 1)",
    "targets": "x[:, :1] * 2",
    "more": ", loss=nn.MSELoss()",
}
SOFT = {"targets": "nn.functional.one_hot((x[:, 0] > 0).long(), 2).float()"}


@pytest.mark.parametrize("how", [REGRESSION, SOFT], ids=["own loss", "float targets"])
@pytest.mark.parametrize("validated", [True, False])
def test_there_is_no_accuracy_by_default_where_targets_are_no_classes(tmp_path, how, validated):
    trained(tmp_path, **how, **({} if validated else {"data": ONLY_TRAINED}))
    run = tmp_path / "run"
    assert not any("accuracy" in str(r) for r in tiny.events(run, "evaluation", "epoch"))
    assert len(tiny.events(run, "evaluation")) == validated


def test_data_drawn_from_numpy_and_random_is_the_same_on_every_rank(tmp_path):
    drawn = """
import random
import numpy as np

def drawn(x):
    y = torch.tensor(np.random.rand(64)) > random.random()
    print("drawn", "".join(str(int(v)) for v in y))
    return y.long()
"""
    recipe = write(tmp_path, targets="drawn(x)", model=drawn + GOOD["model"])
    printed = tiny.trained(recipe, tmp_path / "run", on=2)
    texts = (printed, (tmp_path / "run" / "rank-1.log").read_text())
    first, second = ([w for w in text.splitlines() if w.startswith("drawn")] for text in texts)
    assert first
    assert first == second


def test_steps_due_at_the_end_of_an_epoch_are_not_forgotten(tmp_path):
    flags = ("--checkpoint-every-steps", "6", "--checkpoint-every-epochs", "100")
    flags += ("--eval-every-steps", "6", "--eval-every-epochs", "100")
    trained(tmp_path, "--epochs", "4", *flags)
    names = {p.name for p in (tmp_path / "run" / "checkpoints").glob("*.pt")}
    assert names == {f"checkpoint_epoch_{n}.pt" for n in (1, 2, 3, 4)}
    assert len(tiny.events(tmp_path / "run", "evaluation")) == 4


@pytest.mark.parametrize(("content", "named"), [(b"x = 1\0", "UTF-8"), (b"", "recipe = Recipe")])
def test_a_file_that_is_no_recipe_is_told(refused, here, content, named):
    (here / "mine.py").write_bytes(content)
    assert named in refused("train", "mine.py")


@pytest.mark.parametrize("verb", ["train", "report", "evaluate"])
def test_a_name_that_no_file_can_have_is_told(refused, here, verb):
    assert "too long" in refused(verb, "n" * 300)


def test_a_target_that_no_metric_can_reach_is_told(refused, here):
    assert "--target nan" in refused("report", "runs/a", "runs/b", "--target", "nan")
    assert "--target inf" in refused("compare", "runs/a", "runs/b", "--target", "inf")
