"""Batches: the same samples from memory and from a DataLoader, on any ranks, with any workers."""

import random
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, Subset, TensorDataset

from samestep import UserError, uniform
from samestep.base.settings import OrderName
from samestep.core.data import order as order_module
from samestep.core.data.loader_source import LoaderSource
from samestep.core.data.memory_source import MemorySource
from samestep.core.data.order import Ordering, epoch_order, steps_per_epoch
from samestep.core.data.recipe_data import open_source
from samestep.launch.ranks.world import World
from tests.command_line import typed
from tests.processes import run_ranks

SEED = 11
WORLD_SIZES = (1, 2, 3)


class Listed(Dataset):
    def __init__(self, inputs, targets):
        self.inputs, self.targets = inputs, targets

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index]


class Noisy(Dataset):
    """Samples that differ at each reading, from the generators that data sets commonly use."""

    def __len__(self):
        return 23

    def __getitem__(self, index):
        drawn = [float(torch.rand(())), random.random(), float(np.random.rand())]  # noqa: NPY002
        return torch.tensor([index, *drawn, float(torch.randn(()))]), index


def part_of(pair):
    """Make these the part that random_split makes of more samples, which lie in another order."""
    longer = TensorDataset(*(torch.cat([part, part.flip(0)]) for part in pair))
    return Subset(longer, [*reversed(range(len(pair[0]), len(longer)))])


KINDS = {"memory": tuple, "loader": lambda pair: Listed(*pair), "part": part_of}
BOTH_KINDS = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def samples(num):
    """Return inputs (num, 2) uint8 that show the sample's number, and it as the target."""
    numbers = torch.arange(num)
    return torch.stack([numbers, 255 - numbers], dim=1).to(torch.uint8), numbers


def source(data, rank=0, world_size=1, *, seed=SEED, dtype=torch.float32, num_workers=0, **parts):
    world = World(rank=rank, world_size=world_size)
    return open_source(data, world, seed=seed, dtype=dtype, num_workers=num_workers, **parts)


def steps_of(one, epoch=0, first_step=0, *, global_batch=4, drop_last=False):
    """Return a rank's rows of each step: {step: (inputs, targets, weight, global size)}."""
    taken = {}
    for block in one.blocks(epoch, first_step, global_batch=global_batch, drop_last=drop_last):
        for k in range(block.num_steps):
            part = block.parts[k] if block.parts else block.part(k, 1)
            assert len(part.targets) == part.rows
            assert part.first_step not in taken
            taken[part.first_step] = (part.inputs, part.targets, part.weight, part.global_size)
    return taken


def together(data, world_size, epoch=0, first_step=0, *, global_batch=4, drop_last=False, **how):
    """Return the inputs and targets of each step over all ranks, stand-ins left out."""
    cut = {"global_batch": global_batch, "drop_last": drop_last}
    ranks = [
        steps_of(source(data, rank, world_size, **how), epoch, first_step, **cut)
        for rank in range(world_size)
    ]
    assert all(list(rank) == list(ranks[0]) for rank in ranks), "ranks must take the same steps"
    for step in ranks[0]:
        counted = sum(len(rank[step][1]) for rank in ranks if rank[step][2])
        assert {rank[step][3] for rank in ranks} == {counted}
    return {
        step: tuple(torch.cat([rank[step][k] for rank in ranks if rank[step][2]]) for k in (0, 1))
        for step in ranks[0]
    }


def same(one, other):
    assert list(one) == list(other)
    return all(
        torch.equal(one[k][0], other[k][0]) and torch.equal(one[k][1], other[k][1]) for k in one
    )


ARGUMENTS = {"epoch": st.integers(0, 5), "first_step": st.integers(0, 12)}
ARGUMENTS |= {"global_batch": st.integers(1, 20), "drop_last": st.booleans()}
arguments = st.fixed_dictionaries({**ARGUMENTS, "seed": st.integers(0, 1000)})


@BOTH_KINDS
@pytest.mark.parametrize("order", [*get_args(OrderName), "by length"])
@given(st.integers(1, 50), arguments, st.booleans())
@settings(max_examples=20)
def test_every_order_is_read_alike_on_any_ranks_and_from_any_step_on(kind, order, num, how, lazy):
    data, batch = samples(num), min(num, how["global_batch"])
    weights = (torch.arange(num) % 3 + 1).double() if order == "weighted" else None
    ordering = Ordering(order=order, weights=weights)
    if order == "by length":
        ordering = Ordering(lengths=(torch.arange(num) % 7).double())
    how |= {"global_batch": batch, "ordering": ordering}
    how["drop_last"] &= order not in ("replacement", "weighted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order_module, "LAZY_FROM", 0 if lazy else 1 << 24)
        cut = {"global_batch": batch, "drop_last": how["drop_last"]}
        whole = epoch_order(num, how["seed"], how["epoch"], ordering, **cut)[0:num]
        one, *others = (together(kind(data), size, **how) for size in WORLD_SIZES)
    assert all(same(one, other) for other in others)
    last = steps_per_epoch(num, batch, drop_last=how["drop_last"])
    assert list(one) == list(range(how["first_step"], last))
    for step, (inputs, targets) in one.items():
        assert torch.equal(targets, whole[step * batch : (step + 1) * batch])
        assert torch.equal(inputs, data[0][targets])


@BOTH_KINDS
@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.integers(9, 40), st.data())
@settings(max_examples=20)
def test_batches_by_tokens_are_read_alike_on_any_ranks(kind, lengths, most, data):
    ordering = Ordering(lengths=torch.tensor(lengths).double(), batch_tokens=most)
    first = data.draw(st.integers(0, len(ordering.token_cut.sizes)))
    how = {"epoch": 1, "first_step": first, "ordering": ordering}
    pair = samples(len(lengths))
    one, *others = (together(kind(pair), size, **how) for size in WORLD_SIZES)
    assert all(same(one, other) for other in others)
    order, ends = epoch_order(len(lengths), SEED, 1, ordering), ordering.ends(SEED, 1)
    assert list(one) == list(range(first, len(ends)))
    for step, (_, targets) in one.items():
        assert torch.equal(targets, order[ends[step - 1] if step else 0 : ends[step]])


def test_a_loader_looks_only_a_few_batches_ahead_and_draws_anew_in_another_epoch():
    """The steps of a large index are not listed: what is not asked for is not made."""
    looked = []

    class Endless(Listed):
        def __len__(self):
            return 10**12

        def __getitem__(self, index):
            looked.append(index)
            return torch.zeros(1), index

    one = source(Endless(None, None))
    blocks = one.blocks(0, 7 * 10**9, global_batch=100, drop_last=False)
    taken = [next(blocks) for _ in range(3)]
    assert [block.first_step for block in taken] == [7 * 10**9 + k for k in range(3)]
    assert len({*looked}) == 300
    assert max(looked) > 2**34
    one.close()

    def drawn(epoch, seed):
        inputs, targets = together(Noisy(), 1, epoch, global_batch=23, seed=seed)[0]
        return inputs[targets.argsort(), 1:]

    here = drawn(0, 1)
    assert all(len(column.unique()) == 23 for column in here.T)
    for other in (drawn(1, 1), drawn(0, 2)):
        assert not (here == other).any()


def _shift(inputs, keys):
    assert inputs.dtype == torch.uint8, "stored bytes stay bytes"
    return inputs.float() + uniform(keys, 2)


def _some_epochs(world_size, num_workers, augment):
    """Return what ranks read together: one loader each, for several epochs from any step on."""
    data = Listed(*samples(23)) if augment else Noisy()
    how = {"num_workers": num_workers, "augment": augment}
    ranks, taken = [source(data, rank, world_size, **how) for rank in range(world_size)], {}
    for epoch, first_step in ((0, 0), (1, 3), (2, 4)):
        each = [steps_of(rank, epoch, first_step, global_batch=5) for rank in ranks]
        for step in each[0]:
            taken[epoch, step] = tuple(torch.cat([one[step][k] for one in each]) for k in (0, 1))
    return taken


def _with_workers(augments):
    return [[_some_epochs(size, 2, augment) for size in (1, 2)] for augment in augments]


def test_what_is_read_and_drawn_is_the_same_on_any_ranks_and_with_any_workers(tmp_path):
    augments = (None, _shift)
    (with_workers,) = run_ranks(_with_workers, 1, tmp_path, augments)
    for augment, found in zip(augments, with_workers, strict=True):
        alone = _some_epochs(1, 0, augment)
        assert all(same(one, alone) for one in (*found, _some_epochs(3, 0, augment)))


DRAWS = {
    "torch": lambda: float(torch.rand(())),
    "Python": random.random,
    "NumPy": lambda: float(np.random.rand()),  # noqa: NPY002
    "the seed": lambda: torch.initial_seed() % 1000,
    "put back": lambda: (s := torch.get_rng_state(), torch.rand(()), torch.set_rng_state(s))[1],
    "Python's": lambda: (s := random.getstate(), random.random(), random.setstate(s))[1],
    "its seed": lambda: torch.default_generator.initial_seed() % 1000,
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_data_set_that_begins_to_draw_is_read_as_if_it_always_had(name):
    class Sometimes(Noisy):
        def __getitem__(self, index):
            drawn = DRAWS[name]() if index > 11 or name == "its seed" else index
            return torch.tensor(float(drawn)), index

    how = {"global_batch": 8, "drop_last": True}
    assert same(*(together(Sometimes(), n, **how) for n in (1, 8))), "8: one by one"
    one, few = ((together(Listed(*samples(23)), n, **how), random.random())[1] for n in (1, 8))
    assert one == few, "what is drawn next is the same"


@BOTH_KINDS
def test_floating_point_inputs_and_targets_take_the_type_of_the_model(kind):
    """Else a regression on float64 targets fails in the backward of a float32 model."""
    data = kind((torch.rand(9, 2, dtype=torch.float64), torch.rand(9, dtype=torch.float64)))
    one = source(data, dtype=torch.float32)
    for inputs, targets, *_ in (*steps_of(one).values(), *one.evaluation(4)):
        assert inputs.dtype == targets.dtype == torch.float32


@BOTH_KINDS
@given(st.integers(1, 40), st.integers(1, 50), st.integers(1, 20))
@settings(max_examples=60)
def test_an_evaluation_reads_each_sample_once_on_any_ranks(kind, num, world_size, batch_size):
    data, read = kind(samples(num)), []
    for rank in range(world_size):
        one = source(data, rank, world_size, augment=_shift)
        for inputs, targets, *_ in one.evaluation(batch_size):
            assert 0 < len(targets) <= batch_size
            assert torch.equal(inputs, samples(num)[0][targets]), "evaluations are not augmented"
            read += targets.tolist()
    assert sorted(read) == list(range(num))


@BOTH_KINDS
@pytest.mark.parametrize(("num", "global_batch"), [(7, 3), (8, 2)])
def test_a_rank_without_a_share_stands_in_with_weight_0(kind, num, global_batch):
    """It must take part in the step's collectives, so it gets rows, but they do not count."""
    for rank in range(4):
        taken = steps_of(source(kind(samples(num)), rank, 4), global_batch=global_batch)
        for step, (_inputs, targets, weight, global_size) in taken.items():
            size = min(global_batch, num - step * global_batch)
            assert (global_size, weight) == (size, 1.0 if rank < size else 0.0)
            assert len(targets) == (1 if rank < size else size)


@given(st.integers(1, 700), st.integers(1, 9), st.integers(0, 80), st.integers(1, 3))
@settings(max_examples=40)
def test_a_resumed_epoch_has_the_same_blocks_from_there_on(num, batch, first_step, world_size):
    """Compiled steps are grouped by block, and rounding depends on the grouping."""
    one = source((torch.zeros(num, 1).expand(-1, 4096), torch.arange(num)), 0, world_size)

    def ends(start):
        blocks = one.blocks(0, start, global_batch=batch, drop_last=False)
        return [(block.first_step, block.num_steps) for block in blocks]

    whole = ends(0)
    assert ends(first_step) == [
        (max(start, first_step), start + count - max(start, first_step))
        for start, count in whole
        if start + count > first_step
    ]
    most = one.steps_per_block(batch)
    assert most.bit_count() == 1
    counts = [count for _, count in whole]
    assert set(counts[:-2]) <= {most}
    assert max(counts) <= most


EMPTY = samples(0)
WRONG = {
    "a number": (3, r"int.*\(inputs, targets\)"),
    "numpy arrays": ((np.zeros((3, 2)), np.zeros(3)), r"ndarray.*\(inputs, targets\)"),
    "three tensors": (tuple(torch.zeros(3) for _ in range(3)), r"3.*\(inputs, targets\)"),
    "unequal numbers": ((torch.zeros(9, 2), torch.zeros(8)), "9 inputs and 8 targets"),
    "nothing in memory": (EMPTY, "no samples"),
    "nothing to load": (Listed(*EMPTY), "no samples"),
}


@pytest.mark.parametrize(("data", "told"), WRONG.values(), ids=WRONG.keys())
def test_data_of_a_wrong_kind_is_named_with_what_is_right(data, told):
    with pytest.raises(UserError, match=f"(?s){told}"):
        source(data)


class Doubled(TensorDataset):
    def __getitem__(self, index):
        inputs, targets = super().__getitem__(index)
        return inputs * 2, targets


def test_only_what_is_known_to_be_two_tensors_is_held_in_memory_without_a_copy():
    inputs, targets = samples(5)
    assert isinstance(source((inputs, targets)), MemorySource)
    assert isinstance(source(TensorDataset(inputs, targets)), MemorySource)
    assert isinstance(source(Listed(inputs, targets)), LoaderSource)
    assert isinstance(source([(torch.zeros(2), 0), (torch.ones(2), 1)]), LoaderSource)
    ((read, its, *_),) = source(Doubled(inputs, targets)).evaluation(5)
    assert torch.equal(read, inputs * 2)
    assert torch.equal(its, targets)
    inputs, targets = samples(9)
    assert source((inputs, targets))._inputs.data_ptr() == inputs.data_ptr()


HELD_BY_A_MODULE = """
import torch
from samestep.core.data.recipe_data import open_source
from samestep.launch.ranks.world import World
data = [(torch.zeros(2), 0)] * 8
source = open_source(data, World(), seed=1, dtype=torch.float32, num_workers=1)
for _ in source.blocks(0, 0, global_batch=4, drop_last=False): pass
print("read")
"""


def test_python_ends_where_a_loader_is_still_held():
    """Its workers ignore SIGTERM, by which Python would end them, and wait."""
    done = typed("-c", HELD_BY_A_MODULE)
    assert (done.returncode, done.stdout) == (0, "read\n"), done.stderr


@pytest.mark.parametrize("batch", [10, 96, 192])
def test_shares_of_virtual_ranks_gathered_for_many_steps_begin_where_own_memory_might(batch):
    """A kernel may round otherwise for rows that begin elsewhere; and the rows stay the same."""
    inputs, targets = torch.randn(2000, 2), torch.arange(2000)
    world = World(virtual_ranks=3)
    reader = open_source((inputs, targets), world, seed=SEED, dtype=torch.float32, num_workers=0)
    blocks = list(reader.blocks(0, 0, global_batch=batch, drop_last=False))
    parts = [part for block in blocks for part in block.parts]
    seen = torch.cat([part.targets for part in parts])
    assert [block.num_steps for block in blocks] == [1] * -(-2000 // batch)
    assert torch.equal(seen, epoch_order(2000, SEED, 0))
    assert torch.equal(torch.cat([part.inputs for part in parts]), inputs[seen])
    assert not any(t.data_ptr() % 64 for part in parts for t in (part.inputs, part.targets))
    assert len({part.inputs.untyped_storage().data_ptr() for part in parts}) < len(parts)
