"""The tree of sums: the same bits for any number of ranks, of few partial sums at a time."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.core.data.blocks import held_parts, part_of
from samestep.core.training import tree
from samestep.core.training.tree import TreeReduce, TreeSum, add_up, roots_over
from samestep.launch.ranks.world import World
from tests.processes import run_ranks


@st.composite
def divisions(draw) -> tuple[int, int, int]:
    """Draw virtual ranks, ranks, and how many of the virtual ranks have samples."""
    parts = draw(st.integers(1, 64))
    return parts, draw(st.integers(1, parts)), draw(st.integers(1, parts))


def worlds(parts: int, ranks: int) -> list[World]:
    return [World(rank=r, world_size=ranks, virtual_ranks=parts) for r in range(ranks)]


def held_roots(values, world, present):
    tree = TreeSum(lambda left, right: left + right)
    for part in held_parts(world):
        if part < present:
            tree.push(values[part], part)
    return tree.roots


@settings(max_examples=50, deadline=None)
@given(divisions(), st.integers(0, 2**32))
def test_the_sum_has_the_same_bits_on_any_number_of_ranks(division, seed):
    parts, ranks, present = division
    generator = torch.Generator().manual_seed(seed)
    values = list(torch.randn(parts, 3, generator=generator) * 10 ** torch.rand(parts, 1) ** 9)
    across = TreeSum(lambda left, right: left + right)
    for world in worlds(parts, ranks):
        for level, number, value in held_roots(values, world, present):
            across.push(value, number, level)
    assert torch.equal(across.total(), add_up(values[:present], lambda a, b: a + b))


def by_definition(values, low, size):
    """Add up [low, low + size), size a power of two; what lies beyond the end is absent."""
    if size == 1:
        return values[low]
    half = size // 2
    left = by_definition(values, low, half)
    if low + half >= len(values):
        return left
    return left + by_definition(values, low + half, half)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=64))
def test_the_tree_is_the_one_of_its_definition(values):
    size = 1 << (len(values) - 1).bit_length()
    assert add_up(values, lambda a, b: a + b) == by_definition(values, 0, size)


@settings(max_examples=50, deadline=None)
@given(divisions())
def test_a_rank_holds_few_partial_sums_at_a_time(division):
    parts, ranks, _ = division
    for world in worlds(parts, ranks):
        held, tree, most = held_parts(world), TreeSum(lambda _a, _b: None), 0
        for part in held:
            most = max(most, len(tree.roots) + 1)
            tree.push(None, part)
        assert [root[:2] for root in tree.roots] == [root[:2] for root in roots_over(held)]
        if parts % ranks == 0 and (parts // ranks).bit_count() == 1:
            assert len(tree.roots) == 1
            assert most <= math.log2(parts / ranks) + 1
        assert most <= max(1, 2 * math.log2(parts))


@settings(max_examples=50, deadline=None)
@given(divisions(), st.integers(0, 500))
def test_the_shares_of_ranks_are_those_of_their_virtual_ranks(division, samples):
    parts, ranks, _ = division
    positions = range(100, 100 + samples)
    found = [
        position
        for world in worlds(parts, ranks)
        for part in held_parts(world)
        for position in part_of(positions, part, world)
    ]
    assert found == list(positions)


CASES = ((5, 5), (5, 2), (4, 4))  # virtual ranks, and how many of them have samples


def reduced() -> list[list[torch.Tensor]]:
    """Add up tensors of odd shapes, layouts and types over ranks; runs on each of them."""
    from samestep.launch.ranks.world import find_world, join, leave

    world = find_world("cpu")
    join(world)
    kept = []
    for most in (tree._SMALL_BYTES, 0):  # exchanged once, and twice
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tree, "_SMALL_BYTES", most)
            kept += [
                _reduced(replace(world, virtual_ranks=parts), present) for parts, present in CASES
            ]
    leave(world)
    return kept


def _reduced(world: World, present: int) -> list[torch.Tensor]:
    like = [
        torch.empty(3, 5),
        torch.empty(0),
        torch.empty(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.empty(700_000),
        torch.empty(7, dtype=torch.float64),
        torch.empty((), dtype=torch.bfloat16),
    ]
    tree = TreeSum(lambda left, right: [a + b for a, b in zip(left, right, strict=True)])
    for part in held_parts(world):
        if part < present:
            generator = torch.Generator().manual_seed(part)
            drawn = [torch.randn(t.shape, generator=generator) * 10**part for t in like]
            tree.push(
                [torch.empty_like(t).copy_(d) for t, d in zip(like, drawn, strict=True)], part
            )
    sums = TreeReduce(world, [t.to("meta") for t in like], 1)(tree.roots, present)
    assert [t.stride() for t in sums] == [t.stride() for t in like]
    return [t.clone() for t in sums]


def test_tensors_of_all_kinds_add_up_to_the_same_bits_across_processes(tmp_path):
    alone = reduced()
    for found in run_ranks(reduced, 3, tmp_path):
        for sums, must in zip(found, alone, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(sums, must, strict=True))
