"""A LightningModule as a recipe: the training of `Trainer.fit`, on any number of ranks."""

import runpy
import tomllib
import warnings

import pytest
import torch

import samestep
from tests import tiny
from tests.command_line import run, train_here

pl = pytest.importorskip("lightning.pytorch")
torchmetrics = pytest.importorskip("torchmetrics")
DummyLogger = pl.loggers.logger.DummyLogger
# The trainings are made once, for all tests of this file.
pytestmark = pytest.mark.xdist_group("lightning as brought")

MODULE = """
import collections, torch, lightning as L, samestep.lightning
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset
from torchmetrics import MaxMetric, MeanMetric
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC
NORM, VAL, TOP, BACK = False, "val_out", "val_top", range(122, -1, -1)
class Own(DataLoader): __iter__ = None
class Rows(TensorDataset):
    def __getitem__(self, k): return [t[k] if k < 123 else exit(9) for t in self.tensors]
class Data(L.LightningDataModule):
    batch_size = 8
    def prepare_data(self): torch.rand(1)  # on one rank of a node
    def setup(self, stage):
        assert vars(self).setdefault(stage, 1) == 1; vars(self)[stage] += 1  # once
        x = torch.randn(123, 6, generator=torch.Generator().manual_seed(3))
        self.data = TensorDataset(x, (x.sum(1) > 0).float())
        self.test_dataloader = lambda: [DataLoader(self.data, 8)]  # as of from_datasets
    def train_dataloader(self): return DataLoader(Subset(self.data, BACK), batch_size=8)
    def val_dataloader(self): return DataLoader(self.data, batch_size=8)
class Odd:
    def set_epoch(self, epoch): self.epoch = epoch
    def __len__(self): return 101
    def __iter__(self): return iter([(11 * place + self.epoch) % 123 for place in range(101)])
class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        norm = nn.BatchNorm1d(6) if NORM else nn.Identity()
        self.net = nn.Sequential(norm, nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
        self.accuracy, self.mean, self.auroc = BinaryAccuracy(), MeanMetric(), BinaryAUROC()
        self.loss, self.still = nn.BCEWithLogitsLoss(), nn.BatchNorm1d(6).eval()
        self.register_buffer("ema", torch.ones(())); self.outs = collections.defaultdict(list)
        self.save_hyperparameters()
    def on_before_zero_grad(self, _): self.ema.mul_(0.9).add_(self.net[1].bias.detach().max())
    def on_before_optimizer_step(self, _): self.ema += self.net[3].weight.grad.abs().max()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.ema += 0.01 * outputs["twice"] * batch_idx + 0.001 * self.global_step
        self.ema += 0.1 * self.trainer.is_last_batch
    def on_train_start(self):
        self.logger.log_hyperparams(self.hparams); self.net[3].weight.data.mul_(0.5)
    def on_validation_epoch_end(self):
        assert not (self.training or torch.is_grad_enabled())
        self.log("val_top", self.auroc.compute()); self.log("val_object", self.auroc)
        self.log("val_gathered", torch.cat(self.outs["all"]).mean()); self.outs.clear()
    def on_before_batch_transfer(self, batch, _):
        return batch[0] + 0.1 * self.trainer.validating, batch[1]
    def forward(self, x): return self.net(self.net(self.still(x)) + x).squeeze(1)
    def on_train_epoch_start(self): self.factor = 1 + 0.1 * self.current_epoch
    def on_train_epoch_end(self):
        self.net[1].bias.requires_grad_(self.current_epoch > 0); m = self.trainer.callback_metrics
        self.log("bias", self.net[1].bias.sum() + m[VAL] + 0 * m[TOP])
    def training_step(self, batch, batch_idx):
        loss = self.loss(self(batch[0]), batch[1])
        self.log("rate", self.optimizers().param_groups[0]["lr"], reduce_fx="max")
        loss = loss * self.factor * (1 + 0.01 * batch_idx + 0.001 * self.global_step)
        return {"loss": loss, "twice": 2}
    def validation_step(self, batch):
        x, y = batch; out = self(x) + 0 * self.optimizers().param_groups[0]["lr"]
        self.mean.update(self.loss(out, y).detach(), weight=len(y)); self.log("val_loss", self.mean)
        self.log("val_step", 2e-7); self.log("val_most", out.max(), reduce_fx="max")
        self.outs["all"].append(out)
        self.accuracy(out, y); self.auroc.update(out, y); self.log("val/auroc", self.auroc)
        self.log_dict({"val/accuracy": self.accuracy, "val_out": out.mean()})
    def skips(self, scheduler, _): self.global_step % 3 and scheduler.step()
    def steps(self, epoch, number, optimizer, closure):
        group = optimizer.param_groups[0]; group["weight_decay"] = 0.01 * self.global_step
        optimizer.step(closure); group["eps"] = 1e-6 * (1 + epoch + number + self.global_step)
    def test_step(self, *given): self.log("test_out", self(given[0][0]).mean())
    def configure_optimizers(self):
        size = self.trainer.world_size
        optimizer = torch.optim.AdamW(self.trainer.model.parameters(), weight_decay=0.01 * size)
        total = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=total)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]
torch.manual_seed(1); net = Net()
recipe = samestep.lightning.recipe(net, Data, batch_size=8, epochs=3, order="sequential")
"""
RECIPE = MODULE.splitlines(keepends=True)[-1]
FIT = """if __name__ == "__main__":
    L.seed_everything(2); of, nth = L.pytorch.callbacks, "/dataloader_idx_0"
    stop = of.EarlyStopping("val_loss" + nth, patience=7)
    keep = of.ModelCheckpoint(monitor="val/accuracy" + nth, mode="max")
    trainer = L.Trainer(max_epochs=3, callbacks=[stop, keep], precision="bf16-mixed", devices=1)
    trainer.fit(net, Data())
    trainer.test(net, Data())
"""
LATE = [("self.loss, self", "self.late = MeanMetric(); self.loss, self")]
TAKES = 'self.late(1 / (1 + self.current_epoch)); self.log("late", self.late.compute())'
LATE += [('self.log("val_top', f'{TAKES}; self.log("val_top')]
BEST = [(old, new.replace("MeanMetric", "MaxMetric")) for old, new in LATE]
HOOKS = "on_before_zero_grad", "on_before_optimizer_step", "on_train_batch_end"
ALONE = ("--threads", "1", "--device", "cpu")


def written(tmp_path, *changes):
    (tmp_path / "brought.py").write_text(tiny.changed(MODULE, *changes))
    return str(tmp_path / "brought.py")


def by_the_trainer(theirs, **how):
    """Train by Lightning's Trainer, on one thread; return it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings(action="ignore"):  # on workers, and on srun
        how |= {"accelerator": "cpu", "enable_checkpointing": False, "logger": DummyLogger()}
        trainer = pl.Trainer(**how)
        trainer.fit(theirs["net"], theirs["Data"]())
    torch.set_num_threads(threads)
    return trainer


def evaluated(folder, split):
    return [one for one in samestep.read_records(folder) if one.get("split") == split][-1]


@pytest.mark.parametrize(("precision", "theirs"), [("fp32", "32-true"), ("bf16", "bf16-mixed")])
def test_it_has_the_weights_of_the_trainer_to_the_last_bit_and_logs_the_same(
    tmp_path, precision, theirs
):
    """With a schedule, hooks, a norm, a sampler of its own, and two validation loaders."""
    sampler = ("Subset(self.data, BACK), batch_size=8", "self.data, 8, sampler=Odd()")
    fits = precision == "bf16"  # by a script that builds a Trainer
    drawn = (RECIPE, FIT) if fits else (', order="sequential"', "")
    endless = ("= TensorDataset(", "= Rows(")  # one that is read whole never ends
    several = ("(self.data, b", "(self.data, 9), DataLoader(Subset(self.data, range(50)), b")
    asked = ("step(self, batch):\n        x", "step(self, batch, nth, dataloader_idx):\n        x")
    by_name = 'f"val_{dataloader_idx}_out", out.mean() * (1 + dataloader_idx)'
    weighed = ('"val_out": out.mean()})', f"}}); self.log({by_name}, add_dataloader_idx=False)")
    named = ('False, "val_out", "val_top"', 'True, "val_1_out", "val_1_out"')
    changes = sampler, drawn, endless, several, asked, weighed, named, NO_END
    file = written(tmp_path, *changes, ("def skips", "def lr_scheduler_step"))
    how = ("--run-dir", str(tmp_path / "run"), *(() if fits else ("--precision", precision)))
    assert ("what follows it is not run" in train_here(file, *ALONE, *how)) is fits
    settings = tomllib.loads((tmp_path / "run/settings.toml").read_text())
    kept = [settings.get(name) for name in ("patience", "seed", "mode", "stop_monitor")]
    assert not fits or kept == [7, 2, "max", "dataloader_idx_0/loss:min"]
    how = {"enable_progress_bar": False, "precision": theirs}
    trainer = by_the_trainer(theirs := runpy.run_path(file), max_epochs=3, **how)
    mine, net = samestep.load(tmp_path / "run", checkpoint="last"), theirs["net"]
    assert not mine.mean._to_sync  # ranks have other numbers of batches
    torch.testing.assert_close({**mine.state_dict()}, {**net.state_dict()}, rtol=0, atol=0)
    validation = evaluated(tmp_path / "run", "validation")
    assert validation["val_step"] == pytest.approx(2e-7)
    auroc = trainer.callback_metrics["val/auroc/dataloader_idx_0"].item()
    assert validation["dataloader_idx_0/auroc"] == pytest.approx(auroc, rel=1e-6)
    own = {"loss": "val_loss", "accuracy": "val/accuracy"}
    for name in ("loss", "accuracy", "out"):
        of = f"{own[name]}/dataloader_idx_%d" if name in own else "val_%d_out"
        theirs = [trainer.callback_metrics[of % k].item() for k in (0, 1)]
        first, second = (validation[f"dataloader_idx_{k}/{name}"] for k in (0, 1))
        if name != "out":  # the Trainer does not reset a metric of torchmetrics between two loaders
            second = (123 * first + 50 * second) / 173
        rel = 1e-5 if precision == "fp32" else 2e-3  # ours evaluates batches of another size
        assert (first, second) == pytest.approx(tuple(theirs), rel=rel)
    ended = [one for one in samestep.read_records(tmp_path / "run") if one["event"] == "epoch"]
    assert ended[-1]["metrics"]["bias"] == pytest.approx(float(trainer.callback_metrics["bias"]))


SEVERAL = """[optimizer], [
            {"scheduler": scheduler, "interval": "step", "frequency": 6},
            {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "frequency": 2},
            {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
             "monitor": "val_top"}]"""


def test_a_script_keeps_batches_order_and_limits_that_its_setup_and_trainer_make(tmp_path):
    """With half precision of a CPU, clipping by value, a second schedule, and virtual ranks."""
    once = [(f"def {hook}", f"def _{hook}") for hook in HOOKS]  # for each step
    asked = "accumulate_grad_batches=3, limit_train_batches=0.6, limit_val_batches=2, "
    asked += "gradient_clip_val=0.02, gradient_clip_algorithm='Value'"
    begins = ("on_train_epoch_start(self)", "on_train_batch_start(self, _, nth)")
    fit = FIT.replace('"bf16-mixed"', f'"16-mixed", {asked}').replace("/dataloader_idx_0", "")
    sized = ("    batch_size = 8\n", "")  # known only once its loader is made
    once += [(LISTED, SEVERAL), ("def steps", "def optimizer_step")]
    file = written(tmp_path, sized, begins, (RECIPE, fit), *once)
    sizes = ["--batch-size", "24", "--micro-batch-size", "8", "--virtual-ranks", "1"]
    train_here(file, *ALONE, *sizes, "--run-dir", str(tmp_path / "run"))
    how = eval(f"dict({asked}, max_epochs=3, precision='16-mixed')")
    trainer = by_the_trainer(theirs := runpy.run_path(file), **how)
    mine, net = samestep.load(tmp_path / "run", checkpoint="last"), theirs["net"]
    torch.testing.assert_close({**mine.state_dict()}, {**net.state_dict()}, rtol=0, atol=0)
    validation, logged = evaluated(tmp_path / "run", "validation"), trainer.callback_metrics
    for name in ("gathered", "most"):
        assert validation[name] == pytest.approx(float(logged[f"val_{name}"]), rel=1e-6)


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_on_three_ranks_and_after_a_resume_it_is_the_same_training(tmp_path, strategy):
    left_out = [(f"def {hook}", f"def _{hook}") for hook in HOOKS if strategy == "fsdp"]
    drawn = (", generator=torch.Generator().manual_seed(3)", "")  # alike on all ranks
    length = ("int(self.trainer.estimated_stepping_batches)", "48")
    file = written(tmp_path, drawn, length, *left_out, *BEST)
    fp64 = ("--precision", "fp64", "--device", "cpu")
    one, three = (str(tmp_path / name) for name in ("one", "three"))
    train_here(file, *fp64, "--threads", "1", "--run-dir", one)
    more = ("--strategy", strategy, "--max-steps")
    run("train", file, *fp64, *more, "20", "--run-dir", three, world_size=3, folder=tmp_path / "a")
    run("train", three, "--resume", *more, "48", world_size=3, folder=tmp_path / "b")
    for split in ("validation", "test"):
        own, other = (evaluated(folder, split) for folder in (one, three))
        assert own["out"] == pytest.approx(other["out"], rel=1e-9)
        for name in {"accuracy", "auroc", "top", "gathered", "most"} & own.keys():
            assert own[name] == pytest.approx(other[name], abs=1e-12)
        assert own.get("top") == own.get("object") == own.get("auroc")
        assert split == "test" or own["late"] == other["late"] == 1  # the best: of the first epoch


def test_a_list_that_a_validation_begins_is_there_on_a_rank_without_samples(tmp_path):
    few = ("return DataLoader(self.data,", "return DataLoader(Subset(self.data, range(2)),")
    unset = ("; self.outs = collections.defaultdict(list)", "")
    begins = "def on_validation_epoch_start(self): self.outs = {'all': []}\n    def forward"
    file = written(tmp_path, few, unset, ("def forward", begins))
    flags = ("--max-steps", "16", "--device", "cpu", "--run-dir", str(tmp_path / "run"))
    run("train", file, *flags, world_size=3, folder=tmp_path / "ranks")
    assert abs(evaluated(tmp_path / "run", "validation")["gathered"]) > 0


CALLBACK = """import dataclasses, functools, types
def given(_, optimizer): return optimizer  # as LightningCLI sets it
made = functools.partial(given, optimizer=torch.optim.SGD(net.parameters(), 0.1))
net.configure_optimizers = types.MethodType(functools.update_wrapper(made, given), net)
Tells = dataclasses.make_dataclass("Tells", [], bases=(L.Callback,))
def teller(name):
    def hook(_, trainer, module, *given, **__):
        name == "setup" and module.still.requires_grad_(False)
        seen = trainer.callback_metrics.get(VAL, torch.zeros(())).item(), module.ema.item()
        at = trainer.current_epoch, trainer.global_step
        trainer.sanity_checking or print("told", name, *at, *(f"{value:.4f}" for value in seen))
    return hook
NAMES = "setup train_start train_epoch_start validation_end train_epoch_end train_batch_start"
for name in (NAMES + " before_zero_grad after_backward train_batch_end").split():
    name = name if name == "setup" else f"on_{name}"; setattr(Tells, name, teller(name))
"""


def test_a_callback_of_a_scripts_own_is_called_as_the_trainer_calls_it(tmp_path, capsys):
    fit = FIT.replace("max_epochs=3", "max_epochs=4")
    for old, new in ("keep]", "keep, Tells()]"), ("bf16-mixed", "32"), ("/dataloader_idx_0", ""):
        fit = fit.replace(old, new)
    file = written(tmp_path, (" + m[VAL] + 0 * m[TOP]", ""), (RECIPE, CALLBACK + fit))
    mine = train_here(file, *ALONE, "--eval-every", "2epochs", "--run-dir", str(tmp_path / "run"))
    theirs, how = runpy.run_path(file), {"check_val_every_n_epoch": 2}
    capsys.readouterr()
    by_the_trainer(theirs, max_epochs=4, callbacks=[theirs["Tells"]()], **how)
    own, others = mine.splitlines(), capsys.readouterr().out.splitlines()
    told = [[line for line in lines if line.startswith("told")] for lines in (own, others)]
    assert told[0] == told[1]
    assert len(told[0]) == 12 + 4 * 4 * 16


def test_a_training_step_whose_loss_is_a_sum_is_told_where_micro_steps_share_a_batch(tmp_path):
    for kind, told in ("mean", False), ("sum", True):
        loss = ("nn.BCEWithLogitsLoss()", f"nn.BCEWithLogitsLoss(reduction='{kind}')")
        file = written(tmp_path, loss, ("loss * self.factor", "loss"))
        how = ("--max-steps", "1", "--micro-batch-size", "4", "--run-dir", str(tmp_path / kind))
        assert ("is not the mean of" in train_here(file, *ALONE, *how)) is told


def test_an_evaluation_by_training_step_leaves_buffers_as_they_were():
    from samestep.bridges.lightning.logged import Evaluated, called

    net = torch.nn.BatchNorm1d(2).eval()
    type(net).training_step = lambda own: own.running_mean.add_(1).sum()
    evaluated = Evaluated()
    assert called(net, "training_step", None, seen=evaluated)[0]["loss"] == 2
    assert evaluated.buffers(net) is evaluated.buffers(net)  # copied once in an evaluation
    assert not net.running_mean.any()


def test_the_best_value_so_far_is_known_right_after_a_resume():
    from samestep.bridges.lightning import logged

    before, after = (torch.nn.ModuleList([torchmetrics.MaxMetric()]) for _ in range(2))
    for module in (before, after):
        logged.prepare_metrics(module)
    before[0].update(2.0)
    after.load_state_dict(before.state_dict())
    logged.recall_best(after)
    assert (logged.is_kept(after[0]), after[0].compute()) == (True, 2.0)  # it warns of nothing


STEP = ("OneCycleLR(optimizer, max_lr=0.05, total_steps=total)", "ReduceLROnPlateau(optimizer)")
LISTED = '[optimizer], [{"scheduler": scheduler, "interval": "step"}]'
BY_DICT = '[optimizer], {"scheduler": scheduler,'
TOP = 'dict(optimizer=optimizer, lr_scheduler=scheduler, monitor="val_acc")'
KEEPS = ('"val_step", 2e-7)', '"val_step", 2.0); self.kept = 2.0')
FACTOR, FREEZES = "self.factor =", "self.net[3].requires_grad_(self.current_epoch < 1)"
NO_END = ("def on_validation_epoch_end", "def not_a_hook")
SEEN = [("self.loss, self", "self.seen = []; self.loss, self")]
SEEN += [("loss = loss", "self.seen.append(loss.detach()); loss = loss")]
SEEN += [("m = self.tr", "self.seen.clear(); m = self.tr")]
TWO = ("return DataLoader(self.data, batch_size=8)", "return 2 * [DataLoader(self.data)]")
LATER = CALLBACK.replace("validation_end", "validation_start")
SUMS = f"{CALLBACK}Tells.on_train_batch_end = lambda own, *_: vars(own).update(seen=[*vars(own)])\n"
TAU = f"{CALLBACK}def decays(own, _, module, *__):\n    own.tau = 0.9 * vars(own).get('tau', 1)\n"
TAU += "    module.ema.mul_(own.tau)\nTells.on_train_batch_end = decays\n"
IN_EVAL = "self.still.train(self.current_epoch != 1)"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ([("(net, Data, batch_size=8, ", "(net, Data, ")], "needs batch_size"),
        ([("epochs=3", "epochs=3, clip_norm=1.0")], "on_before_optimizer_step"),
        ([("epochs=3", 'epochs=3, strategy="fsdp"')], "parts of the weights"),
        ([("self.save_hyperparameters()", "self.automatic_optimization = False")], "open_run"),
        ([("return [optimizer], ", "return [optimizer, optimizer], ")], "returns several"),
        ([("def on_train_epoch_start", "def on_validation_end")], "on_validation_end"),
        (LATE, "updates late"),
        ([("(self.outs[", "(self.kept and self.outs["), KEEPS], "changes the model's kept"),
        (SEEN, "seen. In on_train_epoch_end"),
        ([TWO], "validation loaders"),
        ([("self.net[1].bias.sum() +", "self.accuracy.compute() +")], "has no samples there"),
        ([("return {", "return None and {")], "returned no loss"),
        ([("(self.trainer.esti", "(self.trainer.fit_loop.esti")], "asks its Trainer for 'fit"),
        ([(FACTOR, f"self.trainer.should_stop = True; {FACTOR}")], "sets its Trainer's s"),
        ([('"val_loss", self.mean', '"val_loss", out.max(), reduce_fx="std"')], "reduce_fx=std"),
        ([("epochs=3,", "max_epochs=3,")], "Use epochs"),
        ([("epochs=3,", "epochs=3, lr=0.5,")], "--lr 0.5 changes nothing"),
        ([('"val_out": out', 'f"val_{out[0] > 0}": out')], "Log the same"),
        ([STEP, (LISTED, f'{BY_DICT} "interval": "step"}}')], "--eval-every"),
        ([STEP, (LISTED, f'{BY_DICT} "monitor": "train_loss"}}')], "validation_step logs"),
        ([STEP, (LISTED, TOP)], "has the monitor 'acc'"),
        ([STEP, (LISTED, f'{BY_DICT} "frequency": 3}}')], "--eval-every 3epochs"),
        ([("def test_step", "def optimizer_step(*_): pass\n    def test_step")], "0 times, not"),
        ([(FACTOR, f"{FREEZES}; {FACTOR}")], "freezes or unfreezes"),
        ([("self.factor", f"{IN_EVAL}; self.factor")], "still into eval mode in one epoch"),
        ([("net = Net()", "net = lambda: Net().double()")], "precision='fp64'"),
        ([("(net, Data, batch", "(net, Own([1]), batch")], "builds its own batches"),
        ([(RECIPE, FIT), ("max_epochs=3", "overfit_batches=3")], "overfit_batches=3"),
        ([(RECIPE, FIT), ("max_epochs=3", "val_check_interval=9")], "check_val_every_n_epoch=None"),
        ([(RECIPE, FIT), ("stop, keep]", "of.BackboneFinetuning()]")], "callback BackboneFine"),
        ([(RECIPE, LATER + FIT), ("keep]", "keep, Tells()]")], "has its own on_validation_start"),
        ([(RECIPE, SUMS + FIT), ("[stop, keep]", "[Tells()]")], "that of one rank"),
        ([(RECIPE, TAU + FIT), ("[stop, keep]", "[Tells()]")], "changes tau of the callback"),
        ([(RECIPE, FIT), ("    batch_size = 8\n", "")], "Add --batch-size 8"),
    ],
)
def test_what_it_asks_in_vain_is_refused_by_name(tmp_path, refused, changes, told):
    file = written(tmp_path, *changes)
    assert told in refused("train", file, *ALONE, "--run-dir", str(tmp_path / "run"))
