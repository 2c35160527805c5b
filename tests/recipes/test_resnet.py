"""ResNet-18 is the network of the paper, with either stem."""

import math

import pytest
import torch
from torch import nn

from samestep.recipes.resnet import resnet18


@pytest.mark.parametrize(
    ("stem", "num_classes", "parameters", "side", "final"),
    # torchvision's resnet18 has 11,689,512; the small one is what others train on CIFAR-10.
    [("large", 1000, 11_689_512, 224, 7), ("small", 10, 11_173_962, 32, 4)],
)
def test_it_has_the_known_parameters_and_sizes(stem, num_classes, parameters, side, final):
    model = resnet18(num_classes, stem=stem)
    assert sum(p.numel() for p in model.parameters()) == parameters
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len([m for m in layers if getattr(m, "kernel_size", 0) != (1, 1)]) == 18
    narrow, shapes = resnet18(3, stem=stem, width=2), []
    narrow.layer4.register_forward_hook(lambda _m, _i, out: shapes.append(out.shape))
    assert narrow(torch.zeros(2, 3, side, side)).shape == (2, 3)
    assert shapes == [(2, 16, final, final)]


def test_names_are_those_of_torchvision():
    names = set(resnet18(1000, stem="large", width=1).state_dict())
    assert {"bn1.running_var", "layer4.1.bn2.bias", "layer2.0.downsample.0.weight"} <= names
    assert len(names) == 122
    assert "layer1.0.downsample.0.weight" not in names
    with pytest.raises(ValueError, match="'small' or 'large'"):
        resnet18(10, stem="medium")


def test_convolutions_begin_with_the_variance_of_he_et_al():
    torch.manual_seed(0)
    model = resnet18(10, stem="small")
    for name in ("layer1.0.conv1", "layer3.0.conv1", "layer4.1.conv2"):
        weight = model.get_submodule(name).weight
        expected = math.sqrt(2 / (weight.shape[0] * 9))
        assert float(weight.detach().std()) == pytest.approx(expected, rel=0.05), name


def test_the_shortcut_is_the_convolution_of_the_paper_with_its_stride_taken_before(monkeypatch):
    """On the CPU, where PyTorch's own 1 x 1 convolution with a stride can crash."""
    block = resnet18(10, stem="small", width=4).layer2[0]
    images = torch.randn(2, 4, 9, 7)
    shortcut, convolve, strides = block.downsample[0], nn.functional.conv2d, []
    expected = convolve(images, shortcut.weight, stride=2)
    monkeypatch.setattr(
        nn.functional, "conv2d", lambda *a, **k: strides.append((a, k)) or convolve(*a, **k)
    )
    torch.testing.assert_close(shortcut(images), expected)
    assert [(len(inputs), named) for inputs, named in strides] == [(2, {})]  # images and weight
