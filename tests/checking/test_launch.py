"""How scripts are started: with CUDA that is not there, with ranks of their own, with errors."""

import json
import tempfile

import pytest

from samestep.base.errors import UserError
from samestep.scripts.checking import check_script, ranks_of_script
from tests.checking.planted import check, codes, forked, found_in, line_of, planted
from tests.command_line import start
from tests.processes import free_port

NN, ZERO = "from torch import nn\n", "            optimizer.zero_grad()\n"
MULTIPROCESSING = f"from torch import multiprocessing as mp\n{NN}"
MOVED = "inputs, labels = inputs.cuda(non_blocking=True), labels.to(local_rank)"
ON_CUDA = planted(
    ('dist.init_process_group("gloo")', 'dist.init_process_group("nccl")'),
    (
        "    torch.manual_seed(0)\n",
        """\
    torch.manual_seed(0)
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
""",
    ),
    ("model = DDP(nn.Sequential", "model = nn.Sequential"),
    (
        "nn.Linear(16, 2)))\n",
        "nn.Linear(16, 2)).cuda()\n    model = DDP(model.to(device), device_ids=[local_rank])\n",
    ),
    (ZERO, f"            {MOVED}\n{ZERO}"),
    ("counts = torch.zeros(2)", "counts = torch.zeros(2, device='cuda')"),
    ("sampler=val_sampler)", "sampler=val_sampler, pin_memory=True)"),
    ("        dist.barrier()\n", "        torch.cuda.synchronize()\n        dist.barrier()\n"),
)


ON_DEVICES = """\
import os
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2)).cuda()
{}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    model(torch.ones(4, 8, device="cuda") * step).square().sum().backward()
    optimizer.step()
"""
TENSOR_PARALLEL = """\
mesh = init_device_mesh("cuda", (int(os.environ["WORLD_SIZE"]),))
parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
"""


@pytest.mark.parametrize("split", ["model = nn.DataParallel(model)", TENSOR_PARALLEL])
def test_a_model_may_be_split_over_devices_that_are_not_there(split, tmp_path):
    report = check(tmp_path, ON_DEVICES.format(split), asked=False)
    assert (report.findings, report.steps) == ([], 3)


SYNCHRONISED = """\
    torch.cuda.manual_seed(0)
    torch.cuda.manual_seed_all(0)
    norm, part = nn.SyncBatchNorm(8), torch.randn(4, 8) + rank
    both = [torch.zeros(4, 8) for _ in range(2)]
    dist.all_gather(both, part)
    if hasattr(dist, "gather_single"):  # PyTorch 2.14
        dist.gather_single(part, whole := torch.zeros(2, 4, 8), dst=1)
        assert torch.equal(whole, rank * torch.stack(both))
    __import__("warnings").simplefilter("error", FutureWarning)
    joined, seen = torch.cat(both), nn.BatchNorm1d(8)
    assert torch.allclose(norm(part), seen(joined)[4 * rank :][:4], atol=1e-5)
    assert torch.allclose(norm.running_var, seen.running_var, atol=1e-5)
    device = (p := __import__("pickle")).loads(p.dumps(torch.device("cuda", local_rank)))
"""
HOOKS = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
HALVES = f"model.register_comm_hook(None, __import__('{HOOKS}', fromlist='a').bf16_compress_hook)"


def test_batch_normalisation_over_all_ranks_and_halved_gradients_need_no_gpu(tmp_path):
    text = ON_CUDA.replace('    device = torch.device("cuda", local_rank)\n', SYNCHRONISED)
    text = text.replace("nn.ReLU(), ", "nn.SyncBatchNorm(16), nn.ReLU(), ").replace('"nccl"', "")
    text = text.replace("    optimizer =", f"    {HALVES}\n    optimizer =", 1)
    report = check(tmp_path, text)
    assert (codes(report), report.steps, len(report.notes)) == (set(), 9, 1)


def test_a_gpu_that_is_chosen_by_the_global_rank_is_found(tmp_path):
    text = ON_CUDA.replace('int(os.environ["LOCAL_RANK"])', "rank")
    found_in(tmp_path, text, "SS209", "set_device", "cuda:1")


def test_a_gpu_that_is_asked_for_only_where_there_is_one_is_found_too(tmp_path):
    change = ("nn.Linear(16, 2)))\n", "nn.Linear(16, 2)).to(device))\n")
    device = 'torch.device(f"cuda:{rank}" if torch.cuda.is_available() else "cpu")'
    text = planted(("    torch.manual_seed(0)\n", f"    device = {device}\n"), change)
    text = text.replace("model(inputs)", "model(inputs.to(device))")
    found_in(tmp_path, text, "SS209", "cuda:{rank}")


def test_an_error_of_the_script_is_shown_without_our_frames(tmp_path):
    text = planted(("        scheduler.step()\n", "        loss_of(1)\n"))
    with pytest.raises(UserError) as told:
        check(tmp_path, text)
    assert f'project/train.py", line {line_of(text, "loss_of(1)")}' in str(told.value)
    assert "samestep/" not in str(told.value)
    assert "samestep-check-" not in str(told.value)


def test_what_does_not_train_or_is_not_there_cannot_be_checked(tmp_path):
    for text in ("import sys; sys.exit(3)", "print('no training')", "1 +"):
        with pytest.raises(UserError):
            check(tmp_path, text)
    with pytest.raises(UserError):
        check_script.job_of(tmp_path / "missing.py", [], nproc=2)


OWN_RANKS = planted(
    ("def main():\n", "def main(rank, world_size):\n"),
    (
        '    dist.init_process_group("gloo")\n    rank = dist.get_rank()\n',
        """\
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = sys.argv[1]
    init_process_group("gloo", rank=rank, world_size=world_size)
""",
    ),
    ("import os\n", "import os\nimport sys\n"),
    (NN, f"{MULTIPROCESSING}from torch.distributed import init_process_group\n"),
    ("        sampler.set_epoch(epoch)\n", ""),
)
FORKED = (
    "    main()\n",
    """\
    # RANK is not read here, which the text of the script seems to say.
    ranks = [mp.get_context("fork").Process(target=main, args=(r, 2)) for r in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
""",
)
SPAWNED = (
    "    main()\n",
    """\
    world_size = torch.cuda.device_count()
    mp.spawn(main, args=(world_size,), nprocs=world_size)
""",
)


@pytest.mark.parametrize("how", [FORKED, pytest.param(SPAWNED, marks=pytest.mark.slow)])
def test_ranks_that_a_script_starts_itself_are_watched(how, tmp_path):
    report = check(tmp_path, planted(how, base=OWN_RANKS), str(free_port()))
    assert codes(report) == {"SS103"}
    assert report.ranks == 2
    assert report.steps > 0


def test_ranks_of_its_own_may_ask_for_nccl_and_may_fail_before_they_join_a_group(
    tmp_path, monkeypatch
):
    text = planted(FORKED, base=OWN_RANKS).replace("# RANK is not read here,", "#")
    starts, prepare = [], check_script.prepare
    monkeypatch.setattr(check_script, "prepare", lambda *job: starts.append(job) or prepare(*job))
    report = check(tmp_path, text.replace('"gloo"', '"nccl"'), str(free_port()))
    assert (codes(report), report.ranks, len(starts)) == ({"SS103"}, 2, 2)
    with pytest.raises(UserError, match="IndexError"):
        check(tmp_path, text)  # without a port, before a rank has joined


def test_a_script_that_starts_other_processes_than_ranks_runs_on_those_of_check(tmp_path):
    main, other = "def main():\n", "    mp.get_context('fork').Process(target=print).start()\n"
    report = check(tmp_path, planted((main, f"{main}{other}"), (NN, MULTIPROCESSING)))
    assert (codes(report), report.ranks) == (set(), 2)


@pytest.mark.slow
def test_inside_a_job_each_rank_runs_its_own_and_rank_zero_tells(tmp_path):
    (tmp_path / "train.py").write_text(planted(("        sampler.set_epoch(epoch)\n", "")))
    arguments = ("check", str(tmp_path / "train.py"), "--here", "--json")
    ranks = start(*arguments, world_size=2, folder=tmp_path / "ranks")
    assert ranks.wait() == [1, 0]
    said = json.loads(ranks.printed(0))
    assert [finding["code"] for finding in said["findings"]] == ["SS103"]
    assert said["steps"] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ranks", "train.py"]


def test_an_interrupt_ends_the_ranks_and_removes_the_scratch_copy(tmp_path, monkeypatch):
    started = []

    def start(*arguments):
        started.extend(forked(*arguments))
        return started

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    (tmp_path / "place").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "place"))
    monkeypatch.setattr(ranks_of_script, "wait", interrupted)
    (tmp_path / "train.py").write_text("import time; time.sleep(600)")
    job = check_script.job_of(tmp_path / "train.py", [], nproc=2)
    with pytest.raises(KeyboardInterrupt):
        check_script.check_script(job, start=start)
    assert [process.poll() is None for process in started] == [False, False]
    assert list((tmp_path / "place").iterdir()) == []
