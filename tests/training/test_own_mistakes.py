"""What a recipe's own batches, terms, optimizer, schedule and metric objects get wrong is told.

Before anything is trained or written: with exit code 2 and one message.
"""

import pytest

from samestep import read_records
from tests.command_line import refusal
from tests.processes import samestep
from tests.training.test_recipe_mistakes import GOOD, write


def terms(returned: str) -> dict[str, str]:
    """Return a recipe whose loss_terms returns this."""
    return {"more": f", loss_terms=lambda batch: {returned}"}


def optimizer(returned: str) -> dict[str, str]:
    """Return a recipe whose optimizer returns this; there is a weight that is not the model's."""
    more = f", optimizer=lambda model, settings: {returned}"
    return {"model": f"spare = nn.Parameter(torch.ones(1))\n{GOOD['model']}", "more": more}


def collate(samples: str) -> dict[str, str]:
    """Return a recipe whose collate takes these of the samples."""
    return {
        "model": "from torch.utils.data import default_collate, TensorDataset, Subset\n"
        + GOOD["model"],
        "data": "Splits(train=Subset(TensorDataset(x, y), range(48)),"
        " validation=Subset(TensorDataset(x, y), range(48, 64)))",
        "more": f", collate=lambda samples: {samples}",
    }


METRIC = """
class Metric({base}):
    higher_is_better = True
    def __init__(self):
        super().__init__()
        {init}
    def update(self, outputs, targets):
        self.seen = self.seen + outputs.sum(dim=0)
    def compute(self):
        return {computed}
    {more}

"""
STATE = "self.add_state('seen', torch.zeros(2), dist_reduce_fx='sum')"


def metric(
    init: str = STATE, computed: str = "self.seen", base: str = "torchmetrics.Metric", more=""
) -> dict[str, str]:
    """Return a recipe with a metric object."""
    made = METRIC.format(base=base, init=init, computed=computed, more=more)
    return {
        "model": f"import torchmetrics\n{made}\n{GOOD['model']}",
        "more": ", metrics={'seen': Metric()}",
    }


# What is wrong, and what the message says of it beside the place.
MISTAKES = {
    "no terms": (terms("0"), ("loss_terms", "returned 0", "mine.py:")),
    "terms of nothing": (terms("None"), ("loss_terms", "NoneType", "mine.py:")),
    "terms that are not a number": (terms("float('nan')"), ("loss_terms", "nan", "mine.py:")),
    "terms below 0": (terms("torch.tensor(-3)"), ("loss_terms", "-3", "mine.py:")),
    "terms of each sample": (terms("torch.ones(8)"), ("loss_terms", "(8,)", "mine.py:")),
    "terms that raise": (terms("batch.tokens"), ("loss_terms", "tokens", "mine.py:")),
    "an optimizer of half the model": (
        optimizer("torch.optim.SGD([model.weight], lr=0.1)"),
        ("optimizer", "bias", "mine.py:"),
    ),
    "an optimizer of other weights": (
        optimizer("torch.optim.SGD([*model.parameters(), spare], lr=0.1)"),
        ("optimizer", "not the model's", "mine.py:"),
    ),
    "no optimizer": (optimizer("model.parameters"), ("optimizer", "method", "mine.py:")),
    "an optimizer that calls the model": (
        optimizer("torch.optim.LBFGS(model.parameters())"),
        ("optimizer", "LBFGS", "mine.py:"),
    ),
    "an optimizer that raises": (
        optimizer("torch.optim.SGD(model.weights, lr=0.1)"),
        ("optimizer", "weights", "mine.py:"),
    ),
    "a schedule that is not a number": (
        {"more": ", schedule=lambda step, total: float('nan')"},
        ("schedule", "nan", "mine.py:"),
    ),
    "a schedule below 0": (
        {"more": ", schedule=lambda step, total: 0.5 - step"},
        ("schedule", "returned -", "at step", "mine.py:"),
    ),
    "a schedule that raises": (
        {"more": ", schedule=lambda step, total: 1 / step"},
        ("schedule", "ZeroDivisionError", "at step", "mine.py:"),
    ),
    "a schedule of nothing": (
        {"more": ", schedule=lambda step, total: None"},
        ("schedule", "None at step 0"),
    ),
    "a metric object without a state": (
        metric(init="self.seen = 0"),
        ("'seen'", "Metric", "state"),
    ),
    "a metric object of one's own": (
        metric(init="self.seen = 0", base="object", more="def reset(self): self.seen = 0"),
        ("'seen'", "Metric", "state"),
    ),
    "a metric object of a vector": (metric(), ("'seen'", "(2,)", "single number")),
    "a metric object that raises": (
        metric(init=STATE.replace("zeros(2)", "zeros(3)"), computed="self.seen.sum()"),
        ("'seen'", "(8, 2)", "mine.py:"),
    ),
    "a dropped sample": (
        collate("default_collate(samples[1:])"),
        ("collate", "leaves out 1 of 8 samples", "mine.py:"),
    ),
    "a sample that comes twice": (
        collate("default_collate(samples + samples[:1])"),
        ("collate", "adds 1 of 8 samples", "mine.py:"),
    ),
    "a batch without tensors": (collate("('x', len(samples))"), ("collate", "no tensor")),
    "a batch that is no pair": (
        collate("{'x': default_collate(samples)[0]}"),
        ("collate", "'x'", "forward", "mine.py:"),
    ),
    "a collate that raises": (
        collate("samples.tokens"),
        ("collate", "8 samples", "tokens", "mine.py:"),
    ),
}


@pytest.mark.parametrize(("wrong", "told"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_told_before_anything_is_trained(refused, tmp_path, wrong, told):
    path = write(tmp_path, **wrong)
    message = refused("train", str(path), "--run-dir", str(tmp_path / "run"))
    assert [word for word in told if word not in message] == [], message
    assert not (tmp_path / "run" / "checkpoints").exists()


# One of each place where ranks find it.
TOGETHER = ("terms of each sample", "an optimizer of half the model", "a schedule below 0")
TOGETHER += ("a metric object without a state", "a dropped sample")


@pytest.mark.parametrize("name", TOGETHER)
def test_two_ranks_tell_of_a_mistake_once(tmp_path, name):
    wrong, told = MISTAKES[name]
    train = ("train", str(write(tmp_path, **wrong)), "--run-dir", str(tmp_path / "run"))
    message = refusal(*train, world_size=2, folder=tmp_path / "output")
    assert [word for word in told if word not in message] == [], message


NOT_EVALUATED = "Splits(train=(x, y))"


@pytest.mark.parametrize(
    ("name", "world_size"), [("terms of each sample", 1), ("a metric object of a vector", 2)]
)
def test_without_data_to_evaluate_it_is_told_before_anything_is_trained(tmp_path, name, world_size):
    wrong, told = MISTAKES[name]
    train = ("train", str(write(tmp_path, **wrong, data=NOT_EVALUATED)))
    run = ("--run-dir", str(tmp_path / "run"))
    message = refusal(*train, *run, world_size=world_size, folder=tmp_path / "output")
    assert [word for word in told if word not in message] == []


SECOND_RANK = "int(__import__('os').environ.get('RANK', 0)) == 1"


@pytest.mark.parametrize("found", ["0", "float('nan')"])
def test_terms_that_only_one_rank_cannot_count_are_told_at_the_first_step(tmp_path, found):
    """Of 16 samples of a step, the second rank has the other 8; no metric asks for them before."""
    count = f"lambda batch: {found} if {SECOND_RANK} else 8"
    wrong = {"more": f", loss_terms={count}, metrics={{}}", "data": NOT_EVALUATED}
    train = ("train", str(write(tmp_path, **wrong)), "--run-dir", str(tmp_path / "run"))
    message = refusal(*train, world_size=2, folder=tmp_path / "output")
    assert "loss_terms" in message
    assert f"returned {found.removeprefix('float(').strip(chr(39) + ')')}" in message


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_only_one_rank_drops_ends_both(tmp_path, workers):
    wrong = collate(f"default_collate(samples[1:] if {SECOND_RANK} else samples)")
    train = ("train", str(write(tmp_path, **wrong)), "--run-dir", str(tmp_path / "run"))
    more = ("--num-workers", str(workers))
    message = refusal(*train, *more, world_size=2, folder=tmp_path / "output")
    assert "leaves out 1 of 8 samples" in message


def test_there_is_no_accuracy_by_default_of_soft_targets_that_are_only_trained_on(tmp_path):
    soft = {"targets": "nn.functional.one_hot((x[:, 0] > 0).long(), 2).float()"}
    path = write(tmp_path, **soft, data=NOT_EVALUATED)
    ranks = samestep("train", str(path), "--run-dir", str(tmp_path / "run"), folder=tmp_path / "o")
    assert [p.exitcode for p in ranks.processes] == [0], ranks.output()
    (epoch,) = (r for r in read_records(tmp_path / "run") if r["event"] == "epoch")
    assert "metrics" not in epoch


def test_a_factor_that_is_wrong_later_is_told_with_its_step(tmp_path, refused):
    """It is asked for its first, middle and last factor at once, and for the others in turn."""
    wrong = {"more": ", schedule=lambda step, total: -1 if step == 1 else 1"}
    message = refused("train", str(write(tmp_path, **wrong)), "--run-dir", str(tmp_path / "run"))
    assert "step 1 of 6" in message
