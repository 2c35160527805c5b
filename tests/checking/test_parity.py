"""The first step of the ranks, beside that of one process with their joined batch."""

import pytest

from tests.checking.planted import BASE, check, codes, line_of, planted

SUMMED = """\
            for p in PARAMETERS:
                dist.all_reduce(p.grad)
"""
BY_HAND = planted(
    ("DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)))", "MODEL"),
    ("            optimizer.step()\n", SUMMED + "MEAN            optimizer.step()\n"),
    ("model.module.state_dict()", "model.state_dict()"),
)
MEAN = "                p.grad /= dist.get_world_size()\n"


def by_hand(mean=MEAN, parameters="model.parameters()"):
    """Return a script that averages gradients by itself, well or not."""
    model = "nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))"
    return planted(("MODEL", model), ("MEAN", mean), ("PARAMETERS", parameters), base=BY_HAND)


def parity(report):
    return [f for f in report.findings if f.code == "SS309"]


@pytest.mark.parametrize("text", [BASE, by_hand()], ids=["DDP", "by hand"])
def test_a_mean_over_the_ranks_is_the_step_of_the_joined_batch(text, tmp_path):
    report = check(tmp_path, text)
    assert report.findings == []
    assert not [line for line in report.not_seen if line.startswith("SS309")]


def test_gradients_that_are_added_up_are_told_with_their_factor(tmp_path):
    text = by_hand(mean="")
    (found,) = parity(check(tmp_path, text))
    assert found.line == line_of(text, "loss.backward()")
    assert "is 2 times" in found.evidence


def test_dropout_is_not_compared(tmp_path):
    report = check(tmp_path, planted(("nn.ReLU(), ", "nn.ReLU(), nn.Dropout(0.5), ")))
    assert "SS309" not in codes(report)
    assert any("SS309" in line and "random" in line for line in report.not_seen)


def test_a_scaled_loss_is_compared_with_gradients_that_are_scaled_back(tmp_path):
    text = planted(
        ("loss.backward()", "scaler.scale(loss).backward()"),
        ("optimizer.step()", "scaler.step(optimizer); scaler.update()"),
        ("    best = 0.0\n", "    best = 0.0\n    scaler = torch.amp.GradScaler('cpu')\n"),
    )
    report = check(tmp_path, text)
    assert report.findings == []
    assert not [line for line in report.not_seen if line.startswith("SS309")]
