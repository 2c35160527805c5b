"""Handing a job in: one job a run, flags over the shell, nothing of the job that it came from."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.base.errors import UserError
from samestep.cluster.slurm import submission
from samestep.cluster.slurm.options import JobOptions
from samestep.cluster.slurm.queue import ProgramError, find_job, parse_job
from samestep.cluster.slurm.script import array_text
from samestep.cluster.slurm.submission import Workload, find_workload, make_script, submit
from tests.command_line import typed
from tests.slurm.fake_slurm import _DOWN
from tests.slurm.test_script import job
from tests.slurm.test_training_progress import RUNNING


def target(run: Path, *words: str) -> Workload:
    return Workload(name="mine", kind="script", run=run, command=("mine.py", *words))


def hand_in(run: Path, **options) -> int:
    return submit(make_script(target(run), JobOptions(**options), run.parent))[0]


@pytest.mark.parametrize("state", ["PENDING", "RUNNING"])
def test_a_run_whose_job_has_not_ended_is_not_submitted_again(slurm, tmp_path, state):
    run = tmp_path / "run"
    run.mkdir()
    (run / "job.sbatch").write_text("as it was")
    slurm.add(3, run, "COMPLETED")
    slurm.add(5, run, state)
    slurm.add(6, tmp_path / "other")
    slurm.add(7, tmp_path / "ended", "TIMEOUT")
    assert hand_in(tmp_path / "ended") == 77
    (slurm.folder / "calls").unlink()
    with pytest.raises(UserError) as error:
        hand_in(run)
    for name in (f"({state})", "cancel 5", "--after 5:any"):
        assert name in str(error.value)
    assert (run / "job.sbatch").read_text() == "as it was"
    assert not [call for call in slurm.calls if call.startswith("sbatch")]


def test_a_job_that_comes_after_all_unfinished_jobs_of_its_run_is_taken(slurm, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    slurm.add(5, run)
    slurm.add(6, run, "PENDING")
    assert hand_in(run, after=("5:any", "6:notok")) == 77
    (tmp_path / "link").symlink_to(run)
    for path in (run, tmp_path / "link"):
        with pytest.raises(UserError, match="Job 6 "):
            hand_in(path, after=("5",))


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_controller_that_is_away_is_waited_for(slurm, tmp_path, monkeypatch, capsys, comes_back):
    sinfo = slurm.folder / "sinfo"
    answers, waited = sinfo.read_text(), []
    slurm._write("sinfo", _DOWN)

    def sleep(seconds: float) -> None:
        if seconds >= 1:  # subprocess sleeps for milliseconds
            waited.append(seconds)
        if comes_back and sum(waited) >= 20:
            sinfo.write_text(answers)

    monkeypatch.setattr("samestep.cluster.slurm.submission.time.sleep", sleep)
    if comes_back:
        assert hand_in(tmp_path / "run") == 77
    else:
        with pytest.raises(ProgramError):
            hand_in(tmp_path / "run")
    assert sum(waited) == (20 if comes_back else 60)
    assert len(capsys.readouterr().err.splitlines()) == len(waited)


def test_a_job_inherits_what_is_the_users_and_nothing_of_another_job(slurm, tmp_path, monkeypatch):
    names = {
        *("SLURM_MEM_PER_CPU", "SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND", "SLURM_JOB_ID"),
        *("SLURM_PROCID", "SLURMD_NODENAME", "SRUN_DEBUG", "PMI_RANK", "PMIX_RANK", "RANK"),
        *("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
        *("ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
    }
    (tmp_path / "slurm.conf").touch()
    kept = {"SLURM_CONF": f"{tmp_path}/slurm.conf", "SLURM_CLUSTERS": "n"}
    kept |= {"MY_RANK": "1", "WANDB_API_KEY": "k"}
    for name, value in (dict.fromkeys(names, "1") | kept).items():
        monkeypatch.setenv(name, value)
    hand_in(tmp_path / "run")
    assert not names & slurm.shell.keys()
    assert kept.items() <= slurm.shell.items()


def test_what_the_script_asks_for_wins_over_the_variables_of_sbatch(slurm, tmp_path, monkeypatch):
    kept = {"SBATCH_PARTITION": "debug", "SBATCH_ACCOUNT": "physics", "SBATCH_TIMELIMIT": "5"}
    for name, value in (kept | {"SBATCH_ARRAY_INX": "1-2", "SBATCH_WAIT": "1"}).items():
        monkeypatch.setenv(name, value)
    run = tmp_path / "run"
    slurm.add(4, tmp_path / "other")
    hand_in(run, time="10", mem="1G", after=("4",), sbatch=("-C a100", '--mcs-label="a b"'))
    call = next(call for call in slurm.calls if call.startswith("sbatch "))
    script = (run / "job.sbatch").read_text()
    for flag in ("--time=10", "--mem=1G", "--job-name=mine", "--open-mode=append", "--requeue"):
        assert f" {flag} " in call
        assert f"#SBATCH {flag}\n" in script
    assert call.endswith(
        f" --dependency=afterok:4 --kill-on-invalid-dep=yes --requeue -C a100 "
        f"--mcs-label=a b {run}/job.sbatch"
    )
    assert {k: v for k, v in slurm.shell.items() if k.startswith("SBATCH_")} == kept


def test_sizes_are_judged_by_the_partition_of_the_shell(slurm, tmp_path, monkeypatch):
    (slurm.folder / "partitions").write_text("a|1|4|infinite|(null)\nb|9|4|infinite|(null)\n")
    hand_in(tmp_path / "one", nodes="2")
    monkeypatch.setenv("SBATCH_PARTITION", "a")
    with pytest.raises(UserError, match="--nodes 2: partition a "):
        hand_in(tmp_path / "two", nodes="2")
    hand_in(tmp_path / "three", nodes="2", partition="b")
    hand_in(tmp_path / "four", nodes="2", sbatch=("-p b",))


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (("--api-key", "hunter2"), "--api-key"),
        (("--wandb.api_key=hunter2",), "--wandb.api_key"),
        (("--x", "1", "--auth", "hunter2"), "--auth"),
    ],
)
def test_a_secret_is_refused_and_what_sounds_like_one_taken(tmp_path, words, flag):
    with pytest.raises(UserError, match=flag) as error:
        make_script(target(tmp_path, *words), JobOptions(), tmp_path)
    assert "hunter2" not in str(error.value)
    words = ("--max-tokens", "512", "--num-key-value-heads=8", "--use-auth-token", "True")
    words += ("--token", "--verbose", "--tokenizer", "gpt2", "--keyboard=us", "--auth")
    make_script(target(tmp_path, *words), JobOptions(), tmp_path)


@pytest.mark.parametrize("limit", ["", "%9"])
@pytest.mark.parametrize(
    ("text", "tasks"), [("0-3", [0, 1, 2, 3]), ("1-9:4", [1, 5, 9]), ("7,0-1,3", [7, 0, 1, 3])]
)
def test_tasks_are_read_as_sbatch_reads_them(text, tasks, limit):
    assert submission.read_array(text + limit) == (tasks, 9 if limit else None)


@pytest.mark.parametrize(
    "text",
    [
        "",
        *["a", "3-1", "0,5-1", "1,1", "1,", "1%0", "1%", "-1", "1-5:0", "0-2%x", "0-9999999"],
        "0-1" + 30 * "0",
    ],
)
def test_what_is_no_list_of_tasks_is_refused(text):
    with pytest.raises(UserError):
        submission.read_array(text)


@given(st.sampled_from(['/home/it\'s me/a "sweep" of 5%', "/runs/s"]), st.sampled_from([None, 2]))
def test_each_task_runs_its_own_job_script_and_has_its_log_beside_it(folder, at_once):
    jobs = {task: job(JobOptions(time="30"), run=f"{folder}/{task}") for task in (3, 7)}
    text = array_text(jobs, Path(folder), at_once)
    array = "#SBATCH --array=3,7" + (f"%{at_once}" if at_once else "")
    assert array in text.replace('"', "")
    assert "#SBATCH --time=30\n" in text
    assert "/.array/%a/slurm-%j.out" in text
    last = text.splitlines()[-1].removeprefix("exec ")
    said = typed("bash", "-c", f"printf '%s\n' {last}", SLURM_ARRAY_TASK_ID="7")
    assert said.stdout.splitlines() == ["bash", f"{folder}/.array/7/job.sbatch"]


def test_a_task_of_an_array_is_known_by_its_array_and_by_its_run(tmp_path):
    run, link = tmp_path / "lr=1", tmp_path / ".array" / "3"
    run.mkdir()
    link.parent.mkdir()
    link.symlink_to(run)
    line = RUNNING.replace("JobId=19 ", "JobId=19 ArrayJobId=12 ArrayTaskId=3 ")
    line = line.replace("samestep:/home/ada/it's here/runs/b", f"samestep:{link.parent}/%a")
    found = parse_job(line.replace("slurm-19.out", "%a/slurm-%j-of-%A.out"))
    assert (found.job, found.target, found.run) == (19, "12_3", run)
    assert found.log == Path("/home/ada/it's here/runs/b/3/slurm-19-of-12.out")


def test_a_whole_array_is_no_job_and_one_that_slurm_refuses_leaves_nothing(slurm, tmp_path):
    task = RUNNING.replace("JobId=19 ", "JobId=19 ArrayJobId=12 ArrayTaskId=3 ")
    rest = task.replace("ArrayTaskId=3 ", "ArrayTaskId=4-9%2 ")
    for told in (f"{task}\n{task}\n", f"{rest}\n"):
        (slurm.folder / "job-12").write_text(told)
        with pytest.raises(UserError, match="12_0"):
            find_job(12)
    (slurm.folder / "job-12_3").write_text(f"{task}\n")
    assert find_job("12_3").target == "12_3"
    (slurm.folder / "sbatch").write_text("#!/bin/sh\necho 'Invalid job array' >&2\nexit 1\n")
    folder = tmp_path / "runs" / "sweep"
    jobs = {task: job(JobOptions(), run=str(folder / str(task))) for task in (3, 7)}
    with pytest.raises(UserError, match="Invalid job array"):
        submission.submit_array(jobs, folder, None)
    assert not folder.exists()


RECIPES = ["mnist", "spiral"]
RECIPE = "from samestep import Recipe\n\nrecipe = Recipe()\n"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def find(text: str, *arguments: str, as_recipe: bool = False) -> Workload:
    return find_workload(text, list(arguments), RECIPES, as_recipe=as_recipe)


def test_a_recipes_name_becomes_a_training_and_a_run_goes_on_in_place(here):
    found = find("spiral", "--epochs", "5")
    assert (found.name, found.kind) == ("spiral", "recipe")
    assert found.run.parent == here / "runs"
    assert found.run.name.startswith("spiral-")
    words = ("-m", "samestep", "train", "spiral", "--epochs", "5", "--run-dir", str(found.run))
    assert found.command == (*words, "--resume")
    (here / "spiral").mkdir()  # a run directory of this name does not win
    (here / "spiral" / "settings.toml").touch()
    found = find("spiral")
    assert (found.run.parent, found.command[3]) == (here / "runs", "spiral")
    run = here / "runs" / "one"
    run.mkdir(parents=True)
    (run / "settings.toml").touch()
    found = find("runs/one", "--epochs", "9")
    assert (found.name, found.kind, found.run) == ("one", "recipe", run)
    assert find("runs/one", "--epochs", "9", "--resume").command == found.command
    rest = ("--epochs", "9", "--resume", "--recipe-of-run")  # its file may be edited by then
    assert found.command == ("-m", "samestep", "train", str(run), *rest)


def test_a_script_with_a_trainer_runs_as_it_is_or_is_trained_as_a_recipe(here):
    Path("mine.py").write_text("from transformers import Trainer\nTrainer().train()\n")
    assert find("mine.py", "--rows", "3").kind == "script"
    found = find("mine.py", "--epochs", "5", "--", "--rows", "3", as_recipe=True)
    trained = ("train", str(here / "mine.py"), "--epochs", "5", "--run-dir", str(found.run))
    assert found.command[2:] == (*trained, "--resume", "--recipe-of-run", "--", "--rows", "3")
    with pytest.raises(UserError, match="spiral does not"):
        find("spiral", as_recipe=True)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (RECIPE, "recipe"),
        (RECIPE.replace("recipe =", "recipe: Recipe ="), "recipe"),
        (RECIPE + "raise SystemExit('it ran')\n", "recipe"),
        ("import samesteps\nrecipe = 1\n", "script"),
        ("import samestep\ndef f():\n    recipe = 1\n", "script"),
    ],
)
def test_a_file_that_assigns_recipe_is_trained_and_any_other_run(here, text, kind):
    Path("mine.py").write_text(text)
    words = () if kind == "recipe" else ("--nproc", "2", "--run-dir", "x", "--resume")
    found = find("mine.py", *words)
    assert (found.name, found.kind) == ("mine", kind)
    if kind == "recipe":
        assert found.command[:4] == ("-m", "samestep", "train", str(here / "mine.py"))
    else:
        assert found.command == (str(here / "mine.py"), *words)


@pytest.mark.parametrize(
    "words", [("--run-dir", "mine"), ("--run-dir=mine",), ("--run_dir", "mine")]
)
def test_a_run_directory_among_the_arguments_is_the_jobs(here, words):
    found = find("spiral", *words, "--epochs", "2")
    assert found.run == here / "mine"
    assert found.command[4:] == ("--epochs", "2", "--run-dir", str(here / "mine"), "--resume")


@pytest.mark.parametrize("words", [("--run-dir",), ("--run-dir=",), ("--run-dir", "")])
def test_a_run_directory_that_is_left_out_is_asked_for(words):
    with pytest.raises(UserError, match="--run-dir"):
        find("spiral", *words)


def test_what_cannot_begin_or_is_not_there_says_so(here):
    (here / "my run").mkdir()
    with pytest.raises(UserError, match=r"my run has no settings\.toml.*continue\.$"):
        find("my run")
    (here / "my run" / "job.sbatch").touch()
    with pytest.raises(UserError, match=r"settings\.toml.* sbatch 'my run/job.sbatch'"):
        find("my run")
    for words in (("--nproc", "2"), ("--nproc=2",)):
        with pytest.raises(UserError, match="--ntasks-per-node"):
            find("spiral", *words)
    with pytest.raises(UserError, match=r"nowhere\.py.*mnist, spiral"):
        find("nowhere.py")


@pytest.mark.parametrize(
    ("name", "first"),
    [("job.sh", ""), ("job.sbatch", ""), ("job", "#!/bin/bash -l\n"), ("j.py", "#!/bin/env sh\n")],
)
def test_a_shell_script_is_told_from_python_with_what_to_do_instead(name, first):
    Path(name).write_text(f"{first}srun python train.py\n")
    with pytest.raises(UserError, match=f"{name} is a shell script.* sbatch {name}"):
        find(name)
    Path("mine.py").write_text("#!/usr/bin/env python3\nprint(1)\n")
    assert find("mine.py").kind == "script"


@pytest.mark.parametrize(
    ("content", "place"),
    [(b"\ndef :\n", r"mine\.py:2 "), (b"x = '\xff'\n", r"mine\.py "), (b"x\0", r"mine\.py ")],
)
def test_a_file_that_is_no_python_is_refused_with_its_line(content, place):
    Path("mine.py").write_bytes(content)
    with pytest.raises(UserError, match=place):
        find("mine.py")
