"""Model FLOPs are counted once, per sample, and MFU is told only of devices that are known."""

import pytest
import torch
from torch import nn

from samestep.training.flops import ModelCost, count_flops
from tests import tiny


@pytest.mark.parametrize(
    ("model", "shape", "flops"),
    [
        (nn.Linear(5, 7), (3, 5), 2 * 3 * 5 * 7),
        (nn.Conv2d(2, 4, 3), (1, 2, 6, 6), 2 * 4 * 4 * 4 * 2 * 3 * 3),
        (nn.MultiheadAttention(8, 2), (3, 2, 8), 2 * 6 * 8 * 32 + 2 * 2 * 2 * 2 * 9 * 4),
        (nn.Sequential(nn.LSTM(4, 4)), (2, 1, 4), 0),  # no formula: a part would be no count
    ],
    ids=["linear", "convolution", "attention", "lstm"],
)
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.enable_grad])
def test_a_forward_is_counted_whole_or_not_at_all(model, shape, flops, mode):
    x = torch.randn(shape)
    is_attention = isinstance(model, nn.MultiheadAttention)
    with mode():
        expected = model.eval()(*[x] * 3) if is_attention else model(x)
        found, counted = count_flops(lambda: model(*[x] * 3) if is_attention else model(x))
    torch.testing.assert_close(found, expected)
    assert counted == flops


def test_what_fails_only_while_it_is_counted_is_called_again_and_has_no_count():
    def forward():
        if torch._C._len_torch_dispatch_stack():
            raise RuntimeError
        return torch.ones(2, 2) @ torch.ones(2, 2)

    found, counted = count_flops(forward)
    assert found.tolist() == [[2.0, 2.0], [2.0, 2.0]]
    assert counted == 0


def test_an_unknown_device_or_count_gives_no_mfu_instead_of_a_wrong_one():
    assert ModelCost(peak_flops_per_s=1e12).rates(5.0) == {}
    assert ModelCost(flops_per_sample=100).rates(5.0) == {"flops_per_s": 500.0}
    known = ModelCost(flops_per_sample=100, peak_flops_per_s=2000.0)
    assert known.rates(5.0) == {"flops_per_s": 500.0, "mfu": 0.25}


def test_the_record_of_an_epoch_says_flops_and_memory(tmp_path):
    tiny.trained(tiny.write_recipe(tmp_path), tmp_path / "run", "--epochs", "1")
    (epoch,) = tiny.events(tmp_path / "run", "epoch")
    of_a_sample = 3 * 2 * (8 * 16 + 16 * 2)
    assert epoch["flops_per_s"] == pytest.approx(of_a_sample * epoch["samples_per_s"])
    assert epoch["peak_memory_bytes"] > 1 << 20
    assert "mfu" not in epoch
