"""Mistakes in how a model is shared by the ranks."""

import pytest

from tests.checking.planted import check, codes, found_in, planted

NET = "nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))"
WRAPPED = f"DDP({NET})"
SAVED = ("torch.save(model.module.state_dict()", "torch.save(model.state_dict()")
BACKWARD = "            loss.backward()\n"
BY_HAND = (
    "            loss.backward()\n            for p in model.parameters():\n"
    "                dist.all_reduce(p.grad)\n                p.grad /= dist.get_world_size()\n"
)
STEP = "            optimizer.step()\n"
LOSS = "            loss = loss_of(model(inputs), labels)\n"
RARELY = """\
            with model.no_sync():
                loss = loss_of(model(inputs), labels)
                loss.backward()
            optimizer.step()
            steps += 1
            with torch.no_grad():
                [dist.all_reduce(p) or p.div_(2) for p in model.parameters() if steps % 4 == 0]
"""
RANDOM = (LOSS, f"            dist.broadcast(torch.get_rng_state(), 0)\n{LOSS}")  # of all ranks
OPTIMIZER = "    optimizer = torch.optim.SGD"
LATE = "    if rank == 0:\n        nn.init.zeros_(model.module[0].bias)\n"
SEEN = "            if rank == 0:\n                model.module.seen += 1\n"
OWN_NET = """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 2)
        self.spare = nn.Linear(8, 2)
        self.register_buffer("seen", torch.zeros(1))
    def forward(self, x): return self.body(x)
def main():
"""


def unwrapped(*changes: tuple[str, str]) -> str:
    return planted((WRAPPED, NET), SAVED, *changes)


def own_net(*changes: tuple[str, str]) -> str:
    return planted(("def main():\n", OWN_NET), *changes)


OWN_WEIGHTS = unwrapped((BACKWARD, BY_HAND), ("torch.manual_seed(0)", "torch.manual_seed(rank)"))
LOADED_LATE = planted((OPTIMIZER, f"{LATE}{OPTIMIZER}"))
RATES = planted(("lr=0.1", "lr=0.1 + 0.1 * rank"))
GRADIENTS = planted((STEP, f"            model.module[2].bias.grad *= 1 + rank\n{STEP}"))
PAST_DDP = planted(("loss_of(model(inputs), labels)", "loss_of(model.module(inputs), labels)"))
NORMALISED = planted(("nn.ReLU()", "nn.BatchNorm1d(16), nn.ReLU()"))
BUFFER = own_net(
    (WRAPPED, "DDP(Net(), broadcast_buffers=False, find_unused_parameters=True)"),
    (STEP, STEP + SEEN),
)
QUEUE = BUFFER.replace(STEP + SEEN, f"            model.module.seen.copy_(inputs[:4])\n{STEP}")
QUEUE = QUEUE.replace("broadcast_buffers=False, ", "").replace("zeros(1)", "zeros(4, 8)")
UNUSED = own_net((WRAPPED, "DDP(Net())"))
FROZEN_LATE = planted((STEP, f"{STEP}            model.module[0].requires_grad_(False)\n"))
ONE_STEPS = planted((STEP, f"            if rank == 0:\n    {STEP}"))
SEARCHED = planted((WRAPPED, f"DDP({NET}, find_unused_parameters=True)"))
LOSS_LINE, DDP_LINE = "loss = loss_of(", "model = DDP("
MASTERS = """
class Masters(torch.optim.SGD):
    def __init__(self, model, lr):
        self.pairs = [(p, p.detach().clone().requires_grad_()) for p in model.parameters()]
        super().__init__([master for _, master in self.pairs], lr=lr)
    def step(self, closure=None):
        for p, master in self.pairs:
            dist.all_reduce(p.grad)
            master.grad = p.grad / 2
        super().step()
        with torch.no_grad():
            for p, master in self.pairs: p.copy_(master)
    def zero_grad(self, set_to_none=True):
        for p, _ in self.pairs: p.grad = None
def main():
"""
EXPERTS = """\
            optimizer.zero_grad()
            outputs = shared(inputs) + expert(inputs)
            loss = loss_of(outputs, labels)
            loss.backward()
            for p in shared.parameters():
                dist.all_reduce(p.grad)
                p.grad /= 2
            norm = nn.utils.get_total_norm([p.grad for p in own])
            NORM
            nn.utils.clip_grad_norm_(own, 0.1)
            optimizer.step()
"""
TWO_PARTS = """\
shared, expert = nn.Linear(8, 2), nn.Linear(8, 2)
    nn.init.constant_(expert.weight, 0.1 + rank)
    own = [*shared.parameters(), *expert.parameters()]"""
OF_EXPERTS = planted(
    (f"            optimizer.zero_grad()\n{LOSS}{BACKWARD}{STEP}", EXPERTS),
    (f"model = {WRAPPED}", TWO_PARTS),
    ("model.parameters()", "own"),
    ("model(inputs).argmax(1)", "shared(inputs).argmax(1)"),
    ("model.module", "shared"),
    ("        model.train()\n", ""),
    ("        model.eval()\n", ""),
    ("    del model, ", "    del "),
)
CLIPS = "nn.utils.clip_grad_norm_(own, 0.1)"
CLIPPED_ALIKE = planted(
    (CLIPS, "nn.utils.clip_grads_with_norm_(own, 0.1, norm)"),
    ("NORM", "dist.all_reduce(norm, op=dist.ReduceOp.MAX)"),
    base=OF_EXPERTS,
)
CLIPPED_APART = OF_EXPERTS.replace("            NORM\n", "")
EXPERTS_INSIDE = unwrapped(
    (NET, "nn.Sequential(nn.Linear(8, 2), nn.Linear(2, 64), nn.Linear(64, 2))"),
    (OPTIMIZER, f"    nn.init.constant_(model[1].bias, 0.1 * rank)\n{OPTIMIZER}"),
    (BACKWARD, BY_HAND.replace("model.parameters()", "model[0].parameters()")),
)
AVERAGED = "        [dist.all_reduce(p.data) or p.data.div_(2) for p in model.parameters()]\n"
SUMMED = unwrapped(
    (STEP, STEP + AVERAGED.replace(" or p.data.div_(2)", "").replace("        [", "            ["))
)
OF_EACH = unwrapped(RANDOM, ("rank == 0:\n                t", "True:\n                t"))
OF_EACH = OF_EACH.replace('"best.pt"', 'f"{rank}.pt"')
HEADLESS = BY_HAND.replace("model.param", "model[0].param")
WITHOUT_HEAD = unwrapped((BACKWARD, HEADLESS), RANDOM)
TASK = f"{HEADLESS}            for p in model[2].parameters(): p.grad *= rank\n"
OWN_TASK = planted((HEADLESS, TASK), base=WITHOUT_HEAD)
LOOSE = planted(
    ("    best = 0.0\n", "    best = 0.0\n    optimizer.add_param_group({'params': [scale]})\n"),
    (OPTIMIZER, f"    scale = nn.Parameter(torch.ones(()))\n{OPTIMIZER}"),
    ("model(inputs), labels", "scale * model(inputs), labels"),
)
PLATEAU = planted(
    ("StepLR(optimizer, 1, gamma=0.9)", "ReduceLROnPlateau(optimizer)"),
    ("scheduler.step()", "scheduler.step(float(loss.detach()))"),
)
# What is wrong → the script, its code, a part of the line to blame, and of the evidence.
PLANTED = {
    "a head that is not exchanged": (WITHOUT_HEAD, "SS203", "dist.all_reduce(p.grad)", "2.weight"),
    "a parameter of no module": (LOOSE, "SS203", "optimizer.step()", "shape []"),
    "schedules by own numbers": (PLATEAU, "SS203", "scheduler.step(", "step their schedules by"),
    "a model for each rank": (unwrapped(RANDOM), "SS201", LOSS_LINE, "4 of its 4 parameters"),
    "averaged over unequal weights": (OWN_WEIGHTS, "SS202", LOSS_LINE, "4 of 4 parameters"),
    "one rank loads late": (LOADED_LATE, "SS202", LOSS_LINE, "1 of 4 parameters", "0.bias"),
    "experts clipped apart": (CLIPPED_APART, "SS203", CLIPS, "2 gradients that are equal", "0.1"),
    "learning rates": (RATES, "SS203", "optimizer.step()", "step 1", "4 of 4", "0.1, 0.2"),
    "gradients": (GRADIENTS, "SS203", "optimizer.step()", "1 of 4", "2.bias already differed"),
    "steps of one rank": (ONE_STEPS, "SS203", "optimizer.step()", "take 9 and 0 steps"),
    "models added up": (SUMMED, "SS210", "dist.all_reduce(p.data)", "step 1 2 times"),
    "past the wrapper": (PAST_DDP, "SS204", "model.module(inputs)"),
    "normalised over few samples": (NORMALISED, "SS205", DDP_LINE, "8 samples"),
    "a buffer that one rank changes": (BUFFER, "SS206", DDP_LINE, "seen", "only rank 0"),
    "a queue of each rank's own rows": (QUEUE, "SS206", LOSS_LINE, "the ranks have filled seen"),
    "unused, so that it fails": (UNUSED, "SS207", DDP_LINE, "2 of 4 parameters", "spare.weight"),
    "frozen once it is wrapped": (FROZEN_LATE, "SS207", DDP_LINE, "2 of 4 parameters", "0.weight"),
    "searched for what is not there": (SEARCHED, "SS208", DDP_LINE),
}
ADVICE = {"normalised over few samples", "searched for what is not there"}
ADVICE |= {"a queue of each rank's own rows"}


@pytest.mark.parametrize("name", PLANTED)
def test_a_mistake_with_the_model_is_found_at_its_line(name, tmp_path):
    found = found_in(tmp_path, *PLANTED[name])
    assert (found.severity == "advice") == (name in ADVICE)


RIGHT = {
    "models averaged after each epoch": unwrapped(
        ("batch_size=8, sampler=sampler", "batch_size=8 + 8 * rank, sampler=sampler"),
        ("        scheduler.step()\n", f"        scheduler.step()\n{AVERAGED}"),
    ),
    "experts clipped by one norm": CLIPPED_ALIKE,
    "experts that rows are sent to": planted(
        ("nn.Linear(8, 2), nn.Linear(8, 2)", "nn.Linear(8, 2), nn.Linear(8, 40)"),
        ("expert(inputs)", "expert(dist.all_to_all_single(r := inputs + 0, inputs) or r)[:, :2]"),
        base=CLIPPED_ALIKE,
    ),
    "experts inside of the model": EXPERTS_INSIDE,
    "the head of each rank's own task": OWN_TASK,
    "master weights": unwrapped(
        ("\n\ndef main():\n", MASTERS),
        ("torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)", "Masters(model, 0.1)"),
    ),
    "a wrapper where there is a GPU": planted(
        ("model = DDP(", "model = (DDP if torch.cuda.is_available() else nn.Sequential)("),
        ("model.module.state_dict()", "[*model.children()][0].state_dict()"),
    ),
    "the wrapper's forward": planted(("model(inputs), labels", "model.forward(inputs), labels")),
    "averaged by hand": unwrapped((BACKWARD, BY_HAND)),
    "a model for each rank": OF_EACH,
    "normalised over enough samples": planted(
        ("DataLoader(train_set, batch_size=8", "DataLoader(train_set, batch_size=16"),
        base=NORMALISED,
    ),
    "a buffer that is broadcast": planted((", broadcast_buffers=False", ""), base=BUFFER),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_looks_alike_and_is_right_is_no_finding(name, tmp_path):
    assert check(tmp_path, RIGHT[name]).findings == []


def test_weights_that_are_averaged_by_hand_now_and_then_are_right(tmp_path):
    text = planted(
        (f"{LOSS}{BACKWARD}{STEP}", RARELY), ("    best = 0.0\n", "    best = steps = 0\n")
    )
    report = check(tmp_path, text)
    assert "SS203" not in codes(report)
    assert any(told.startswith("SS203") for told in report.not_seen)


JOINED = """\
def joined(model, loader):
    with model.join(): yield from loader
"""


def test_ranks_that_join_with_unequal_shares_do_not_drift_apart(tmp_path):
    share = "torch.utils.data.Subset(train_set, range(0, 42) if rank else range(42, 64))"
    text = planted(
        ("sampler = DistributedSampler(train_set, shuffle=True, seed=0)", f"mine = {share}"),
        ("DataLoader(train_set, batch_size=8, sampler=sampler)", "DataLoader(mine, batch_size=8)"),
        ("        sampler.set_epoch(epoch)\n", ""),
        ("labels in train_loader:", "labels in joined(model, train_loader):"),
        ("def main():\n", f"{JOINED}def main():\n"),
    )
    report = check(tmp_path, text)
    assert not codes(report) & {"SS203", "SS307", "SS602"}
    assert any(told.startswith("SS203") and "join" in told for told in report.not_seen)
