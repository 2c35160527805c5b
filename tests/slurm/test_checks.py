"""What is refused, and what is advised, before a job is handed in."""

from pathlib import Path

import pytest

from samestep.base.errors import UserError
from samestep.base.settings import Settings
from samestep.cluster.slurm import checks
from samestep.cluster.slurm.options import JobOptions
from samestep.cluster.slurm.submission import Workload, make_script


@pytest.fixture
def venv(tmp_path) -> Path:
    folder = tmp_path / "venv" / "bin"
    folder.mkdir(parents=True)
    (folder / "activate").touch()
    (folder / "python").write_text("#!/bin/sh\necho torch\n")
    (folder / "python").chmod(0o755)
    return folder.parent


def test_an_environment_without_torch_is_refused_unless_of_other_machines(venv):
    options = JobOptions(venv=str(venv), time="60")
    with pytest.raises(UserError, match=r"--venv .* torch "):
        checks.check_place(options, "recipe")
    checks.check_place(options, "script")
    [told] = checks.advice(options, "script", {})
    assert "torch" in told
    (venv / "bin" / "python").write_text("#!/bin/sh\n")
    checks.check_place(options, "recipe")
    assert checks.advice(options, "script", {}) == []
    (venv / "bin" / "python").write_text("no program")
    checks.check_place(JobOptions(venv=str(venv)), "recipe")
    (venv / "bin" / "activate").unlink()
    with pytest.raises(UserError, match="bin/activate"):
        checks.check_place(JobOptions(venv=str(venv)), "recipe")


def test_a_job_to_wait_for_must_be_known_to_slurm(slurm, tmp_path):
    slurm.add(7, tmp_path)
    checks.check_after(JobOptions(after=("7", "7_2:notok")))
    with pytest.raises(UserError, match="--after 999999:any"):
        checks.check_after(JobOptions(after=("7", "999999:any")))


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({"time": "60"}, []),
        ({}, ["--time"]),
        ({"sbatch": ("-t 60",)}, []),
        ({"time": "60", "gpus_per_node": 8}, ["--cpus-per-task", "--mem"]),
        ({"time": "60", "gpus_per_node": 8, "sbatch": ("--exclusive",)}, ["--mem"]),
        ({"time": "60", "gpus_per_node": 8, "sbatch": ("--cpus-per-gpu=8", "--mem=9G")}, []),
        ({"time": "60", "interface": "eth0,ib7"}, ["ib7"]),
    ],
)
def test_what_a_job_may_lack_is_told_with_the_flag_that_gives_it(tmp_path, options, flags):
    (tmp_path / "eth0").mkdir()
    told = checks.advice(JobOptions(**options), "recipe", {}, interfaces=tmp_path)
    assert len(told) == len(flags)
    assert all(flag in text for flag, text in zip(flags, told, strict=True))
    assert checks.advice(JobOptions(), "recipe", {"SBATCH_TIMELIMIT": "60"}) == [], (
        "the shell's counts"
    )


ELASTIC = JobOptions(nodes="1-4", ntasks_per_node=2)


@pytest.mark.parametrize("more", [{}, {"accumulate": 2}])
def test_a_range_of_nodes_is_refused_where_they_would_decide_on_the_global_batch(more):
    sizes = {"batch_size_per_rank": 32} | more
    with pytest.raises(UserError, match=r"--nodes 1-4: .*--batch-size N .*--virtual-ranks 8 "):
        checks.check_ranks(ELASTIC, Settings(**sizes))
    checks.check_ranks(JobOptions(nodes="4", ntasks_per_node=2), Settings(**sizes))
    for same in ({"batch_size": 32}, {"virtual_ranks": 8}, {"virtual_ranks": 9}):
        checks.check_ranks(ELASTIC, Settings(**same))


def mounts(folder: Path, command: tuple[str, ...], **options) -> tuple[str, ...]:
    run = folder / "elsewhere" / "run"
    workload = Workload(name="mine", kind="recipe", run=run, command=command)
    return make_script(workload, JobOptions(**options), folder / "here").mounts


def test_a_container_shows_the_folders_of_command_run_and_data(tmp_path):
    for name in ("here/below", "data", "code"):
        (tmp_path / name).mkdir(parents=True)
    image = tmp_path / "i.sif"
    image.touch()
    recipe = str(tmp_path / "code" / "mine.py")
    words = ("-m", "samestep", "train", recipe, "--data-dir", str(tmp_path / "data"))
    expected = tuple(str(tmp_path / name) for name in ("code", "data", "elsewhere/run", "here"))
    assert mounts(tmp_path, words, container=str(image)) == expected
    assert mounts(tmp_path, words, container_image="pytorch") == expected
    assert mounts(tmp_path, words) == ()
    below = ("-m", "samestep", "train", "spiral", "--data_dir=below")
    expected = tuple(str(tmp_path / name) for name in ("elsewhere/run", "here"))
    assert mounts(tmp_path, below, container=str(image)) == expected


# A default of two small nodes; a larger one, of two kinds of nodes; one that is hidden.
PARTITIONS = (
    "debug|2|4|1:00:00|(null)\n"
    "gpu|8|32|2-00:00:00|gpu:a100:4(S:0-1)\n"
    "gpu|1|64|2-00:00:00|gpu:h100:8,gpu:a100:1\n"
    "hidden|1|128|infinite|(null)\n"
)


@pytest.fixture
def partitions(slurm):
    (slurm.folder / "partitions").write_text(PARTITIONS)
    return slurm


@pytest.mark.parametrize(
    ("partition", "options"),
    [
        ("debug,gpu", {"nodes": "9"}),
        ("debug,gpu", {"gpus_per_node": 9, "ntasks_per_node": 1}),
        ("hidden", {"ntasks_per_node": 128, "time": "100-00:00:00"}),
        # A site may route jobs by their size: the default partition does not decide.
        (None, {"nodes": "9"}),
        (None, {"time": "1-00:00:00"}),
    ],
)
def test_a_job_that_one_of_its_partitions_may_run_is_let_through(partitions, partition, options):
    checks.check_partitions(JobOptions(**options), partition)


@pytest.mark.parametrize(
    ("partition", "options", "says"),
    [
        ("debug", {"nodes": "3-9"}, "--nodes 3-9: partition debug has only 2"),
        (None, {"gpus_per_node": 10}, "--gpus-per-node 10.* gpu .* 9 GPUs"),
        ("debug", {"gpus_per_node": 1}, "--gpus-per-node 1:.* debug "),
        (None, {"ntasks_per_node": 129}, "= 129, .* 64"),
        ("debug,gpu", {"time": "3-00:00:00"}, "--time 3-00:00:00: .* gpu .* 2-00:00:00"),
        ("debug,gup", {}, "'gup'.*'gpu'"),
    ],
)
def test_a_job_that_none_can_run_is_refused_with_the_largest(partitions, partition, options, says):
    with pytest.raises(UserError, match=says):
        checks.check_partitions(JobOptions(**options), partition)


def test_hidden_partitions_are_asked_for_and_images_and_ranks_checked(partitions):
    checks.check_partitions(JobOptions(), None)
    assert "--all --exact" in partitions.calls[0]
    found = checks.parse_partitions("CLUSTER: north\n" + PARTITIONS)
    assert list(found) == ["debug", "gpu", "hidden"]
    for image, says in {
        "docker://torch:2.5": "apptainer build torch.sif docker://torch:2.5",
        "library://a/b": "b.sif",
        "/nowhere/torch.sif": "/nowhere/torch.sif: there is no such file",
    }.items():
        with pytest.raises(UserError, match=says):
            checks.check_place(JobOptions(container=image), "recipe")
    for options in (ELASTIC, JobOptions(nodes="4", ntasks_per_node=2)):
        with pytest.raises(UserError, match=r"--virtual-ranks 7: .*8 ranks.*--virtual-ranks 8"):
            checks.check_ranks(options, Settings(virtual_ranks=7, batch_size=32))
