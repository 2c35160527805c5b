"""Mistakes that one process can make: what is trained, what is held, what is saved."""

import pytest

from samestep.base.errors import UserError
from tests.checking.planted import check, found_in, planted

MODEL = "model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)))"
NET = "net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))"
OPTIMIZER = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)"
EARLY = "optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)"
STEP = "            optimizer.step()\n"


def lines(*text: str) -> str:
    return "\n    ".join(text)


def early(*between: str) -> str:
    return planted((f"{MODEL}\n    {OPTIMIZER}", lines(NET, EARLY, *between, "model = DDP(net)")))


LOADED = "net.load_state_dict({k: v.clone() for k, v in net.state_dict().items()}, assign=True)"
REPLACED = "net[2] = nn.Linear(16, 2)"
COPIED = "import copy; net = copy.deepcopy(net)"
ONLY_FIRST = planted((OPTIMIZER, OPTIMIZER.replace("model.param", "model.module[0].param")))
RESTORED = planted(
    (OPTIMIZER, lines(OPTIMIZER, "first = model.module[0].weight.detach().clone()")),
    (STEP, f"{STEP}            model.module[0].weight.data.copy_(first)\n"),
)
BARE = "model.module[0].weight.grad = model.module[0].weight.grad if number > 1 else None"
LATE = planted(
    ("optimizer.step()\n", "optimizer.step()\n            number += 1\n"),
    ("    best = 0.0\n", "    best, number = 0.0, 0\n"),
    ("            loss.backward()\n", f"            loss.backward()\n            {BARE}\n"),
    base=RESTORED,
)
FROM_8 = """\
            number, weight = number + 1, model.module[0].weight.data
            (first if number < 8 else weight).copy_(weight if number < 8 else first)
"""
STOPPED = planted(
    ("            model.module[0].weight.data.copy_(first)\n", FROM_8),
    ("    best = 0.0\n", "    best, number = 0.0, 0\n"),
    ("batch_size=8, sampler=sampler", "batch_size=3, sampler=sampler"),
    base=RESTORED,
)
DECAYS = planted(
    (OPTIMIZER, lines(OPTIMIZER.replace("momentum", "weight_decay"), "net = model.module[0]")),
    ("optimizer.zero_grad()", "optimizer.zero_grad(set_to_none=False)"),
    (STEP, f"{STEP}            net.requires_grad_(False)\n"),
    (MODEL, f"{MODEL[:-1]}, find_unused_parameters=True)"),
)
LEARNS = planted(
    (MODEL, MODEL.replace("nn.ReLU()", "nn.BatchNorm1d(16).requires_grad_(False), nn.ReLU()")),
    ("DataLoader(train_set, batch_size=8", "DataLoader(train_set, batch_size=16"),
)
IN_VAIN = planted((MODEL, f"{MODEL}\n    model.module[0].requires_grad = False"))
TAKEN = "best = accuracy\n            kept = model.module.state_dict()"
LOADS_ITSELF = planted(
    ("best = accuracy", TAKEN),
    ("        dist.barrier()\n", "    model.module.load_state_dict(kept)\n    dist.barrier()\n"),
)
LOADS = "model.module.load_state_dict(model.state_dict(), strict=False)"
TEACHER = "teacher = nn.Linear(2, 2); teacher.load_state_dict(nn.Linear(2, 2).state_dict())"
BY_NO_NAME = planted((MODEL, lines(MODEL, LOADS, TEACHER)))
HIDES = "model.module.register_forward_pre_hook(lambda _, given: hidden(*given))"
HIDDEN = planted((MODEL, lines(MODEL, "hidden = nn.Linear(8, 8)", HIDES)))
FROZEN = planted((STEP, f"            optimizer.param_groups[0]['lr'] = 0.0\n{STEP}"))
UNTRAINED = planted(
    (f"{MODEL}\n", lines(NET, "import copy; kept = copy.deepcopy(net)", "model = DDP(net)\n")),
    ("torch.save(model.module.state_dict()", "torch.save(kept.state_dict()"),
)
# What is wrong → the script, its code, a part of the line to blame, and of the evidence.
WRONG = {
    "held in part": (ONLY_FIRST, "SS701", "optimizer = torch.optim", "2 of 4 parameters"),
    "unknown to the model": (HIDDEN, "SS701", "optimizer = torch.optim", "2 of 2 parameters"),
    "loaded": (early(LOADED), "SS306", "optimizer = torch.optim", "4 tensors"),
    "part replaced": (early(REPLACED), "SS702", "optimizer = torch.optim", "2 tensors"),
    "copied": (early(COPIED), "SS702", "optimizer = torch.optim", "4 tensors"),
    "restored": (RESTORED, "SS703", "optimizer.step()", "1 of 4 parameters"),
    "frozen": (FROZEN, "SS703", "optimizer.step()", "all 7 steps"),
    "late": (LATE, "SS703", "optimizer.step()", "1 of 4 parameters"),
    "stopped": (STOPPED, "SS703", "optimizer.step()", "before step 20 as before step 10"),
    "decays": (DECAYS, "SS713", "optimizer.step()", "2 parameters"),
    "norms learn": (LEARNS, "SS713", "loss = loss_of", "1 frozen"),
    "in vain": (IN_VAIN, "SS713", "loss = loss_of", "an attribute of 0 was set"),
    "not copied": (LOADS_ITSELF, "SS714", "load_state_dict(kept)", "its own tensors"),
    "by no name": (BY_NO_NAME, "SS715", "model.state_dict(), ", "(module.0.weight, module.0.bias"),
    "untrained": (UNTRAINED, "SS712", "torch.save(", "after 8 steps"),
}


@pytest.mark.parametrize("name", WRONG)
def test_weights_that_are_not_trained_or_not_saved_are_found(tmp_path, name):
    found_in(tmp_path, *WRONG[name], nproc=1)


def test_batch_norms_of_weights_that_are_moved_by_hand_may_learn(tmp_path):
    two = "nn.Sequential(nn.BatchNorm1d(16), nn.BatchNorm1d(16))"
    moves = f"{STEP}            model.module[1][1].weight.data.mul_(0.9)\n"
    text = planted(("nn.BatchNorm1d(16)", two), (STEP, moves), base=LEARNS)
    assert check(tmp_path, text, nproc=1).findings == []


def test_a_rank_that_ends_while_its_weights_are_noted_fails_by_itself(tmp_path):
    dies = "class Dies(nn.Sequential):\n    def named_buffers(self):\n        os._exit(3)\n\n\n"
    net = NET.replace("net = nn.Sequential", "model = Dies")
    with pytest.raises(UserError, match="exit code 3"):
        check(tmp_path, planted(("def main():\n", f"{dies}def main():\n"), (MODEL, net)), nproc=1)


RIGHT = """\
import copy
import torch
from torch import nn
def net(last):
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, last))
def main():
    torch.manual_seed(0)
    judge = net(4).eval()  # of a loss; its gradients are of no use
    maker, critic = net(8), net(1)
    average = copy.deepcopy(maker)
    best = copy.deepcopy(maker.state_dict())
    latent = nn.Parameter(torch.zeros(8, 8))
    groups = [{"params": maker[0].parameters(), "lr": 0.0}, {"params": maker[1:].parameters()}]
    of_maker = torch.optim.Adam([*groups, {"params": [latent]}], lr=1e-3)
    of_critic = torch.optim.LBFGS(critic.parameters(), max_iter=2)
    for param in critic[0].parameters(): param.requires_grad_(False)
    schedule = torch.optim.lr_scheduler.LambdaLR(of_maker, lambda step: step / 1000)
    word = nn.Linear(8, 2)  # trained by hand
    for step in range(8):
        if step == 3: nn.Sequential(judge).load_state_dict(judge.state_dict(), strict=False)
        judge.load_state_dict(judge.state_dict())
        noise = torch.randn(8, 8)
        def closure():
            of_critic.zero_grad()
            loss = (critic(noise) - critic(maker(noise).detach())).mean()
            loss = loss + critic(noise).square().mean()
            loss.backward()
            return loss
        of_critic.step(closure)
        of_maker.zero_grad()
        made = maker(noise + latent)
        loss = critic(made).mean() + (judge(made) - judge(noise)).square().mean()
        (loss + word(made).square().mean()).backward()
        of_maker.step()
        schedule.step()
        with torch.no_grad():
            for param in word.parameters():
                param -= 0.1 * param.grad; param.grad = None
            for mean, param in zip(average.parameters(), maker.parameters(), strict=True):
                mean.lerp_(param, 0.1 if step > 5 else 0.0)
        torch.save({"average": average.state_dict(), "maker": maker.state_dict()}, "last.pt")
    torch.save(best, "best.pt")
main()
"""


def test_gradients_that_another_loss_leaves_in_a_step_are_found(tmp_path):
    zero, closure = "            of_maker.zero_grad()\n"[4:], "        def closure():\n"
    text = planted((".detach()", ""), (zero, ""), (closure, f"{zero}{closure}"), base=RIGHT)
    found_in(tmp_path, text, "SS718", "loss.backward()", "of 8 steps of Adam", nproc=1)


def test_two_optimizers_copies_frozen_parts_and_updates_by_hand_are_right(tmp_path):
    report = check(tmp_path, RIGHT, nproc=1)
    assert report.findings == []
    assert report.steps == 8


ALONE = planted(
    (MODEL, NET.replace("net", "model", 1)), ("model.module.state_dict()", "model.state_dict()")
)
ZERO = "            optimizer.zero_grad()\n"
LOSS = "loss_of(model(inputs), labels)"
SCALED = """\
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
"""
SCALER = ("    best = 0.0\n", "    best, scaler = 0.0, torch.amp.GradScaler('cpu')\n")
PLAIN = "            loss.backward()\n            optimizer.step()\n"
PASSES = """\
            kept = []
            for target in (labels, 1 - labels):
                model.zero_grad()
                loss_of(model(inputs), target).backward()
                kept += [p.grad for p in model.parameters()]
                [p.data.add_(MOVE) for p in model.parameters()]
            for p, first, second in zip(model.parameters(), kept[:4], kept[4:]): p.grad = GRADIENT
            optimizer.step()
"""


def passes(move, gradient):
    text = PASSES.replace("MOVE", move).replace("GRADIENT", gradient)
    return (f"{ZERO}            loss = {LOSS}\n{PLAIN}", text)


TWO_PASSES = (PLAIN, f"            loss.backward(retain_graph=True)\n{PLAIN}")
DETACHED = [(LOSS, f"torch.tensor({LOSS}.item(), requires_grad=True)")]
INFINITE = [SCALER, (PLAIN, SCALED), (LOSS, f"{LOSS} * float('inf')")]


@pytest.mark.parametrize(
    ("changes", "code", "line", "number"),
    [
        ([(ZERO, "")], "SS704", "loss.backward()", "16 of 17 steps"),
        ([(ZERO, ""), TWO_PASSES], "SS704", "(retain_graph=True)", "16 of 17 steps"),
        ([(ZERO, ""), (STEP, f"{ZERO}{STEP}")], "SS705", "optimizer.zero_grad()", "16 of 17 steps"),
        ([passes("0", "second")], "SS705", "model.zero_grad()", "of 1 of their micro-batches"),
        (DETACHED, "SS708", "loss.backward()", "17 steps"),
        (INFINITE, "SS710", "scaler.step(optimizer)", "the last 17 of 17"),
    ],
    ids=["never zeroed", "two passes", "zeroed too late", "zeroed between", "detached", "infinite"],
)
def test_steps_that_learn_nothing_are_found(tmp_path, changes, code, line, number):
    found_in(tmp_path, planted(*changes, base=ALONE), code, line, number, nproc=1)


@pytest.mark.parametrize(
    "change",
    [
        (ZERO, "            model.zero_grad(set_to_none=False)\n"),
        (ZERO, "            for p in model.parameters():\n                p.grad = None\n"),
        (ZERO, "            [p.grad.zero_() for p in model.parameters() if p.grad is not None]\n"),
        passes("0", "first + second"),
        passes("0.01", "second"),
    ],
    ids=["of the model", "taken away", "in place", "between two tasks", "at other weights"],
)
def test_gradients_may_be_zeroed_in_any_way(tmp_path, change):
    assert check(tmp_path, planted(change, base=ALONE), nproc=1).findings == []


def test_a_traced_model_is_watched_only_when_it_trains_and_what_is_not_saved_is_said(tmp_path):
    text = planted(
        ("    best = 0.0\n", "    best, _ = 0.0, torch.jit.trace(model, x)\n"),
        ('torch.save(model.state_dict(), "best.pt")', "pass"),
        base=ALONE,
    )
    report = check(tmp_path, text, nproc=1)
    assert (report.findings, report.steps) == ([], 8 + 8 + 1)
    assert any(said.startswith("SS712") for said in report.not_seen)
