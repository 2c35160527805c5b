"""Handing a job in: one job a run, flags over the shell, nothing of the job that it came from."""

from pathlib import Path

import pytest

from samestep.errors import UserError
from samestep.slurm.options import JobOptions
from samestep.slurm.queue import ProgramError
from samestep.slurm.submission import Workload, make_script, submit
from tests.slurm.fake_slurm import _DOWN


def target(run: Path, *words: str) -> Workload:
    return Workload(name="mine", kind="script", run=run, command=("mine.py", *words))


def hand_in(run: Path, **options) -> int:
    return submit(make_script(target(run), JobOptions(**options), run.parent))[0]


# --- one job a run


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
def test_a_controller_that_is_away_is_waited_for_a_minute(
    slurm, tmp_path, monkeypatch, capsys, comes_back
):
    sinfo = slurm.folder / "sinfo"
    answers, waited = sinfo.read_text(), []
    slurm._write("sinfo", _DOWN)

    def sleep(seconds: float) -> None:
        if seconds >= 1:  # subprocess sleeps for milliseconds
            waited.append(seconds)
        if comes_back and sum(waited) >= 20:
            sinfo.write_text(answers)

    monkeypatch.setattr("samestep.slurm.submission.time.sleep", sleep)
    if comes_back:
        assert hand_in(tmp_path / "run") == 77
    else:
        with pytest.raises(ProgramError):
            hand_in(tmp_path / "run")
    assert sum(waited) == (20 if comes_back else 60)
    assert len(capsys.readouterr().err.splitlines()) == len(waited)


# --- the shell that submits


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


def test_what_the_script_asks_for_is_typed_too_and_so_wins_over_the_variables_of_sbatch(
    slurm, tmp_path, monkeypatch
):
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


def test_the_partition_of_the_shell_is_the_one_that_sizes_are_judged_by(
    slurm, tmp_path, monkeypatch
):
    (slurm.folder / "partitions").write_text("a|1|4|infinite|(null)\nb|9|4|infinite|(null)\n")
    hand_in(tmp_path / "one", nodes="2")
    monkeypatch.setenv("SBATCH_PARTITION", "a")
    with pytest.raises(UserError, match="--nodes 2: partition a "):
        hand_in(tmp_path / "two", nodes="2")
    hand_in(tmp_path / "three", nodes="2", partition="b")
    hand_in(tmp_path / "four", nodes="2", sbatch=("-p b",))


# --- secrets


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (("--api-key", "hunter2"), "--api-key"),
        (("--wandb.api_key=hunter2",), "--wandb.api_key"),
        (("--x", "1", "--auth", "hunter2"), "--auth"),
    ],
)
def test_a_secret_among_the_arguments_is_refused_and_not_repeated(tmp_path, words, flag):
    with pytest.raises(UserError, match=flag) as error:
        make_script(target(tmp_path, *words), JobOptions(), tmp_path)
    assert "hunter2" not in str(error.value)


def test_an_argument_that_only_sounds_like_a_secret_is_taken(tmp_path):
    words = ("--max-tokens", "512", "--num-key-value-heads=8", "--use-auth-token", "True")
    words += ("--token", "--verbose", "--tokenizer", "gpt2", "--keyboard=us", "--auth")
    make_script(target(tmp_path, *words), JobOptions(), tmp_path)
