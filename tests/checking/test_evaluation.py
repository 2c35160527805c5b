"""Scripts whose evaluation does not tell of the whole, or in the wrong mode."""

import pytest

from tests.checking.planted import BASE, check, codes, found_in, line_of, planted

MODEL = "nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))"
BATCHNORM = (MODEL, "nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2))")
DROPOUT = (MODEL, "nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 2))")
REDUCE = "        dist.all_reduce(counts)\n"
UNREDUCED = (REDUCE, "")
NO_BEST = ("if accuracy > best:", "if False:")
LOADER = "val_loader = DataLoader(val_set, batch_size=8, sampler=val_sampler)"
WHOLE = (LOADER, "val_loader = DataLoader(val_set, batch_size=8)")
SHUFFLED = (LOADER, "val_loader = DataLoader(val_set, batch_size=8, shuffle=True)")
OF_A_PART = """\
part = range(0, 24) if rank else range(24, 32)
    val_loader = DataLoader(torch.utils.data.Subset(val_set, part), batch_size=8)"""
UNEQUAL = (LOADER, OF_A_PART)
MEAN = "        mean = counts[0] / counts[1]\n        dist.all_reduce(mean)\n"
SHOWN = '            print(f"epoch {epoch}: accuracy {accuracy:.3f}")\n'
LABELLED = (
    f"        if rank == 0:\n{SHOWN}",
    f"        if True:\n{SHOWN.replace('epoch', 'rank {rank} epoch', 1)}",
)
OTHER_SET = "        with torch.no_grad():\n            for _ in range(1 + rank): model(inputs)\n"
AS_A_MEAN = ("float(counts[0] / counts[1])", "float(mean / 2)")
JOINED = "        dist.all_gather_object(both := [0, 0], counts)\n        counts = sum(both)\n"
OF_A_SHARD = planted(UNREDUCED, NO_BEST)
OF_MEANS = planted(UNEQUAL, NO_BEST, (REDUCE, MEAN), AS_A_MEAN)


def as_a_mean(number):
    return NO_BEST, (REDUCE, MEAN.replace("counts[0] / counts[1]", number)), AS_A_MEAN


OF_ROOTS = planted(*as_a_mean("(counts[0] / counts[1]) ** 0.5"))
EXPONENTIALS = "dist.all_gather_object(both := [0, 0], math.exp(mean))\n        mean = sum(both)"
SKLEARN = "from sklearn.metrics import f1_score\n"
OF_SCORES = SKLEARN + planted(*as_a_mean("torch.tensor(f1_score([1, 0, 1, rank], [1, 1, 0, 1]))"))
OF_QUOTIENTS = planted(*as_a_mean("counts[0] / (counts[0] + 3 + rank)"))
OF_EXPONENTIALS = planted(
    *(NO_BEST, AS_A_MEAN),
    (REDUCE, MEAN.replace("dist.all_reduce(mean)", EXPONENTIALS)),
    ("import gc\n", "import gc\nimport math\n"),
)
BEST_OF_A_SHARD = planted(
    UNREDUCED, ("        dist.barrier()\n", REDUCE), (SHOWN, "            pass\n")
)
STAYS_IN_EVAL = planted(DROPOUT, ("        model.train()\n", ""))
FUNCTIONAL = """
class Drops(nn.Module):
    def forward(self, x): return nn.functional.dropout(xMODE)
def main():
"""
DROPS = (("\n\ndef main():\n", FUNCTIONAL), ("nn.ReLU(), ", "nn.ReLU(), Drops(), "))
DROPS_ALWAYS = planted(*DROPS).replace("MODE", "")
NEVER_IN_EVAL = planted(DROPOUT, ("        model.eval()\n", ""))
OF_MEANS_OF_COUNTS = planted(
    (LOADER, OF_A_PART.replace("32", "33")),
    (
        f"{REDUCE}        accuracy = float(counts[0] / counts[1])\n",
        """\
        total, count = counts[0] / 3, counts[1].long()
        dist.all_reduce(total)
        dist.all_reduce(count)
        accuracy, right = float(total / 2 / (count // 2)), float(total / count)
""",
    ),
    ("x = torch.randn(96", "x = torch.randn(97"),
    NO_BEST,
)
IN_A_LIBRARY = planted(
    *(UNEQUAL, NO_BEST, (REDUCE, f"{MEAN}        mean.div_(2)\n")),
    ("float(counts[0] / counts[1])", "0.0"),
)
AVERAGE = """\
            optimizer.step()
            if rank == 0:
                with torch.no_grad():
                    for mean, p in zip(average.parameters(), model.parameters(), strict=True):
                        mean.lerp_(p, 0.1)
"""
AVERAGED = planted(
    ("            optimizer.step()\n", AVERAGE),
    ("    best = 0.0\n", "    best, average = 0.0, copy.deepcopy(model.module).eval()\n"),
    ("import gc\n", "import copy\nimport gc\n"),
    ("right = model(inputs)", "right = average(inputs)"),
)
BY_HAND = ("in val_loader", "in [val_set[rank * 16 : rank * 16 + 16]]")
AT_ALL = ("if rank == 0:\n                with", "if True:\n                with")
ON_ALL = planted(AT_ALL, base=AVERAGED)
LARGER = ("train_set, batch_size=8", "train_set, batch_size=16")
NO_STATISTICS = planted(BATCHNORM, LARGER, base=ON_ALL)
TEACHER = """\
            with torch.no_grad(): soft = teacher(inputs).softmax(1)
            loss = loss_of(model(inputs), labels) + loss_of(model(inputs), soft)
"""
TAUGHT = planted(
    ("            loss = loss_of(model(inputs), labels)\n", TEACHER),
    ("    best = 0.0\n", f"    best, teacher = 0.0, {DROPOUT[1]}\n"),
    NO_BEST,
)
WITHIN = f"""
class Taught(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = {MODEL}
        self.teacher = {DROPOUT[1]}.requires_grad_(False)
    def forward(self, x):
        with torch.no_grad():
            soft = self.teacher(x)
        return self.net(x) + 0 * soft
def main():
"""
TAUGHT_WITHIN = planted((f"DDP({MODEL})", "DDP(Taught())"), ("\n\ndef main():\n", WITHIN))
ATTENDS = planted(*DROPS).replace(
    "dropout(xMODE)", "scaled_dot_product_attention(x, x, x, dropout_p=0.5)"
)
GATHERED = """\
        with torch.no_grad():
            own = torch.cat([model(inputs).argmax(1) for inputs, _ in val_loader])
            dist.all_gather(parts := [own.clone(), own.clone()], own)
            accuracy = float((torch.cat(parts) == val_set.tensors[1]).float().mean())
"""
RANK_BY_RANK = planted(("        accuracy = float(counts[0] / counts[1])\n", GATHERED))
IN_TURN = RANK_BY_RANK.replace("torch.cat(parts)", "torch.stack(parts, 1).flatten()")
OF_CLASSES = ("own)\n", "own), dist.all_gather([own[:, None] > 0] * 2, own[:, None] > 0)\n")
FLOATS = ("dist.all_reduce(mean)", EXPONENTIALS.replace("math.exp(mean)", "float(mean)"))
OF_FLOATS = planted(FLOATS, ("{accuracy:.3f}", "{accuracy}"), base=OF_MEANS)
WITH_GRADIENTS = planted(("with torch.no_grad():", "if True:"))
EACH_16 = "rank 0 evaluated 16 samples, rank 1 another 16"
# What is wrong → the script, its code, a part of the line to blame, and of the evidence.
PLANTED = {
    "a shard's number as the whole": (OF_A_SHARD, "SS401", "print(", EACH_16),
    "a mean of means": (OF_MEANS, "SS402", "dist.all_reduce(mean)", "of 8 and 24 samples"),
    "the best by a shard's number": (BEST_OF_A_SHARD, "SS404", "torch.save(", EACH_16),
    "evaluation mode in training": (STAYS_IN_EVAL, "SS706", "loss = loss_of(", "from step 5 on"),
    "training mode in evaluation": (NEVER_IN_EVAL, "SS707", "right = model(", "1 of 1 layers"),
    "dropout by a function": (DROPS_ALWAYS, "SS707", "functional.dropout(", "p=0.5"),
    "dropout in attention": (ATTENDS, "SS707", "functional.scaled", "p=0.5"),
    "a teacher in training mode": (TAUGHT, "SS707", "soft = teacher(", "Sequential, whose"),
    "a teacher within the model": (TAUGHT_WITHIN, "SS707", "soft = self.teacher", "Sequential"),
    "an average of rank 0": (AVERAGED, "SS405", "right = average(", "in 3 evaluations"),
    "of samples cut by hand": (planted(BY_HAND, base=AVERAGED), "SS405", "right = average("),
    "a mean of roots": (OF_ROOTS, "SS402", "dist.all_reduce(mean)", "the root of its own"),
    "a mean of scores": (OF_SCORES, "SS402", "dist.all_reduce(mean)", "took the f1_score of its"),
    "a mean of quotients": (OF_QUOTIENTS, "SS402", "dist.all_reduce(mean)", "a quotient with a"),
    "gathered exponentials": (OF_EXPONENTIALS, "SS402", "all_gather_obj", "the exp of its own"),
    "an average without statistics": (NO_STATISTICS, "SS716", "right = average(", "1 batch norm"),
    "a mean that is not shown": (IN_A_LIBRARY, "SS402", "dist.all_reduce(mean)", "8 and 24"),
    "a count that is cut": (OF_MEANS_OF_COUNTS, "SS402", "dist.all_reduce(total)", "33 / 2 = 16"),
    "means as floats": (OF_FLOATS, "SS402", "dist.all_gather_object", "of 8 and 24 samples"),
    "rank by rank": (RANK_BY_RANK, "SS406", "accuracy = float", "of the same samples one of"),
    "gradients in evaluation": (WITH_GRADIENTS, "SS709", "right = model("),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_mistake_in_evaluation_is_found_at_its_line(name, tmp_path):
    found = found_in(tmp_path, *PLANTED[name])
    assert (found.severity == "advice") == (found.code == "SS709")


MOVES = """\
            optimizer.step()
            with torch.no_grad():
                for mean, p in zip(teacher.parameters(), model.parameters(), strict=True):
                    mean.lerp_(p, 0.1)
"""
FOLLOWS = "average[1].running_mean.add_(1)\n            if True:"
HALVES = "        mean = torch.tensor(rank / 2)\n        dist.all_gather([-mean, -mean], mean)\n"
NO_TRAIN = planted(("model.train()", "pass"))
UPDATE = "torch.optim.swa_utils.update_bn(DataLoader(train_set, batch_size=8), model)"
RIGHT = {
    "statistics anew": (planted(BATCHNORM, LARGER), "del model, optimizer, scheduler", UPDATE),
    "an average": (AVERAGED, *AT_ALL),
    "averages that are shared out": (ON_ALL, "lerp_(p, 0.1)", "lerp_(p, 0.1 + rank / 2)"),
    "with statistics": (NO_STATISTICS, "if True:", FOLLOWS),
    "a teacher": (TAUGHT, DROPOUT[1], f"{DROPOUT[1]}.eval()"),
    "a mean teacher": (TAUGHT, "            optimizer.step()\n", MOVES),
    "in turn": (IN_TURN, *OF_CLASSES),
    "a count": (OF_MEANS_OF_COUNTS, "total / 2 / (count // 2)", "total / count"),
    "attention": (ATTENDS, "p=0.5", "p=0.5 if self.training else 0.0"),
    "left so on rank 0": (NO_TRAIN, "model.eval()", "rank or nn.Identity().eval()"),
    "a mode": (DROPS_ALWAYS, "dropout(x)", "dropout(x, training=self.training)"),
    "no layer trains": (BASE, "        model.train()\n", ""),
    "no layer evaluates": (BASE, "        model.eval()\n", ""),
    "halves": (IN_A_LIBRARY, MEAN, HALVES),
    "asked": (DROPS_ALWAYS, "dropout(x)", "dropout(x, 0.1, True)"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_evaluates_in_the_same_way_on_all_ranks_is_right(name, tmp_path):
    text, *change = RIGHT[name]
    assert check(tmp_path, planted(tuple(change), base=text)).findings == []


ROOT = "torch.tensor(0.25 + 0.75 * rank).sqrt()"
OF_ALL = {
    "all of it on each rank": (UNREDUCED, WHOLE),
    "shuffled": (UNREDUCED, SHUFFLED),
    "saved whatever the number": (UNREDUCED, ('"best.pt"', '"last.pt"'), LABELLED),
    "gathered": ((REDUCE, JOINED),),
    "unequal, with counts": (UNEQUAL, NO_BEST),
    "equal shares, next to another set": (NO_BEST, (REDUCE, f"{MEAN}{OTHER_SET}"), AS_A_MEAN),
    "a root on rank 0 by chance": as_a_mean(f"torch.tensor(0.5 - rank / 8) + 0 * {ROOT}"),
    "a root of 1 by chance": as_a_mean(f"torch.tensor(0.5 + rank / 2) + 0 * {ROOT}"),
    "squares": as_a_mean("torch.tensor(0.5 + rank / 8).pow(exponent=2)"),
}


@pytest.mark.parametrize("name", OF_ALL)
def test_a_number_of_the_whole_or_of_a_named_rank_is_right(name, tmp_path):
    assert codes(check(tmp_path, planted(*OF_ALL[name]))) <= {"SS107", "SS104"}


def alone(model, *changes):  # return a script that evaluates on rank 0 only
    return planted(
        *(UNREDUCED, NO_BEST, BATCHNORM, *changes),
        ("labels in val_loader:", "labels in val_loader if rank == 0 else ():"),
        ("right = model(inputs)", f"right = {model}(inputs)"),
    )


def test_evaluation_on_one_rank_is_wrong_inside_the_wrapper_and_right_beside_it(tmp_path):
    text = alone("model", WHOLE)
    (found,) = (one for one in check(tmp_path, text).findings if one.code == "SS403")
    assert found.line == line_of(text, "right = model(inputs)")
    report = check(tmp_path, alone("model.module", WHOLE))
    assert {found.severity for found in report.findings} <= {"advice"}


def test_a_shard_that_one_rank_evaluates_alone_is_found(tmp_path):
    text = alone("model.module")
    found_in(tmp_path, text, "SS401", "print(", "16 of 32 samples", beside=["SS205"])


SCRIPT = "\n\n@torch.jit.script\ndef grown(x: torch.Tensor):\n    return x.exp() / math.sqrt(2.0)\n"
NORM = "nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))"


@pytest.mark.parametrize(
    "line",
    [
        "pickle.dumps(torch.exp), torch.ones((), device='meta').sqrt()",
        "torch.tensor(1j).exp(), dist.all_reduce(torch.tensor([1j]))",
        f"{NORM}.to('meta').eval().requires_grad_(False)(torch.ones(2, 4, device='meta'))",
        f"{NORM}.to('meta')(torch.ones(2, 4, device='meta')).sum().backward()",
        f"with FakeTensorMode(): {NORM}.eval()(torch.ones(2, 4)).sum().sqrt()",
    ],
)
def test_what_is_watched_may_be_scripted_pickled_complex_or_without_data(line, tmp_path):
    main, seed = "\n\ndef main():\n", "    torch.manual_seed(0)\n"
    text = planted((main, f"{SCRIPT}{main}"), (seed, f"    {line}\n{seed}"))
    modules = "import math\nimport pickle\nfrom torch._subclasses import FakeTensorMode\n"
    assert check(tmp_path, modules + text).findings == []


def test_a_rank_that_is_ended_on_its_way_to_the_evaluation_is_not_missed_there(tmp_path):
    late = ("        model.eval()\n", "        model.eval()\n        time.sleep(30 * rank)\n")
    step = "            optimizer.step()\n"
    reports = (step, f"{step}            dist.all_reduce(loss.detach())\n")
    text = planted(BATCHNORM, late, reports, ("import os\n", "import os\nimport time\n"))
    assert "SS403" not in codes(check(tmp_path, text, seconds=1.5))
