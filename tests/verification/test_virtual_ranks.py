"""With virtual ranks everything is equal to the last bit on real ranks; what is not fails."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from samestep.base.errors import UserError
from samestep.core.learner.tree import TreeSum
from samestep.prove.verification import causes
from samestep.prove.verification.evidence import EQUAL
from samestep.prove.verification.result_table import as_table
from samestep.shell.commands.verify import _verify
from tests.verification import planted
from tests.verification.forked import _launch as launch_forked
from tests.verification.forked import check, differing, verified
from tests.verification.made_up import checks, different, undisturbed

# What differs with the number of ranks by itself, and what is no mean over samples.
FREE = """
import random
class Free(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm, self.out = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.register_buffer("mean", torch.zeros(8))
    def forward(self, x):
        h = nn.functional.dropout(self.norm(self.inner(x)), 0.5, self.training)
        if self.training: self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return self.out(torch.tanh(h - self.mean)) * (0.5 + random.random())
def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, torch.tensor([1.0, 5.0]).to(outputs))
def augment(x, keys): return -x if uniform(keys[:1], 1) < 0.5 else x
recipe = replace(recipe, model=Free)
"""
# Virtual ranks of a rank are added up as they come, in place of along the tree.
AS_THEY_COME = """
from samestep.core.learner.tree import Root, TreeSum
def push(self, value, number, level=0):
    if self.roots: value = self._add(self.roots.pop().value, value)
    self.roots.append(Root(0, number, value))
TreeSum.push = push
"""
MEASURED = ("accumulation", "stop and resume", "metrics", "one device")


def test_dropout_batch_norm_and_all_draws_are_equal_to_the_last_bit(tmp_path):
    recipe = planted.write(tmp_path, FREE, name="v_free.py")
    flags = ("--virtual-ranks=4", "--ema=0.9", "--clip-norm=1")
    found = verified(recipe, *flags, folder=tmp_path / "ranks", sizes=(1, 2, 3))
    assert differing(found) == {}, [c.cause for c in found.checks]
    assert {one.status for one in found.checks} == {"same"}
    for name in ("2 ranks", "3 ranks", *MEASURED):
        row = check(found, name)
        assert (row.difference, row.tolerance) == (0, 0)
        assert row.compared.startswith(EQUAL)
    assert check(found, "3 ranks").compared.endswith(": 2 + 1 + 1 virtual ranks")
    told = json.loads(json.dumps(as_table(found)))
    assert (told["virtual_ranks"], told["precisions"], told["held_still"]) == (4, ["fp32"], [])
    left_out = {"fp32", "lightning", "BatchNorm", "dropout", "loss", "samples apart", "last batch"}
    assert not left_out & {row["name"] for row in told["checks"]}


def test_sums_in_the_order_of_arrival_differ_in_the_last_bit(tmp_path, monkeypatch):
    monkeypatch.setattr(TreeSum, "push", TreeSum.push)  # the recipe's, only in this test
    recipe = planted.write(tmp_path, AS_THEY_COME, name="v_arrival.py")
    found = verified(recipe, "--virtual-ranks=4", folder=tmp_path / "ranks", quick=True)
    assert not found.same
    row = check(found, "2 ranks")
    assert (row.status, row.first_step, row.cause.name) == ("different", 1, causes.UNKNOWN.name)
    assert 0 < row.difference < 1e-5, "no more than rounding, which passes without virtual ranks"
    assert row.first_parameter in ("0.weight", "0.bias", "2.weight", "2.bias")
    assert row.what == "gradient"


def test_virtual_ranks_without_a_sample_are_equal_and_what_depends_on_the_rank_fails(tmp_path):
    recipe = planted.write(tmp_path, planted.DROPOUT, name="v_few.py")
    found = verified(recipe, "--virtual-ranks=4", folder=tmp_path / "ranks", batch=4)
    assert differing(found) == {}
    assert found.facts.size.rest < 4
    assert check(found, "accumulation").status == "skipped"
    recipe = planted.write(tmp_path, planted.RANK_IN_FORWARD, name="v_rank.py")
    found = verified(recipe, "--virtual-ranks=2", folder=tmp_path / "ranks", quick=True)
    assert differing(found)["2 ranks"] == causes.FORWARD_BY_RANK.name
    assert set(differing(found).values()) == {causes.FORWARD_BY_RANK.name}


def on_virtual_ranks():
    evidence = undisturbed()
    return replace(evidence, facts=replace(evidence.facts, virtual_ranks=2))


def test_bits_that_no_kept_value_shows_and_the_metrics_of_an_epoch_are_compared_too():
    evidence = on_virtual_ranks()
    assert different(evidence) == {}
    for traces in evidence.traces.values():
        for trace in traces:
            trace.bits = {step: {"buffer 1.count": "a", "weight 0": "b"} for step in trace.losses}
    assert different(evidence) == {}
    evidence.traces[1, "main"][0].bits[2]["buffer 1.count"] = "c"
    row = checks(evidence)["2 ranks"]
    assert (row.status, row.first_step, row.first_parameter) == ("different", 2, "1.count")
    assert row.what == "buffer"
    evidence = on_virtual_ranks()
    for traces in evidence.traces.values():
        traces[0].epochs[3] = {"loss": 0.5, "accuracy": 0.25}
    evidence.traces[1, "resumed"][0].epochs[3]["accuracy"] = 0.25 + 2**-50
    assert list(different(evidence)) == ["stop and resume"]
    assert checks(evidence)["stop and resume"].what == "accuracy of the epoch"


# What is wrong → the arguments, and what of them the one message names.
REFUSED = {
    "fewer than the ranks": (["--virtual-ranks", "2", "--nproc", "1,3"], "--virtual-ranks 3"),
    "something accepted": (["--virtual-ranks", "2", "--accept", "dropout"], "--accept dropout"),
    "a tolerance": (["--virtual-ranks", "2", "--tolerance", "0.1"], "--tolerance 0.1"),
    "Lightning": (["--virtual-ranks", "2", "--engine", "lightning"], "--engine"),
}


@pytest.mark.parametrize(("arguments", "named"), REFUSED.values(), ids=REFUSED)
def test_what_leaves_no_bits_to_compare_is_refused_with_one_message(arguments, named, tmp_path):
    recipe = planted.write(tmp_path, name="v_good.py")
    with pytest.raises(UserError, match=named):
        _verify([str(recipe), *arguments])


# The recipe's data → the number of virtual ranks that it is too few for, and the message's words.
STREAM = """
class Endless(torch.utils.data.IterableDataset):
    def __iter__(self): yield from zip(*data().train)
recipe = replace(recipe, data=lambda: Splits(train=Endless()))
"""


@pytest.mark.parametrize(
    ("text", "virtual", "message"),
    [
        (STREAM, 2, "--virtual-ranks takes no stream"),
        ("", 64, "--virtual-ranks 64 is more than the 60 training samples"),
        ("", 40, "60 training samples are too few .* --virtual-ranks 40"),  # for two batches
    ],
)
def test_data_that_virtual_ranks_cannot_share_is_refused(text, virtual, message, tmp_path):
    recipe = planted.write(tmp_path, text, name="v_data.py")
    with pytest.raises(UserError, match=message):
        verified(recipe, f"--virtual-ranks={virtual}", folder=tmp_path / "ranks")


def test_ranks_that_nobody_chose_are_never_more_than_the_virtual_ones(tmp_path, monkeypatch, capfd):
    def launch(num_ranks, words, task, _elastic):
        return launch_forked(words[1:], tmp_path / "ranks", num_ranks, Path(task))

    monkeypatch.setattr("samestep.launch.ranks.start.run_ranks", launch)
    recipe = planted.write(tmp_path, name="v_two.py")
    assert _verify([str(recipe), "--virtual-ranks", "2", "--quick", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["world_sizes"] == [1, 2]
