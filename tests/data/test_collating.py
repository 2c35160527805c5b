"""A recipe's collate: every sample belongs to one step, so its batch holds each of them once."""

import re

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

from samestep.data.batches import open_source
from samestep.data.collating import Collating
from samestep.data.trees import num_rows
from samestep.errors import UserError
from samestep.ranks.world import World


def texts(*lengths):
    """Return samples of words with a class each."""
    return [(torch.full((length,), place), place) for place, length in enumerate(lengths)]


TEXTS = texts(3, 1, 4, 2, 5)


def padded(samples):
    words, classes = zip(*samples, strict=True)
    return pad_sequence(words, batch_first=True), torch.tensor(classes)


def padded_by_column(samples):
    words, _classes = zip(*samples, strict=True)
    return pad_sequence(words), pad_sequence([word.flip(0) for word in words])


def packed(samples):
    words, _classes = zip(*samples, strict=True)
    return torch.cat(words), torch.cat(words)


def packed_in_blocks(samples):
    words = torch.cat([words for words, _ in samples])
    block = torch.nn.functional.pad(words, (0, -len(words) % 8))
    return block, block


def collate(function, samples, *, whole=True):
    return Collating(samples, function, whole=whole)(samples)


WHOLE = {
    "padded": padded,
    "padded by column": padded_by_column,
    "packed": packed,
    "packed in blocks": packed_in_blocks,
}
LENGTHS = {
    "some": (3, 1, 4, 2, 5),
    "the first is a single word": (1, 3, 4, 2),
    "all but one are single words": (1, 1, 1, 2, 1),
    "one longer than the others": (6, 5, 5, 5),
    "two": (2, 3),
    "two, one of them a single word": (1, 2),
    "as many as words": (2, 2),
    "one": (7,),
    "a single word": (1,),
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("function", WHOLE.values(), ids=WHOLE)
def test_a_batch_of_all_samples_is_taken_in_whatever_form(function, lengths):
    samples = texts(*lengths)
    collating = Collating(samples, function, whole=True)
    for _ in range(2):
        batch, nothing = collating(samples)
        assert nothing is None
        torch.testing.assert_close(batch, function(samples))


def without_the_last(samples):
    return padded(samples[:-1])


def without_long_ones(samples):
    return padded([sample for sample in samples if len(sample[0]) < 4])


def with_the_first_again(samples):
    return padded([*samples, samples[0]])


WRONG = {
    "the last is dropped": (without_the_last, "leaves out 1 of 5"),
    "long ones are dropped": (without_long_ones, "leaves out 2 of 5"),
    "the first comes again": (with_the_first_again, "adds 1 of 5"),
}


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(("function", "told"), WRONG.values(), ids=WRONG)
def test_samples_that_are_dropped_or_come_twice_are_counted(function, told, whole):
    with pytest.raises(UserError) as raised:
        collate(function, TEXTS, whole=whole)
    message = str(raised.value)
    assert told in message
    assert f"{__file__}:{function.__code__.co_firstlineno}" in message


def test_samples_dropped_from_a_later_batch_are_counted(tmp_path):
    collating = Collating(TEXTS, without_long_ones, whole=True)
    collating(texts(3, 1, 2))
    with pytest.raises(UserError, match="leaves out 2 of 5"):
        collating(TEXTS)


def test_a_graph_that_is_left_out_of_a_batch_is_counted():
    class Graphs:
        def __init__(self, samples):
            self.num_graphs = len(samples)
            self.x = torch.cat([words for words, _ in samples])

        def to(self, device):
            return self

    assert collate(Graphs, TEXTS)[0].num_graphs == 5
    with pytest.raises(UserError, match="leaves out 1 of 5"):
        collate(lambda samples: Graphs(samples[1:]), TEXTS)


def test_a_collate_is_called_once_for_a_batch_that_has_a_row_for_each_sample():
    calls = []

    def counted(samples):
        calls.append(len(samples))
        return padded(samples)

    collating = Collating(TEXTS, counted, whole=True)
    for _ in range(3):
        collating(TEXTS)
    assert calls == [5, 5, 5]


@pytest.mark.parametrize("whole", [True, False])
def test_a_batch_without_a_tensor_is_refused(whole):
    with pytest.raises(UserError, match="no tensor") as raised:
        collate(
            lambda samples: ([words.tolist() for words, _ in samples], None), TEXTS, whole=whole
        )
    assert __file__ in str(raised.value)


def test_an_object_that_can_be_moved_is_a_batch():
    class Batch:
        def __init__(self, samples):
            self.words = padded(samples)

        def to(self, device):
            return self

    batch, nothing = collate(Batch, TEXTS)
    assert isinstance(batch, Batch)
    assert nothing is None
    assert num_rows(batch) is None


@pytest.mark.parametrize(
    ("function", "shown"),
    [
        (lambda samples: padded(samples)[0], "(5, 5) int64"),
        (lambda samples: {"words": padded(samples)[0]}, "'words'"),
        (lambda samples: (*padded(samples), None), "3 values"),
    ],
    ids=["a tensor", "a dict", "three"],
)
def test_without_a_forward_a_batch_has_to_be_a_pair(function, shown):
    with pytest.raises(UserError, match=re.escape(shown)) as raised:
        collate(function, TEXTS, whole=False)
    assert "forward" in str(raised.value)
    batch, _ = collate(function, TEXTS, whole=True)
    torch.testing.assert_close(batch, function(TEXTS))


def failing(samples):
    return torch.stack([words for words, _ in samples])


def test_a_collate_that_fails_is_told_with_the_users_line():
    with pytest.raises(UserError) as raised:
        collate(failing, TEXTS)
    message = str(raised.value)
    assert f"{__file__}:{failing.__code__.co_firstlineno + 1}" in message
    assert "5 samples" in message
    assert "(3,) int64" in message


def test_without_a_collate_samples_of_different_size_are_told_to_need_one():
    with pytest.raises(UserError, match="collate"):
        collate(None, TEXTS, whole=False)
    samples = texts(3, 3)
    torch.testing.assert_close(collate(None, samples, whole=False), tuple(default_collate(samples)))


def test_collate_beside_tensors_that_are_batches_already_is_refused():
    x = torch.zeros(4, 2)
    reading = {"seed": 1, "dtype": torch.float32, "num_workers": 0}
    with pytest.raises(UserError):
        open_source((x, x), World(), collate=list, **reading)
