"""Scripts whose step is not what one process would have taken."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from samestep.checking.watch.step import _average
from tests.checking.planted import BASE, check, codes, line_of, planted

DEEP = ("nn.ReLU(), nn.Linear(16, 2)", "nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 2)")
STEP = """\
            optimizer.zero_grad()
            loss = loss_of(model(inputs), labels)
            loss.backward()
            optimizer.step()
"""
SCALED = """\
            optimizer.zero_grad()
            loss = loss_of(model(inputs), labels)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
"""
ACCUMULATED = """\
            last = step % 2 == 1
            step += 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss = loss_of(model(inputs), labels) / 2
                loss.backward()
            if last:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
"""
SCALER = ("    best = 0.0\n", "    best = 0.0\n    scaler = torch.amp.GradScaler('cpu')\n")
COUNTED = (
    ("    best = 0.0\n", "    best = 0.0\n    step = 0\n"),
    ("import os\n", "import contextlib\nimport os\n"),
    (STEP, ACCUMULATED),
)
"""Right: two micro-batches per step, and one all-reduce."""


def only(report, code):
    """Return the only finding of a report, which has this code."""
    (found,) = report.findings
    assert found.code == code
    return found


def test_accumulation_that_meets_the_other_ranks_in_each_micro_batch_is_found(tmp_path):
    text = planted(
        ("with contextlib.nullcontext() if last else model.no_sync():", "if True:"),
        base=planted(*COUNTED),
    )
    report = check(tmp_path, text)
    found = only(report, "SS301")
    assert found.line == line_of(text, "loss.backward()")
    assert "2 backward passes per optimizer step" in found.evidence
    assert report.exit_code == 1


def test_clipping_on_each_rank_before_the_last_micro_batch_is_found(tmp_path):
    text = planted(
        (
            "            if last:\n                nn.utils.clip",
            "            if True:\n                nn.utils.clip",
        ),
        (
            "                optimizer.step()\n",
            "            if last:\n                optimizer.step()\n",
        ),
        base=planted(*COUNTED),
    )
    found = only(check(tmp_path, text), "SS303")
    assert found.line == line_of(text, "clip_grad_norm_")


@pytest.mark.parametrize(
    "device", ["cpu", "cuda"], ids=["as here", "as on a GPU, where it switches itself off here"]
)
@pytest.mark.filterwarnings("ignore:.*GradScaler is enabled, but CUDA is not available")
def test_clipping_what_the_scaler_has_multiplied_is_found(device, tmp_path):
    right = planted(SCALER, (STEP, SCALED.replace("cpu", device)))
    text = planted(("            scaler.unscale_(optimizer)\n", ""), base=right)
    text = text.replace("optimizer", "opt")
    found = only(check(tmp_path, text), "SS302")
    assert "scaler.unscale_(opt)\n" in found.remedy
    assert found.line == line_of(text, "clip_grad_norm_")
    assert "65536" in found.evidence


@pytest.mark.parametrize(
    "changes",
    [
        COUNTED,
        (SCALER, (STEP, SCALED)),
        (
            (", 1, gamma=0.9)", ", 3 * len(train_loader), 0.9)"),
            ("        scheduler.step()\n", ""),
            ("optimizer.step()\n", "optimizer.step()\n            scheduler.step()\n"),
        ),
        (
            SCALER,
            (
                STEP,
                SCALED.replace("            scaler.unscale_(optimizer)\n", "").replace(
                    "1.0)", "float('inf'))"
                ),
            ),
        ),
    ],
    ids=["accumulation", "a scaler", "a scheduler of steps", "a norm that is only read"],
)
def test_what_looks_alike_and_is_right_stays_silent(changes, tmp_path):
    assert check(tmp_path, planted(*changes)).findings == []


def test_losses_and_metrics_that_are_not_finite_are_judged_too(tmp_path):
    text = planted(
        ("loss_of(model(inputs), labels)", "loss_of(model(inputs), labels) * float('inf')"),
        ("torch.zeros(2)", "torch.full((2,), float('nan'))"),
    )
    assert not codes(check(tmp_path, text)) & {"SS307", "SS308", "SS402"}


def test_clipping_before_an_all_reduce_by_hand_is_found(tmp_path):
    by_hand = """\
            for p in model.parameters():
                dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
            optimizer.step()
"""
    text = planted(
        ("model = DDP(", "model = ("),
        ("            optimizer.step()\n", "            CLIP\n" + by_hand),
        ("model.module.state_dict()", "model.state_dict()"),
    ).replace("CLIP", "nn.utils.clip_grad_norm_(model.parameters(), 0.1)")
    text = text.replace(
        "op=dist.ReduceOp.AVG)", "op=dist.ReduceOp.SUM)\n                p.grad /= 2"
    )
    found = only(check(tmp_path, text), "SS303")
    assert found.line == line_of(text, "clip_grad_norm_")


COSINE = ("StepLR(optimizer, 1, gamma=0.9)", "CosineAnnealingLR(optimizer, TOTAL)")


def test_a_scheduler_that_is_stepped_once_per_rank_is_found(tmp_path):
    text = planted(
        (COSINE[0], COSINE[1].replace("TOTAL", "3")),
        ("        scheduler.step()", "        for _ in range(2):\n            scheduler.step()"),
    )
    found = only(check(tmp_path, text), "SS304")
    assert found.line == line_of(text, "scheduler.step()")
    assert "2 times per epoch" in found.evidence


@pytest.mark.parametrize(("total", "times", "expected"), [
    ("3 * len(train_loader)", 2, {"SS304"}),
    ("2 * 3 * len(train_loader)", 2, set()),
    ("3 * len(train_loader)", 1, set()),
    ("3 * len(train_set) // 8", 1, {"SS304"}),
    ("100", 1, set()),
])  # fmt: skip
def test_a_schedule_of_steps_has_to_fit_those_that_are_taken(total, times, expected, tmp_path):
    step = f"optimizer.step()\n            for _ in range({times}): scheduler.step()\n"
    text = planted(
        ("        scheduler.step()\n", ""),
        (COSINE[0], COSINE[1].replace("TOTAL", total)),
        ("optimizer.step()\n", step),
    )
    assert codes(check(tmp_path, text)) == expected


def test_a_scheduler_that_is_never_stepped_is_found(tmp_path):
    text = planted(("        scheduler.step()\n", ""))
    found = only(check(tmp_path, text), "SS305")
    assert found.line == line_of(text, "StepLR")
    assert "not stepped once in 9 optimizer steps" in found.evidence


SHARES = (
    ("sampler = DistributedSampler(train_set, shuffle=True, seed=0)", "mine = SHARE"),
    (
        "DataLoader(train_set, batch_size=8, sampler=sampler)",
        "DataLoader(mine, batch_size=8, shuffle=True)",
    ),
    ("        sampler.set_epoch(epoch)\n", ""),
)


def test_a_mean_over_shares_of_unequal_size_is_found(tmp_path):
    share = "torch.utils.data.Subset(train_set, range(0, 32) if rank else range(32, 60))"
    text = planted(*SHARES).replace("SHARE", share)
    found = only(check(tmp_path, text), "SS307")
    assert found.line == line_of(text, "loss.backward()")
    assert "step 4 the ranks have 4 and 8 samples" in found.evidence


def test_unequal_shares_that_count_for_their_size_are_right(tmp_path):
    share = "torch.utils.data.Subset(train_set, range(0, 32) if rank else range(32, 60))"
    weighted = """\
            count = torch.tensor(float(len(labels)))
            dist.all_reduce(count)
            loss = loss_of(model(inputs), labels) * len(labels) * 2 / count
"""
    text = planted(*SHARES, ("            loss = loss_of(model(inputs), labels)\n", weighted))
    assert check(tmp_path, text.replace("SHARE", share)).findings == []


SUM = "nn.functional.cross_entropy(model(inputs), labels, reduction='sum')"
MASK = "labels = labels.where(torch.rand(len(labels)) < 0.3 + 0.6 * rank, -100)\n            "
MASK += "labels[0] = 0\n            "


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("loss_of(model(inputs), labels)", {"SS308"}),
        (f"{SUM} / (labels >= 0).sum()", {"SS308"}),
        (f"{SUM} * 2 / count", set()),
    ],
    ids=["ignored targets", "own sum", "joined sum"],
)
def test_a_loss_over_each_ranks_own_tokens_is_found(loss, expected, tmp_path):
    count = "count = (labels >= 0).sum()\n            dist.all_reduce(count)\n            "
    text = planted(("loss = loss_of(model(inputs), labels)", MASK + count + "loss = " + loss))
    report = check(tmp_path, text)
    assert codes(report) == expected
    for found in report.findings:
        assert found.line == line_of(text, "loss.backward()")


def test_the_clean_script_has_no_finding_of_its_steps(tmp_path):
    assert check(tmp_path, BASE).findings == []


LOSSES = {
    "mean": lambda x: x.mean(),
    "sum": lambda x: x.sum(),
    "masked": lambda x: x[::2].sum() / torch.tensor(len(x[::2])),
    "mse": lambda x: functional.mse_loss(x, torch.zeros_like(x)),
    "bce": lambda x: functional.binary_cross_entropy_with_logits(x, torch.ones_like(x)),
    "summed": lambda x: functional.smooth_l1_loss(x, torch.zeros_like(x), reduction="sum"),
}
SUMMANDS = {
    "mse": lambda x: x.square(),
    "bce": lambda x: functional.softplus(-x),
    "summed": lambda x: functional.smooth_l1_loss(x, torch.zeros_like(x), reduction="none"),
}


@given(
    name=st.sampled_from(sorted(LOSSES)),
    n=st.integers(2, 9),
    factors=st.lists(st.sampled_from([0.25, 2, 3.0]), max_size=3),
    divisors=st.lists(st.sampled_from([2, 4, 0.5]), max_size=2),
)
def test_the_weight_of_a_summand_is_read_from_the_graph(name, n, factors, divisors):
    """The loss of the first value changes by that weight times the change of its summand."""
    x = torch.linspace(0.5, 2.0, n, dtype=torch.float64, requires_grad=True)
    loss = LOSSES[name](x)
    for factor in factors:
        loss = loss * factor
    for divisor in divisors:
        loss = loss / torch.tensor(divisor, dtype=torch.float64)
    summand = SUMMANDS.get(name, lambda x: x)(x).sum()
    (whole,) = torch.autograd.grad(loss, x, retain_graph=True)
    (own,) = torch.autograd.grad(summand, x)
    assert _average(loss)["weight"] == pytest.approx(float(whole[0] / own[0]))


def test_a_loss_of_several_parts_has_no_weight():
    x = torch.ones(3, requires_grad=True)
    assert _average(x.mean() + x.sum()) is None
    assert (
        _average(functional.cross_entropy(x[None], torch.tensor([0]), weight=torch.rand(3))) is None
    )
