"""What transformers.Trainer takes as a recipe: its training, on any number of ranks."""

import json
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

import samestep
from samestep.base.file_kinds import trainer_of
from tests.command_line import call, run, train_here
from tests.tiny import changed, last_state

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")
# Its imports are made once, for all tests of this file.
pytestmark = pytest.mark.xdist_group("what a Trainer takes")

FILE = """
import functools, json, sys
import torch
import samestep.huggingface
from transformers import (BartConfig, BartForConditionalGeneration, BertConfig, LlamaConfig,
    BertForSequenceClassification, LlamaForCausalLM, Seq2SeqTrainer, Seq2SeqTrainingArguments,
    PreTrainedTokenizerFast, Trainer, TrainerCallback, TrainingArguments)
TOKENS = True
draw = torch.Generator().manual_seed(0)
def row(_):
    ids = torch.randint(1, 30, (8,), generator=draw)
    there = (torch.arange(8) < torch.randint(3, 9, (), generator=draw)).long()
    labels = ids.where(there > 0, -100) if TOKENS else int(ids.sum() > 120)
    return {"input_ids": ids * there, "attention_mask": there, "labels": labels, "unused": "text"}
train, validation = [row(n) for n in range(50)], [row(n) for n in range(21)]
sizes = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 8}
no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
def make():
    torch.manual_seed(1)
    if TOKENS: return LlamaForCausalLM(LlamaConfig(**sizes))
    return BertForSequenceClassification(BertConfig(**sizes, **no_dropout))
def measure(seen):
    found, places = seen.predictions.argmax(-1), torch.arange(1, 22).numpy()
    right = (found == seen.label_ids).reshape(len(found), -1).mean(1)
    return {"eval_accuracy": right.mean(), "by_place": (right * places).mean()}
kinds = {"train_sampling_strategy": "sequential", "lr_scheduler_type": "cosine"}
args = TrainingArguments(__file__ + ".out", per_device_train_batch_size=4, num_train_epochs=8,
    use_cpu=True, gradient_accumulation_steps=2 if TOKENS else 1, learning_rate=3e-3,
    weight_decay=0.1, warmup_steps=5, label_smoothing_factor=0.1, eval_strategy="epoch",
    save_strategy="no", logging_steps=1, report_to="none", disable_tqdm=True, **kinds)
given = {"train_dataset": train, "eval_dataset": validation, "compute_metrics": measure}
model = make()
recipe = samestep.huggingface.recipe(model, args, **given)
"""
FROM = "recipe = samestep.huggingface.from_trainer(trainer)\n"
OURS = "recipe = samestep.huggingface.recipe(model, args, **given)\n"
OWN = """class Loads(Trainer):
    def get_train_dataloader(self):
        options = {"batch_size": 4, "collate_fn": self.data_collator}
        return self.accelerator.prepare(torch.utils.data.DataLoader(train[::-1], **options))
sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
falling = torch.optim.lr_scheduler.LambdaLR(sgd, lambda step: 1 / (1 + step))
trainer = Loads(model, args, optimizers=(sgd, falling), **given)
"""
STREAM = """class Stream(torch.utils.data.IterableDataset):
    __iter__ = lambda self: iter(train)
given["train_dataset"] = Stream()
args.max_steps, args.eval_strategy, args.eval_steps = 60, "steps", 25
args.gradient_accumulation_steps = 1
given["optimizer_cls_and_kwargs"] = torch.optim.NAdam, {"lr": 0.01}
trainer = Trainer(model.to(torch.bfloat16), args, **given)
"""
GENERATES = """asked = {"predict_with_generate": True, "gradient_accumulation_steps": 1}
args = Seq2SeqTrainingArguments(**args.to_dict() | asked | {"generation_max_length": 6})
layers = {"encoder_layers": 1, "decoder_layers": 1, "dropout": 0.0, "d_model": 16}
torch.manual_seed(1)
model = BartForConditionalGeneration(BartConfig(vocab_size=30, **layers))
mean = lambda seen: {"accuracy": seen.predictions.mean(), "by_place": seen.label_ids.mean()}
trainer = Seq2SeqTrainer(model, args, **given | {"compute_metrics": mean})
"""
METHODS = """class Own(Trainer):
    def log(self, *given): super().log(*given)
    def _get_train_sampler(self, train_dataset=None): return [*reversed(range(50))]
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**{**inputs, "labels": None})
        loss = torch.nn.functional.cross_entropy(outputs.logits, inputs.pop("labels"))
        loss *= 1 + self.state.epoch / self.state.max_steps + self.model.classifier.bias.sum()
        return (loss, outputs) if return_outputs else loss
    def create_optimizer(self, model=None):
        head = self.model.classifier.parameters()
        groups = [{"params": self.model.bert.parameters(), "lr": 1e-3}, {"params": head}]
        self.optimizer = torch.optim.Adam(groups, lr=1e-2)
    def create_scheduler(self, num_training_steps, optimizer=None):
        last = lambda step: 1 - step / num_training_steps
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, last)
class Logs(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **_):
        with open(args.output_dir + ".log", "a") as file:
            file.write(json.dumps([state.global_step, state.epoch, logs]) + "\\n")
    on_epoch_end = lambda self, *known, **_: self.on_log(*known, {})
    on_epoch_begin = on_step_begin = on_step_end = on_epoch_end
def patch(net, forward, layers):  # functions that hold the model itself
    net.forward = functools.wraps(forward)(lambda **given: forward(**given))
    net.classifier.register_forward_hook(lambda *_: _[2] * (1 + layers[0].bias[0]))
patch(model, model.forward, [model.classifier])
trainer = Own(model, args, callbacks=[Logs], **given)
"""
TRL = """import copy, datasets, tokenizers, trl
core = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(n): n for n in range(30)}, "0"))
core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
words = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="0", eos_token="1")
text = lambda ids: "".join(f" {n}" for n in ids.tolist())
def rows(data, *names):
    parts = ([text(row["input_ids"][a:b]) for a, b in ((0, 3), (3, 6), (5, 8))] for row in data)
    return datasets.Dataset.from_list([dict(zip(("prompt", *names), part)) for part in parts])
def trained(kind, config, *names, **more):
    sets = {"train_dataset": rows(train, *names), "eval_dataset": rows(validation, *names)}
    return kind(model=model, args=config(**args.to_dict()), processing_class=words, **sets, **more)
"""
SFT = f"""{TRL}trainer = trained(trl.SFTTrainer, trl.SFTConfig, "completion",
    compute_metrics=measure)
"""
DPO = f"""{TRL}more = {{"ref_model": copy.deepcopy(model)}}
trainer = trained(trl.DPOTrainer, trl.DPOConfig, "chosen", "rejected", **more)\n"""
ALONE = ("--threads", "1", "--device", "cpu")


def written(tmp_path, *changes):
    (tmp_path / "brought.py").write_text(changed(FILE, *changes))
    return str(tmp_path / "brought.py")


def logged(file):
    path = Path(f"{file}.out.log")
    lines = path.read_text().splitlines()
    path.unlink()
    return [json.loads(line) for line in lines]


def records(folder, event):
    return [one for one in samestep.read_records(folder) if one["event"] == event]


@pytest.mark.parametrize(
    "kind",
    ["tokens", "classes", "own optimizer", "own methods", "stream", "generates", "sft", "dpo"],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of TRL
def test_it_takes_the_steps_of_the_trainer(tmp_path, kind):
    """Padded tokens in micro-steps, or classes with smoothed labels; a callback that only logs."""
    tokens = kind in ("tokens", "stream", "generates", "sft", "dpo")
    changes = [("TOKENS = True", f"TOKENS = {tokens}")]
    changes += [("label_smoothing_factor=0.1, ", "")] * tokens
    own = {"own optimizer": OWN, "own methods": METHODS, "stream": STREAM, "generates": GENERATES}
    own |= {"sft": SFT, "dpo": DPO}
    changes += [(OURS, own[kind] + FROM if kind in own else OURS)]
    by_name = kind == "classes"
    changes += [("model = make()", "model = make(); args.fp16 = True")] * by_name  # no effect
    changes += [('eval_dataset": validation', 'eval_dataset": {"a": validation}')] * by_name
    file = written(tmp_path, *changes)
    printed = train_here(file, *ALONE, "--run-dir", str(tmp_path / "run"))
    assert ("its own log: not" in printed) is (kind == "own methods")
    called = logged(file) if kind == "own methods" else []
    theirs = runpy.run_path(file)
    if called:  # as by another rank 0 of `--elastic`
        theirs["recipe"].on_record(records(tmp_path / "run", "start")[0])
        assert theirs["recipe"].on_record.state.epoch == called[-1][1] == 8
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    trainer = theirs.get("trainer")
    trainer = trainer or transformers.Trainer(theirs["model"], theirs["args"], **theirs["given"])
    trainer.train()
    torch.set_num_threads(threads)
    for ours, its in zip(called, logged(file)[:-1] if called else [], strict=True):
        assert ours[:2] == pytest.approx(its[:2])
        assert ours[2] == pytest.approx({name: its[2][name] for name in ours[2]}, rel=1e-5)
    mine, weights = samestep.load(tmp_path / "run", checkpoint="last"), trainer.model.state_dict()
    torch.testing.assert_close({**mine.state_dict()}, {**weights}, rtol=0, atol=1e-6)
    logs = [one["loss"] for one in trainer.state.log_history if "loss" in one]
    losses = [one["loss"] for one in records(tmp_path / "run", "step")]
    assert len(losses) >= 52
    np.testing.assert_allclose(losses, logs, atol=1e-6)
    steps = {one["step"] for one in trainer.state.log_history if "eval_runtime" in one}
    assert {one["step"] for one in records(tmp_path / "run", "evaluation")} >= steps
    if kind == "dpo":
        return
    last, log = records(tmp_path / "run", "evaluation")[-1], trainer.evaluate()
    of = ("a/", "eval_a_eval_") if by_name else ("", "eval_")
    assert last[f"{of[0]}accuracy"] == pytest.approx(log[f"{of[1]}accuracy"], abs=1e-12)
    assert last["by_place"] == pytest.approx(log["eval_" + "a_" * by_name + "by_place"], abs=1e-12)


@pytest.mark.slow
def test_two_ranks_and_a_resume_take_the_same_steps_by_the_mean_over_all_tokens(tmp_path):
    """Each has another number of tokens; metrics are given all predictions in their order."""
    file = written(tmp_path, ('"cosine"', '"constant_with_warmup"'))  # whatever the number of steps
    fp64 = ("--precision", "fp64", "--device", "cpu")
    one, two = (str(tmp_path / name) for name in ("one", "two"))
    train_here(file, *fp64, "--threads", "1", "--max-steps", "30", "--run-dir", one)
    run("train", file, *fp64, "--max-steps", "17", "--run-dir", two, world_size=2, folder=tmp_path)
    more = ("--resume", "--max-steps", "30")
    run("train", two, *more, world_size=2, folder=tmp_path / "b")
    own, other = (records(folder, "evaluation")[-1] for folder in (one, two))
    for name in ("loss", "accuracy", "by_place"):
        assert own[name] == pytest.approx(other[name], rel=1e-7)  # losses are float32


SCRIPT = """if __name__ == "__main__":
    model.train()
    args.seed = int([*sys.argv, 42][1])
    trainer = Trainer(model, args, **given)
    trainer.train(resume_from_checkpoint=None)
    trainer.save_model()
"""


def test_a_script_that_trains_by_a_trainer_is_its_recipe_without_a_change(tmp_path, refused):
    how = ("--max-steps", "4", *ALONE)
    train_here(written(tmp_path), *how, "--run-dir", str(tmp_path / "recipe"))
    imports = ("import samestep.huggingface\n", "")
    search = "import transformers as hf\nhf.Trainer(hf.AutoModel()).hyperparameter_search()\n"
    search += f"from {'.' * 99} import far\n"  # above all folders
    unused = "from transformers import Trainer\nprint(Trainer)\nself.model.train()\ntrain()\n"
    (tmp_path / "own").mkdir()
    (tmp_path / "own/__init__.py").write_text("from ..star import *")
    for text in (star := f"from transformers import *\n{SCRIPT}", "import own", search, unused):
        (tmp_path / "star.py").write_text(star)
        (tmp_path / "text.py").write_text(text)
        assert bool(trainer_of(tmp_path / "text.py", tmp_path)) is (text != unused)
    search = (OURS, SCRIPT.replace("train(resume_from_checkpoint=None)", "hyperparameter_search()"))
    assert "samestep sweep" in refused("train", written(tmp_path, search, imports), *how)
    script = written(tmp_path, (OURS, SCRIPT), imports)
    Path(script).rename(tmp_path / "parts.py")  # what it needs is in a module beside it
    Path(script).write_text(f"from parts import *  # a recipe by others\n{SCRIPT}")
    printed = train_here(script, *how, "--run-dir", str(tmp_path / "run"))
    assert "brought.py:6: what follows" in printed
    mine, theirs = (last_state(tmp_path / name)["model"] for name in ("run", "recipe"))
    assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
    place = ("--run-dir", str(tmp_path / "told"))
    loop = SCRIPT.replace("    trainer.train", "    while 1: trainer.train")
    Path(script).write_text(f"from parts import *\n{loop}")
    assert "in the loop at brought.py:6: only" in train_here(script, *how, *place, "--", "7")
    train_here(str(tmp_path / "told"), "--resume", "--max-steps", "5")
    assert "seed = 7" in (tmp_path / "told/settings.toml").read_text()
    assert "given 7 and now 8" in refused("train", script, *place, "--resume", "--", "8")
    sweep = ("sweep", script, *how, "--lr", "0.1,0.2", "--run-dir", str(tmp_path / "sweep"), "--")
    assert call(*sweep, "7") == 0
    assert "seed = 7" in (tmp_path / "sweep/lr=0.2/settings.toml").read_text()
    assert "another sweep ('script_args'" in refused(*sweep, "8")
    says = {"train(resume_from_checkpoint=True)": "another output_dir"}
    says |= {"train() if sys.argv[2:] else 0": "-- --do_train", "train": "has no `recipe`"}
    for ending, told in (says | {"train(exit(2))": "no arguments"}).items():
        changed = SCRIPT.replace("train(resume_from_checkpoint=None)", ending)
        file = written(tmp_path, (OURS, changed), imports)
        assert told in refused("train", file, "--run-dir", str(tmp_path / "other"))


OwnSteps = type("OwnSteps", (transformers.Trainer,), {"training_step": print})
OwnEvaluate = type("OwnEvaluate", (transformers.Trainer,), {"evaluate": print})
SAVES = {"on_train_end": lambda own, *known, **given: given["model"].save()}
Saves = type("Saves", (transformers.TrainerCallback,), SAVES)
OwnCallback = type("OwnCallback", (transformers.TrainerCallback,), {"on_substep_end": print})
PaddingFree = type("PaddingFree", (transformers.Trainer,), {"padding_free": True})
WITH_MODEL = {"__init__": lambda own: vars(own).update(net=torch.nn.Linear(1, 1)), "on_log": print}
Held = type("Held", (transformers.TrainerCallback,), WITH_MODEL)


class Stops(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = True


@pytest.mark.parametrize(
    ("arguments", "given", "told"),
    [
        ({"fsdp": True}, {}, "fsdp=True.*--strategy fsdp"),
        ({"optim": "adamw_anyprecision"}, {}, "optim='adamw_any"),
        ({"label_names": []}, {"compute_metrics": print}, "BertFor.*label_names"),
        ({"num_train_epochs": 1.5}, {}, "max_steps"),
        ({}, {"callbacks": [Saves()]}, "Saves.*on_train_end uses 'model'.*samestep.load"),
        ({}, {"callbacks": [OwnCallback()]}, "OwnCallback.*its own on_substep_end"),
        ({}, {"callbacks": [Stops()]}, "Stops.*on_step_end changes the Trainer's control"),
        ({}, {"callbacks": [Held()]}, "Held.*uses self.net, a Linear"),
        ({}, {"test_dataset": {"one": [], "other": []}}, "a dict of 2 data sets"),
        ({}, {"eval_dataset": iter([])}, "is a stream"),
        ({}, {"trainer": PaddingFree}, "padding_free=True.*packing_strategy"),
        ({}, {"trainer": OwnSteps}, "its own training_step.*open_run"),
        ({"eval_strategy": "epoch"}, {"trainer": OwnEvaluate}, "own evaluate.*eval_strategy='no'"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(tmp_path, arguments, given, told):
    from samestep import huggingface

    sizes = dict.fromkeys(("hidden_size", "num_attention_heads", "intermediate_size"), 2)
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**sizes))
    more = {"use_cpu": True, "report_to": "none", **arguments}
    args, rows = transformers.TrainingArguments(str(tmp_path), **more), [{}]
    given = {"model": model, "args": args, "train_dataset": rows, "eval_dataset": rows, **given}
    own = given.pop("trainer", lambda **_: None)(**given)
    with pytest.raises(samestep.UserError, match=told):
        huggingface.from_trainer(own) if own else huggingface.recipe(**given)
