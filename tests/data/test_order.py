"""The order of samples: each once an epoch, on any number of ranks, from any step on."""

from collections import Counter
from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep import Recipe, Settings, UserError, uniform
from samestep.core.data import keyed_random as keys
from samestep.core.data import order as orders
from samestep.core.data.augment import crop, flip, normalise
from samestep.core.data.keyed_random import mix, sample_keys
from samestep.core.data.order import Ordering, epoch_order, permuted, share, step_range
from samestep.core.data.recipe_data import ordering_of

SEEDS = st.integers(0, 2**63 - 2)
EPOCHS = st.integers(0, 1000)
WORLD_SIZES = st.integers(1, 9)


@given(st.integers(1, 120), st.integers(1, 40), st.booleans(), WORLD_SIZES)
@settings(max_examples=150)
def test_steps_take_every_position_once(num_samples, global_batch, drop_last, world_size):
    """The ranks' shares of a step are consecutive, and differ by at most one sample."""
    steps = range(orders.steps_per_epoch(num_samples, global_batch, drop_last=drop_last))
    positions = [step_range(num_samples, global_batch, step) for step in steps]
    remainder = num_samples % global_batch
    taken = num_samples - remainder if drop_last else num_samples
    assert [k for part in positions for k in part] == list(range(taken))
    sizes = [global_batch] * (num_samples // global_batch)
    assert [len(part) for part in positions] == sizes + [remainder] * (taken % global_batch > 0)
    for part in positions:
        shares = [share(part, rank, world_size) for rank in range(world_size)]
        assert [k for one in shares for k in one] == list(part)
        assert len(shares[0]) - len(shares[-1]) <= 1
        assert [len(one) for one in shares] == sorted(map(len, shares), reverse=True)


@given(SEEDS, SEEDS, EPOCHS, EPOCHS)
@settings(max_examples=60)
def test_each_seed_and_epoch_has_an_order_of_its_own(seed, other_seed, epoch, other_epoch):
    order = epoch_order(100, seed, epoch)
    assert sorted(order.tolist()) == list(range(100))
    assert torch.equal(order, epoch_order(100, seed, other_epoch)) == (epoch == other_epoch)
    assert torch.equal(order, epoch_order(100, other_seed, epoch)) == (seed == other_seed)
    # With seed + epoch, run 1's second epoch would be run 2's first.
    assert not torch.equal(epoch_order(100, seed, 1), epoch_order(100, seed + 1, 0))


@given(st.integers(1, 3000), SEEDS, st.data())
@settings(max_examples=150)
def test_a_permutation_without_a_table_has_each_sample_once(num_samples, key, data):
    whole = permuted(num_samples, key, torch.arange(num_samples))
    assert sorted(whole.tolist()) == list(range(num_samples))
    start = data.draw(st.integers(0, num_samples))
    stop = data.draw(st.integers(start, num_samples))
    assert torch.equal(permuted(num_samples, key, torch.arange(start, stop)), whole[start:stop])


def test_without_a_table_it_is_as_a_fair_shuffle_also_of_a_large_index(monkeypatch):
    num, keys = 37, 600
    drawn = torch.stack([permuted(num, key, torch.arange(num)) for key in range(keys)])
    # Chi-squared with 36 degrees of freedom is above 80 once in 30,000 times.
    for place in (0, 17, num - 1):
        counts = torch.bincount(drawn[:, place], minlength=num).double()
        assert float(((counts - keys / num) ** 2 / (keys / num)).sum()) < 80
    gaps = torch.bincount((drawn[:, 1] - drawn[:, 0]) % num, minlength=num)[1:].double()
    expected = keys / (num - 1)
    assert float(((gaps - expected) ** 2 / expected).sum()) < 80
    order = epoch_order(10**12, 1, 2)
    assert len(order) == 10**12
    far = order[10**12 - 5 : 10**12]
    assert len({*far.tolist()}) == 5
    assert int(far.max()) < 10**12
    assert torch.equal(far, permuted(10**12, orders.mix(1, 2), 10**12 - 5 + torch.arange(5)))
    assert Ordering().record(10**12) == {"permutation": "lazy"}
    assert Ordering().record(orders.LAZY_FROM - 1) == {}
    monkeypatch.setattr(orders, "_WINDOW", 7)
    assert torch.equal(order[3:40], torch.cat([order[k : k + 1] for k in range(3, 40)]))


@given(st.integers(1, 60), st.integers(1, 12), st.booleans())
def test_each_slot_reads_on_where_it_was(num_samples, batch, drop_last):
    """As a table of `batch` rows cut from the data, of which a step is a column."""
    batch = min(num_samples, batch)
    how = {"global_batch": batch, "drop_last": drop_last}
    order = epoch_order(num_samples, 1, 2, Ordering(order="columns"), **how)
    steps = orders.steps_per_epoch(num_samples, batch, drop_last=drop_last)
    ranges = [step_range(num_samples, batch, step) for step in range(steps)]
    taken = [order[one.start : one.stop].tolist() for one in ranges]
    columns = [[step[slot] for step in taken if slot < len(step)] for slot in range(batch)]
    if drop_last:
        size = num_samples // batch
        parts = [range(slot * size, (slot + 1) * size) for slot in range(batch)]
    else:
        parts = [share(range(num_samples), slot, batch) for slot in range(batch)]
    assert columns == [list(part) for part in parts]


def test_draws_are_uniform_or_by_weights_which_are_numbers_or_of_the_data():
    many = [epoch_order(50, 3, epoch, Ordering(order="replacement"))[0:50] for epoch in range(400)]
    assert {len(drawn) for drawn in many} == {50}
    counts = torch.bincount(torch.cat(many), minlength=50).double()
    assert float(((counts - 400) ** 2 / 400).sum()) < 100  # 49 degrees of freedom
    assert len(many[0].unique()) < 50
    weights = torch.tensor([1.0, 0.0, 2.0, 5.0] * 500, dtype=torch.float64)
    ordering = Ordering(order="weighted", weights=weights)
    drawn = torch.cat([epoch_order(2000, 1, epoch, ordering)[0:2000] for epoch in range(20)])
    found = Counter((drawn % 4).tolist())
    for kind, part in ((0, 1 / 8), (2, 2 / 8), (3, 5 / 8)):
        assert abs(found[kind] / 40_000 - part) < 5 * (part * (1 - part) / 40_000) ** 0.5
    data, how = (torch.arange(4.0), torch.arange(4)), Settings(order="weighted")
    given = [[0, 1, 2, 3], torch.arange(4), lambda pair: pair[0] * 1.0, lambda pair: pair[1]]
    found = [ordering_of(weighted_by(w), how, data) for w in given]
    found.append(ordering_of(weighted_by(torch.arange(8).view(4, 2)[:, 0] // 2), how, data))
    assert len({str(one.record(4)) for one in found}) == 1
    assert found[0].weights.dtype == torch.float64
    recipe = Recipe(model=list, data=list, weights=given[0])
    assert recipe.settings["order"] == "weighted"
    assert recipe.with_options(None).weights is given[0]
    by_tensor = Recipe(model=list, data=list, weights=given[1])
    assert by_tensor.with_options(None) is by_tensor
    asking = Recipe(model=list, data=list, weights=lambda pair, options: pair[0] * options)
    assert ordering_of(asking.with_options(2), how, data).weights.tolist() == [0, 2, 4, 6]
    plain = Recipe(model=list, data=list, weights=given[0], settings={"order": "shuffled"})
    assert ordering_of(plain, Settings(**plain.settings), data) == Ordering()


@given(st.lists(st.sampled_from([0.0, 1e-300, 0.5, 1.0, 3.0, 1e300]), min_size=1, max_size=20))
def test_a_sample_of_weight_0_is_never_drawn(weights):
    ordering = Ordering(order="weighted", weights=torch.tensor(weights, dtype=torch.float64))
    if any(weights):
        drawn = epoch_order(len(weights), 1, 2, ordering)[0 : len(weights)].tolist()
        assert all(weights[sample] > 0 for sample in drawn)


def weighted_by(weights):
    return Recipe(model=list, data=list, weights=weights)


@pytest.mark.parametrize(
    ("weights", "told"),
    {
        "negative": ([1, -0.5, 1], "-0.5 for sample 1"),
        "NaN": ([1, 1, float("nan")], "nan for sample 2"),
        "infinite": ([float("inf"), 1, 1], "inf for sample 0"),
        "all zero": ([0, 0, 0], "all 3 weights are 0"),
        "too few": ([1, 1], "2 numbers .* 3"),
        "a matrix": (torch.ones(3, 2), "3 × 2 numbers"),
        "words": (["a", "b", "c"], "Recipe.weights=…. failed"),
        "a function that fails": (lambda data: data.weights, "AttributeError"),
        "none": (None, "--order weighted"),
    }.values(),
)
def test_weights_that_cannot_be_drawn_by_are_refused(weights, told):
    data, recipe = (torch.zeros(3), torch.zeros(3)), Recipe(model=list, data=list, weights=weights)
    with pytest.raises(UserError, match=told):
        ordering_of(recipe, Settings(order="weighted"), data)


@given(st.integers(1, 400), st.integers(1, 9), SEEDS)
@settings(max_examples=60)
def test_batches_by_length_hold_each_sample_once_and_little_padding(num_samples, batch, seed):
    lengths = torch.rand(num_samples, dtype=torch.float64)
    grouped = epoch_order(num_samples, seed, 1, Ordering(lengths=lengths), global_batch=batch)
    plain = epoch_order(num_samples, seed, 1)
    assert sorted(grouped.tolist()) == list(range(num_samples))
    full = num_samples // batch * batch
    assert torch.equal(grouped[full:], plain[full:])
    of_batches = (lengths[order[:full]].view(-1, batch) for order in (grouped, plain))
    less, more = (float((of.amax(1) - of.amin(1)).sum()) for of in of_batches)
    assert less <= more + 1e-9
    if batch > 1 and full // batch in range(30, 50):  # one window: sorted, then cut
        ranks = lengths[grouped[:full]].argsort().argsort().view(-1, batch)
        assert bool((ranks.amax(1) - ranks.amin(1) == batch - 1).all())
        firsts = [batch.tolist().index(batch.min()) for batch in ranks]
        assert len({*firsts}) > 1, "the shortest is not always the first"


@given(st.lists(st.integers(0, 30), min_size=1, max_size=80), st.integers(30, 200), SEEDS)
@settings(max_examples=60)
def test_batches_by_tokens_hold_each_sample_once_and_never_more_tokens(lengths, most, seed):
    known = torch.tensor(lengths, dtype=torch.float64)
    ordering = Ordering(lengths=known, batch_tokens=most)
    sizes = ordering.token_cut.sizes
    for epoch in (0, 1):
        order, ends = epoch_order(len(lengths), seed, epoch, ordering), ordering.ends(seed, epoch)
        assert sorted(order.tolist()) == list(range(len(lengths)))
        batches = [order[a:b] for a, b in zip([0, *ends], ends, strict=False)]
        assert sorted(map(len, batches)) == sorted(sizes)
        spans = sorted((float(known[one].min()), float(known[one].max())) for one in batches)
        assert all(one[1] <= other[0] for one, other in pairwise(spans))
        assert all(len(one) * max(1, float(known[one].max())) <= most for one in batches)
    by_length = [max(1, length) for length in sorted(lengths)]
    for end, size in zip(accumulate(sizes), sizes, strict=True):
        assert end == len(lengths) or by_length[end] * (size + 1) > most


def test_batches_by_tokens_change_by_epoch_and_need_lengths_that_fit():
    lengths = torch.tensor([5, 5, 5, 5, 9, 9, 9, 9, 9, 9] * 5, dtype=torch.float64)
    ordering = Ordering(lengths=lengths, batch_tokens=45)
    one, other = (
        {frozenset(order[a:b].tolist()) for a, b in zip([0, *ends], ends, strict=False)}
        for epoch in (0, 1)
        for order, ends in [(epoch_order(50, 1, epoch, ordering), ordering.ends(1, epoch))]
    )
    assert len(one) == len(other) == 9
    assert one != other
    assert len({tuple(ordering.ends(1, epoch)) for epoch in range(6)}) > 1
    data, recipe = (torch.zeros(3), torch.zeros(3)), Recipe(model=list, data=list)
    with pytest.raises(UserError, match="--group-by-length: the recipe has no lengths"):
        ordering_of(recipe, Settings(group_by_length=True), data)
    with pytest.raises(UserError, match=r"--group-by-length .* --order columns"):
        Settings(group_by_length=True, order="columns")
    lengths = torch.tensor([3.0, 41.5, 50.0])
    with pytest.raises(UserError, match=r"--batch-tokens 40 .* 50 tokens \(2 of 3"):
        _ = Ordering(lengths=lengths, batch_tokens=40).token_cut
    assert Ordering(lengths=lengths, batch_tokens=50).token_cut == ((1, 1, 1), 1)


def test_the_order_is_the_one_that_earlier_versions_had():
    """A run must resume under a newer version: if this fails, every old run would change."""
    assert epoch_order(12, 42, 0).tolist() == [6, 1, 2, 8, 10, 3, 7, 11, 0, 4, 5, 9]
    assert epoch_order(12, 42, 1).tolist() == [6, 4, 5, 9, 1, 8, 3, 2, 0, 11, 10, 7]
    shares = [share(step_range(12, 5, step), 1, 2) for step in range(3)]
    assert shares == [range(3, 5), range(8, 10), range(11, 12)]


ALL_SEEDS = st.integers(0, 2**63 - 1)


def test_the_numbers_are_those_of_splitmix64_and_normalising_gives_mean_0_and_deviation_1():
    """The generator's published first outputs for the seed 1234567."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    states = [(1234567 + k * keys._GOLDEN) & (2**64 - 1) for k in (1, 2, 3)]
    assert [keys._mix64(state) for state in states] == published
    drawn = uniform(torch.tensor([1234567]), 3)
    assert drawn.tolist() == [[(value >> 40) / 2**24 for value in published]]
    assert mix(42, 0) == 765482523205348131
    found = sample_keys(42, 3, torch.arange(2)).tolist()
    assert found == [-2706933286377414808, -1890242524682471187]
    images = some_images(2)
    low, high = torch.zeros(2, 2), torch.full((2, 2), 1 - 2.0**-24)
    assert (crop(images, low, padding=4)[:, :, 4:, 4:] == images[:, :, :28, :28]).all()
    assert (crop(images, high, padding=4)[:, :, :28, :28] == images[:, :, 4:, 4:]).all()
    images = some_images(6)
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.25, 0.2)
    out = normalise(images, mean, std)
    shift, scale = (torch.tensor(numbers).view(3, 1, 1) for numbers in (mean, std))
    expected = (images.double() / 255 - shift) / scale
    assert out.dtype == torch.float32
    assert float((out - expected).abs().max()) < 1e-5


@given(ALL_SEEDS, EPOCHS, st.lists(st.integers(0, 2**40), min_size=1, max_size=30))
def test_a_samples_key_is_the_mixture_of_seed_epoch_and_sample(seed, epoch, samples):
    base = mix(seed, epoch)
    expected = [keys._mix64((base + sample * keys._GOLDEN) % 2**64) for sample in samples]
    for kind in (torch.int64, torch.int32) if max(samples) < 2**31 else (torch.int64,):
        found = sample_keys(seed, epoch, torch.tensor(samples, dtype=kind)).tolist()
        assert [key % 2**64 for key in found] == expected


CUTS = st.lists(st.integers(1, 39), max_size=5)


@given(ALL_SEEDS, EPOCHS, st.permutations(range(40)), CUTS, st.integers(1, 6))
def test_what_is_drawn_for_a_sample_does_not_depend_on_its_batch(seed, epoch, order, cuts, draws):
    whole = uniform(sample_keys(seed, epoch, torch.arange(40)), draws + 3)[:, :draws]
    batches = torch.tensor(order).tensor_split(sorted(cuts))
    drawn = torch.cat([uniform(sample_keys(seed, epoch, batch), draws) for batch in batches])
    assert torch.equal(drawn, whole[torch.tensor(order)])


@given(st.lists(ALL_SEEDS, min_size=1, max_size=4), st.lists(ALL_SEEDS, min_size=1, max_size=4))
def test_mix_gives_63_bits_and_tells_its_arguments_apart(one, other):
    assert 0 <= mix(*one) < 2**63
    assert (mix(*one) == mix(*other)) == (one == other)


def slowly(image, draws, padding):
    """Crop and flip one image (channels, height, width), pixel by pixel as the words say it."""
    channels, height, width = image.shape
    top, left = (int(np.floor(d * (2 * padding + 1))) - padding for d in draws[:2])
    out = np.zeros_like(image)
    for c in range(channels):
        for y in range(height):
            for x in range(width):
                if 0 <= y + top < height and 0 <= x + left < width:
                    out[c, y, x] = image[c, y + top, x + left]
    return out[:, :, ::-1] if draws[2] < 0.5 else out


def some_images(count, height=32, width=32):
    generator = torch.Generator().manual_seed(0)
    shape = (count, 3, height, width)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


@settings(max_examples=15)
@given(st.integers(0, 2**62), st.integers(1, 5), st.integers(3, 9), st.integers(3, 9))
def test_a_batch_is_cropped_and_flipped_as_its_images_are_one_by_one(seed, padding, height, width):
    images = some_images(4, height, width)
    draws = uniform(sample_keys(seed, 0, torch.arange(4)), 3)
    batch = flip(crop(images, draws[:, :2], padding=padding), draws[:, 2])
    for image, row, result in zip(images.numpy(), draws.numpy(), batch.numpy(), strict=True):
        assert (slowly(image, row, padding) == result).all()
