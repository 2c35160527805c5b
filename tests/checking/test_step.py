"""Scripts whose step is not what one process would have taken."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from samestep.scripts.checking.watch.losses import average_of
from tests.checking.planted import check, codes, found_in, line_of, planted

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
ACCUMULATING = planted(*COUNTED)
UNSCALE = "            scaler.unscale_(optimizer)\n"
LOSS = "            loss = loss_of(model(inputs), labels)\n"
SCHEDULED = "        scheduler.step()\n"
COSINE = ("StepLR(optimizer, 1, gamma=0.9)", "CosineAnnealingLR(optimizer, TOTAL)")
SUMMED = """\
            for p in model.parameters():
                dist.all_reduce(p.grad)
"""
LOGS_A_PAIR = """\
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            dist.all_reduce(torch.stack([norm, loss.detach()]))
"""
CLIPPED = f"""\
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
{SUMMED}\
                p.grad /= 2
"""
SHARES = (
    ("sampler = DistributedSampler(train_set, shuffle=True, seed=0)", "mine = SHARE"),
    (
        "DataLoader(train_set, batch_size=8, sampler=sampler)",
        "DataLoader(mine, batch_size=8, shuffle=True)",
    ),
    ("        sampler.set_epoch(epoch)\n", ""),
)
UNEQUAL = planted(*SHARES).replace(
    "SHARE", "torch.utils.data.Subset(train_set, range(0, 32) if rank else range(32, 60))"
)


def by_hand(reduces):
    return planted(
        ("model = DDP(", "model = ("),
        ("            optimizer.step()\n", f"{reduces}            optimizer.step()\n"),
        ("model.module.state_dict()", "model.state_dict()"),
    )


BOUNCES = SCALER[1].replace("('cpu')", "('cpu', init_scale=2.0**30, growth_interval=1)")
OF_ALL = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)"
OF_EACH = "optimizer, head = (torch.optim.SGD(p.parameters(), lr=0.1) for p in model.module[::2])"
LIMIT = "            nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n"
HEAD = f"{LIMIT.replace('model.', 'model.module[2].')}            head.step(), head.zero_grad()\n"
TWO_OPTIMIZERS = (OF_ALL, OF_EACH), ("optimizer.step()\n", f"optimizer.step()\n{HEAD}")
MEETS_TWICE = planted(
    ("with contextlib.nullcontext() if last else model.no_sync():", "if True:"), base=ACCUMULATING
)
HALVED, DOUBLED = f"{LOSS[:-1]} / 2\n", f"{LOSS[:-1]} * 2\n"
LATE = planted(
    (f"    {HALVED}", ""),
    ("            with contextlib", f"{HALVED}            with contextlib"),
    base=ACCUMULATING,
)
LAST = "            if last:\n    "
CLIPS_TWICE = planted(
    (f"{LAST}            nn.utils.clip", "            if True:\n                nn.utils.clip"),
    ("                optimizer.step()\n", f"{LAST}            optimizer.step()\n"),
    base=ACCUMULATING,
)
SCHEDULED_TWICE = planted(
    (COSINE[0], COSINE[1].replace("TOTAL", "3")),
    (SCHEDULED, f"        for _ in range(2):\n    {SCHEDULED}"),
)
NOT_SCHEDULED = planted((SCHEDULED, ""))
SGD = "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)\n"
REPLACED = planted(("    best = 0.0\n", f"{SGD}    best = 0.0\n"))
IN_EVERY_BATCH = ("optimizer.step()\n", f"optimizer.step()\n    {SCHEDULED}")
IN_BATCHES = planted((SCHEDULED, ""), IN_EVERY_BATCH)
COSINE_OF_EPOCHS = IN_BATCHES.replace(COSINE[0], COSINE[1].replace("TOTAL", "2"))
AS_MANY = COSINE_OF_EPOCHS.replace("range(3)", "range(9)").replace("optimizer, 2", "optimizer, 9")
OF_STEPS = planted((COSINE[0], COSINE[1].replace("TOTAL", "3 * len(train_loader)")))
FIRST_RANKS = """\
            rows, every = model(inputs), torch.zeros(16, 2)
            dist.all_gather_into_tensor(every, rows.detach())
            loss = loss_of(rows @ every.T, torch.arange(len(rows)))
"""
CLASSES = """\
            rows, every = model(inputs), torch.zeros(16, 2)
            classes = torch.zeros(16).long()
            dist.all_gather_into_tensor(every, rows.detach())
            dist.all_gather_into_tensor(classes, labels)
            alike = (COMPARED).float()
            loss = -(rows @ COLUMNS.T * alike).sum() / alike.sum()
"""


def contrasted(compared, columns="every"):
    return LOSS, CLASSES.replace("COMPARED", compared).replace("COLUMNS", columns)


OF_CLASS = "labels[:, None] == "
CALLED = f"{LOSS[:-1]} + loss_of(model(inputs), labels)\n"
NO_ROWS = "            loss = loss + loss_of(rows[:0] @ every.T, labels[:0]).nan_to_num()\n"
EPOCHS, AUTOCAST = "    for epoch in range(3):\n", "torch.autocast('cpu', dtype=torch.bfloat16)"
ONE_AUTOCAST = planted((EPOCHS, f"    {AUTOCAST}.__enter__()\n{EPOCHS}"))
STEPS_SCALED = STEP.replace("loss.backward", "scaler.scale(loss).backward")
CLIPS_SCALED = planted(SCALER, (STEP, SCALED.replace(UNSCALE, "")))
LBFGS = "LBFGS(model.parameters(), lr=0.1, max_iter=3"
GRADIENTS = "[optimizer.zero_grad(), loss := loss_of(model(inputs), labels), loss.backward()]"
IN_A_CLOSURE = f"optimizer.step(lambda: {GRADIENTS}[1])"
BACKWARD, CLIP, STEPPED = "loss.backward()", "clip_grad_norm_", "optimizer.step()"
TWICE = planted((BACKWARD, f"{BACKWARD}\n{SUMMED.rstrip()}"))
AFTER = "optimizer.step()\n", f"optimizer.step()\n{LIMIT}"
LATE_BY_HAND = planted(AFTER, base=by_hand(f"{SUMMED}                p.grad /= 2\n"))
NOT_DIVIDED = planted(
    (" / 2\n", "\n"),
    ("nn.utils.clip_grad_norm_(model.parameters(), 1.0)", "pass"),
    base=ACCUMULATING,
)
THIRDS = ACCUMULATED.replace("% 2 == 1", "% 3 == 2").replace("labels) / 2", "labels) / 9")
OWN_CLASSES = planted(contrasted(f"{OF_CLASS}labels.repeat(2)"))
ADDED = planted((LOSS, CALLED), base=by_hand(SUMMED))
# What is wrong → the script, its code, a part of the line to blame, and of the evidence.
PLANTED = {
    "micro-batches meet": (MEETS_TWICE, "SS301", BACKWARD, "2 backward passes per optimizer step"),
    "no_sync too late": (LATE, "SS301", BACKWARD, "whose forwards were not"),
    "clipping too early": (CLIPS_TWICE, "SS303", CLIP),
    "clipping before an all-reduce by hand": (by_hand(CLIPPED), "SS303", CLIP),
    "a scheduler twice": (SCHEDULED_TWICE, "SS304", "scheduler.step()", "2 times per epoch"),
    "a scheduler never": (NOT_SCHEDULED, "SS305", "StepLR", "not stepped once in 9 "),
    "another's scheduler": (REPLACED, "SS305", "StepLR", "that takes no step"),
    "scaled gradients": (planted(SCALER, (STEP, STEPS_SCALED)), "SS310", STEPPED, "by 65536"),
    "clipping scaled gradients": (CLIPS_SCALED, "SS302", CLIP, "65536"),
    "a cosine of epochs": (COSINE_OF_EPOCHS, "SS311", "scheduler.step()", "0.05, 0, 0.05"),
    "a decay of epochs": (IN_BATCHES.replace("0.9)", "0.1)"), "SS311", "scheduler.step()", "stays"),
    "as many as epochs": (AS_MANY, "SS311", "scheduler.step()", "as many as there are epochs"),
    "a cosine of steps": (OF_STEPS, "SS311", "scheduler.step()", "once per epoch; its last"),
    "averages that are added up": (TWICE, "SS313", "dist.all_reduce(p.grad)", "2 times as large"),
    "micro-batches": (NOT_DIVIDED, "SS314", BACKWARD, "2 micro-batches per step (4 steps)"),
    "divided twice": (planted(*COUNTED[:2], (STEP, THIRDS)), "SS317", BACKWARD, "by 9 in 3 steps"),
    "clipping after the step": (planted(AFTER), "SS315", CLIP, "in 3 of 3 calls"),
    "clipping after a step by hand": (LATE_BY_HAND, "SS315", CLIP),
    "labels": (planted((LOSS, FIRST_RANKS)), "SS316", "torch.arange", "columns 8 to 15"),
    "classes": (OWN_CLASSES, "SS316", "alike = (", "of 2 ranks"),
    "sums of two calls": (ADDED, "SS309", BACKWARD, "added up"),
    "one autocast": (ONE_AUTOCAST, "SS312", STEPPED, "step 2 two steps"),
    "unequal shares": (UNEQUAL, "SS307", BACKWARD, "for batches of 4 and 8 samples"),
    "divided by the ranks": (planted((LOSS, HALVED)), "SS309", BACKWARD, "are divided by 2"),
    "multiplied by the ranks": (planted((LOSS, DOUBLED)), "SS309", BACKWARD, "are multiplied by 2"),
    "gradients that are added up": (by_hand(SUMMED), "SS309", BACKWARD, "is 2 times"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_mistake_in_the_step_is_found_at_its_line(name, tmp_path):
    found_in(tmp_path, *PLANTED[name])


EACH_BATCH = (SCHEDULED, ""), IN_EVERY_BATCH
OUTER = """\
    outer = torch.optim.Optimizer(model.parameters(), {"lr": 0.1})
    outer.param_groups = optimizer.param_groups
"""
ALIKE = {
    "accumulation": COUNTED,
    "a sum over 9": (
        *COUNTED[:2],
        (STEP, THIRDS.replace("s_of(", "s_of.__class__(reduction='sum')(")),
    ),
    "a weight of 2": ((LOSS, DOUBLED.replace("2", "2.0")),),
    "a scheduler of what wraps the optimizer": (
        ("    scheduler =", f"{OUTER}    scheduler ="),
        ("StepLR(optimizer", "StepLR(outer"),
    ),
    "labels of all rows": (contrasted(f"{OF_CLASS}classes"),),
    "labels of two views": (contrasted(f"{OF_CLASS}classes.repeat(2)", "every.repeat(2, 1)"),),
    "places in an order of its own": (
        contrasted("torch.arange(8)[:, None] == torch.arange(16)", "every.roll(-8 * rank, 0)"),
    ),
    "negatives only": (
        contrasted(f"{OF_CLASS}torch.where(torch.arange(16) // 8 == rank, classes, -1)"),
    ),
    "means of two calls": ((LOSS, CALLED),),
    "labels of the own rows": (
        (LOSS, FIRST_RANKS.replace("(len(rows)", "(rank * 8, rank * 8 + 8") + NO_ROWS),
    ),
    "a scaler": (SCALER, (STEP, SCALED)),
    "a schedule of steps": ((", 1, gamma=0.9)", ", 3 * len(train_loader), 0.9)"), *EACH_BATCH),
    "a cosine of steps": ((COSINE[0], COSINE[1].replace("TOTAL", "12")), *EACH_BATCH),
    "a logged pair, as large as a bias": ((STEPPED, f"pass\n{LOGS_A_PAIR}            {STEPPED}"),),
    "an autocast for each step": (
        (STEP, f"            with {AUTOCAST}:\n{STEP.replace('   ', '    ')}"),
    ),
    "a norm that is only read": (
        SCALER,
        (STEP, SCALED.replace(UNSCALE, "").replace("1.0)", "float('inf'))")),
    ),
    "averaged again": ((BACKWARD, f"{BACKWARD}\n{SUMMED}                p.grad /= 2"),),
    "skipped steps": ((SCALER[0], BOUNCES), (STEP, SCALED.replace("labels)", "labels) * 1e30"))),
    "clipping between the steps of two optimizers": TWO_OPTIMIZERS,
    "a closure's passes": (
        ("SGD(model.parameters(), lr=0.1, momentum=0.9", LBFGS),
        (STEP, f"            {IN_A_CLOSURE}\n"),
    ),
}


@pytest.mark.parametrize("name", ALIKE)
def test_what_looks_alike_and_is_right_stays_silent(name, tmp_path):
    assert check(tmp_path, planted(*ALIKE[name])).findings == []


def test_a_schedule_of_all_ranks_batches_is_not_judged_by_a_cut_length(tmp_path):
    """As Accelerate has it: made before the loader is shared out, and stepped once per rank."""
    total = "LinearLR(optimizer, total_iters=len(DataLoader(train_set, batch_size=4)) * 3)"
    step = f"optimizer.step()\n            for _ in range(2):\n        {SCHEDULED}"
    smaller = ("batch_size=8, sampler=sampler", "batch_size=4, sampler=sampler")
    text = planted((COSINE[0], total), (SCHEDULED, ""), ("optimizer.step()\n", step), smaller)
    report = check(tmp_path, text, steps=6)
    assert "SS304" not in codes(report)
    assert any(said.startswith("SS304") and "was cut" in said for said in report.not_seen)


def test_dropout_is_not_compared_with_the_joined_batch_and_a_scaled_loss_or_fabrics_is(tmp_path):
    outer = "outer = nn.Module(); outer._forward_module = outer.module = model; outer.forward = "
    outer += "model.forward; model = outer; del outer\n    optimizer = "
    report = check(tmp_path, planted(("optimizer = ", outer)))
    assert not [said for said in report.not_seen if said.startswith("SS309")]
    report = check(tmp_path, planted(("nn.ReLU(), ", "nn.ReLU(), nn.Dropout(0.5), ")))
    assert "SS309" not in codes(report)
    assert [said for said in report.not_seen if said.startswith("SS309") and "random" in said]
    report = check(tmp_path, planted(SCALER, (STEP, SCALED)))
    assert not [said for said in report.not_seen if said.startswith("SS309")]


OUT = "            out = model(inputs)\n            loss = loss_of(out, labels)"
PENALTY = "0.1 * sum(p.square().sum() for p in model.parameters())"
PAIR = """\
            both = lambda net, _, out: (out, net[0].bias.sum()) if net.training else out
            model.module._forward_hooks or model.module.register_forward_hook(both)
            out, number = model(inputs)
            loss = loss_of(out * 2, labels) + 0 * number
"""
BY_HAND = "for p in model.parameters(): p.grad.clamp_(-0.01, 0.01)"


@pytest.mark.parametrize(("now", "compared"), [
    (f"{OUT} + nn.functional.mse_loss(out, out.detach() + 1)\n", False),
    (f"{OUT} + {PENALTY}\n", False),
    (f"{LOSS}            loss = loss * 3\n", True),
    (PAIR, False),
], ids=["a second loss", "a penalty", "a factor", "another number of the model"])  # fmt: skip
def test_a_loss_is_judged_only_where_its_own_gradient_can_be_made_again(now, compared, tmp_path):
    report = check(tmp_path, planted((LOSS, now)))
    assert report.findings == []
    assert compared is not any(said.startswith("SS309") for said in report.not_seen)


def test_what_a_script_does_to_exchanged_gradients_is_no_mistake(tmp_path):
    """With DDP it is not compared at all, by hand it cannot be told from the exchange."""
    step = "            optimizer.step()\n"
    report = check(tmp_path, planted((step, f"            {BY_HAND}\n{step}")))
    assert report.findings == []
    assert not [said for said in report.not_seen if said.startswith("SS309")]
    text = by_hand(f"{SUMMED}                p.grad /= 2\n            {BY_HAND}\n")
    report = check(tmp_path, text)
    assert report.findings == []
    assert [said for said in report.not_seen if said.startswith("SS309") and "exchange" in said]
    later = f"{SUMMED}{LIMIT}            for p in model.parameters(): p.grad /= 2\n"
    assert check(tmp_path, planted((LOSS, CALLED), base=by_hand(later))).findings == []
    halved = LOSS, HALVED.replace("inputs)", "inputs) + model(inputs)")
    assert check(tmp_path, planted(halved, base=by_hand(SUMMED))).findings == []


OWN_LOSS = """

class Mean(nn.Module):
    def forward(self, x):
        assert len(x) < MOST
        return x.square().mean() if self.training else x

def main():
"""


@pytest.mark.parametrize(("most", "compared"), [(99, True), (9, False)])
def test_a_loss_that_the_model_returns_is_compared_if_it_takes_the_joined_batch(
    most, compared, tmp_path
):
    text = planted(
        ("\n\ndef main():\n", OWN_LOSS.replace("MOST", str(most))),
        ("nn.Linear(16, 2)))", "nn.Linear(16, 2), Mean()))"),
        ("loss_of(model(inputs), labels)", "model(inputs)"),
    )
    report = check(tmp_path, text)
    assert report.findings == []
    assert compared is not any(said.startswith("SS309") for said in report.not_seen)


def test_losses_and_metrics_that_are_not_finite_are_judged_too(tmp_path):
    text = planted(
        ("loss_of(model(inputs), labels)", "loss_of(model(inputs), labels) * float('inf')"),
        ("torch.zeros(2)", "torch.full((2,), float('nan'))"),
    )
    assert not codes(check(tmp_path, text)) & {"SS307", "SS308", "SS402"}


@pytest.mark.parametrize(("total", "times", "expected"), [
    ("3 * len(train_loader)", 2, {"SS304"}),
    ("2 * 3 * len(train_loader)", 2, set()),
    ("3 * len(train_loader)", 1, set()),
    ("3 * len(train_set) // 8", 1, {"SS304"}),
])  # fmt: skip
def test_a_schedule_of_steps_has_to_fit_those_that_are_taken(total, times, expected, tmp_path):
    step = f"optimizer.step()\n            for _ in range({times}): scheduler.step()\n"
    text = planted(
        (SCHEDULED, ""),
        (COSINE[0], COSINE[1].replace("TOTAL", total)),
        ("optimizer.step()\n", step),
    )
    assert codes(check(tmp_path, text)) == expected


def test_unequal_shares_that_count_for_their_size_are_right(tmp_path):
    weighted = """\
            count = torch.tensor(float(len(labels)))
            dist.all_reduce(count)
            loss = loss_of(model(inputs), labels) * len(labels) * 2 / count
"""
    assert check(tmp_path, planted((LOSS, weighted), base=UNEQUAL)).findings == []


SUM = "nn.functional.cross_entropy(model(inputs), labels, reduction='sum')"
MASK = "labels = labels.where(torch.rand(len(labels)) < 0.3 + 0.6 * rank, -100)\n            "
MASK += "labels[0] = 0\n            "


@pytest.mark.parametrize(("loss", "expected"), [
    ("loss_of(model(inputs), labels)", {"SS308"}),
    (f"{SUM} / (labels >= 0).sum()", {"SS308"}),
    (f"{SUM} * 2 / count", set()),
], ids=["ignored targets", "own sum", "joined sum"])  # fmt: skip
def test_a_loss_over_each_ranks_own_tokens_is_found(loss, expected, tmp_path):
    count = "count = (labels >= 0).sum()\n            dist.all_reduce(count)\n            "
    text = planted(("loss = loss_of(model(inputs), labels)", MASK + count + "loss = " + loss))
    report = check(tmp_path, text)
    assert codes(report) == expected
    for found in report.findings:
        assert found.line == line_of(text, "loss.backward()")


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
    assert average_of(loss).weight == pytest.approx(float(whole[0] / own[0]))


def test_a_loss_of_several_parts_has_no_weight():
    x = torch.ones(3, requires_grad=True)
    assert average_of(x.mean() + x.sum()) is None
    weighted = functional.cross_entropy(x[None], torch.tensor([0]), weight=torch.rand(3))
    assert average_of(weighted) is None
