"""The command line of `samestep slurm` where there is no Slurm: refusals, files, flags, help."""

import json
import re
import shutil
from pathlib import Path

import pytest

from samestep.cluster.slurm.options import JobOptions, keep_options, kept_options
from tests.command_line import RECIPE, call


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    """Be in a folder with a recipe and a script, without programs and without settings."""
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.py").write_text(RECIPE)
    (tmp_path / "mine.py").write_text("print(1)\n")
    return tmp_path


@pytest.fixture
def slurm(capfd):
    def run(*words: str) -> tuple[int, str, str]:
        code = call("slurm", *words)
        return code, *capfd.readouterr()

    return run


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("submit", "tiny.py"), "sinfo.*slurm-wlm munge.*--dry-run"),
        (("status", "12"), "scontrol.*PATH"),
        (("nothing",), "'nothing'.*submit, status, logs, cancel, sandbox"),
        (("submit", "nowhere.py"), r"nowhere\.py"),
        (("submit", "tiny.py", "--time", "2h"), "--time 2h"),
        (("submit", "tiny.py", "--dry-run", "--", "--nproc", "2"), "--nproc.*--ntasks-per-node"),
        (("submit", "tiny.py", "--dry-run", "--", "--epoch", "5"), "--epochs"),
        (("submit", "tiny.py", "--run-dir", "x"), "--run-dir .* tiny.py … -- --run-dir"),
        (("submit", "tiny.py", "--epochs=3", "--", "--lr", "1"), "-- --epochs"),
        (("submit", "tiny.py", "--node", "2"), "'nodes'"),
        (("submit", "mine.py", "--dry-run", "--env", "API_KEY=hunter2"), "--env API_KEY"),
        (("submit", "mine.py", "--dry-run", "--env", "MY-TOKEN=hunter2"), "--env 'MY-TOKEN'"),
    ],
)
def test_a_mistake_gets_one_message_and_exit_code_2(here, refused, words, names):
    message = refused("slurm", *words)
    assert re.search(names, message), message
    assert "hunter2" not in message
    assert not (here / "runs").exists()


def test_a_dry_run_needs_no_slurm_and_runs_no_code_of_a_strangers_run(here, slurm, capfd):
    flags = ("--track", "wandb", "--track-offline", "--track-project", "two words")
    code, text, _ = slurm("submit", "tiny.py", "--nodes", "2", "--dry-run", "--", *flags)
    assert code == 0
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "#SBATCH --nodes=2\n" in text
    words = " ".join(text.replace("\\\n", " ").split())
    assert "--track wandb --track-offline --track-project 'two words' --run-dir" in words
    assert not (here / "runs").exists()
    (here / "run").mkdir()
    (here / "run" / "recipe.py").write_text("open('harm', 'w')\n")
    known = 'recipe = "/gone/recipe.py"\nbatch_size = 8\n[options]\nmine = 2\n'
    (here / "run" / "settings.toml").write_text(known)
    assert slurm("submit", "run", "--dry-run")[0] == 0
    assert call("train", "run", "--help") == 0
    text = capfd.readouterr().out
    assert "--mine" in text
    assert re.search(r"--batch-size INT .*\n?.*default: 8", text)
    assert not (here / "harm").exists()


def test_no_verb_a_range_without_a_batch_and_an_equal_array_are_mistakes(here, slurm, refused):
    elastic = ("--nodes", "1-4", "--ntasks-per-node", "2", "--dry-run")
    words = ("submit", "tiny.py", *elastic, "--", "--batch-size-per-rank", "4")
    assert "--virtual-ranks 8 " in refused("slurm", *words)
    (here / "how.toml").write_text("global_batch_size = 10\n")
    assert slurm("submit", "tiny.py", *elastic, "--", "--config", "how.toml")[0] == 0
    assert slurm("submit", "mine.py", *elastic)[0] == 0  # a script of the user's
    code, text, _ = slurm()
    assert (code, "verbs:" in text) == (2, True)
    code, _, said = slurm("submit", "--array", "0-3", "--dry-run", "spiral", "--", "--seed", "1")
    assert code == 2
    assert "--seed %a" in said


def directives(text: str) -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", text, re.MULTILINE))


def test_flags_win_over_the_projects_file_and_that_over_the_users(here, slurm, monkeypatch):
    user = here / "config" / "samestep"
    user.mkdir(parents=True)
    (user / "samestep.toml").write_text('[slurm]\naccount = "u"\nqos = "u"\npartition = "u"\n')
    (here / "samestep.toml").write_text(
        '[slurm]\nqos = "p"\npartition = "p"\nmodule = ["a"]\ngpus-per-node = 4\n'
    )
    (here / "below").mkdir()
    monkeypatch.chdir(here / "below")
    flags = ("--partition", "f", "--module", "b", "--no-requeue")
    code, text, _ = slurm("submit", "../mine.py", "--dry-run", *flags)
    assert code == 0
    found = directives(text)
    assert (found["account"], found["qos"], found["partition"]) == ("u", "p", "f")
    assert found["gpus-per-node"] == "4"
    loaded = re.findall(r"^module load (\S+)", text, re.MULTILINE)
    assert loaded == ["a", "b"]  # repeatable flags add to those of the file
    assert "#SBATCH --no-requeue" in text


def test_a_script_that_is_kept_can_be_handed_in_and_leaves_what_was_asked_for_beside_the_log(slurm):
    flags = ("--nodes", "2", "--ntasks-per-node", "3", "--time", "30", "--after", "7")
    code, _, said = slurm("submit", "mine.py", *flags, "-o", "job.sbatch")
    assert code == 0
    assert "sbatch job.sbatch" in said
    assert slurm("submit", "mine.py", *flags, "-o", "job.sbatch")[0] == 0, "it is its own"
    before = Path("mine.py").read_text()
    code, _, said = slurm("submit", "mine.py", *flags, "-o", "mine.py")
    assert (code, Path("mine.py").read_text()) == (2, before)
    assert "mine.py exists" in said
    run = Path(directives(Path("job.sbatch").read_text())["output"]).parent
    assert run.is_dir(), "Slurm opens the log in it"
    kept = kept_options(run)
    assert (kept.nodes, kept.ntasks_per_node, kept.time, kept.after) == ("2", 3, "30", ())
    assert kept.job_name == "mine", "as the run's next job is called"
    (run / "job.json").write_text('{"nodes": 2}')  # as earlier versions wrote it
    assert kept_options(run).nodes == "2"
    (run / "job.json").write_text('{"restarts": "two"}')
    assert kept_options(run) is None


def test_a_run_goes_on_with_what_its_job_asked_for_and_flags_change_it(here, slurm, uninterrupted):
    shutil.copytree(uninterrupted, here / "runs" / "one")
    (here / "samestep.toml").write_text('[slurm]\nenv = ["A=2"]\nqos = "q"\n')
    ones = ("--exclusive", "--hold", "-H", "--begin=now+1hour", "-d afterok:7")
    kept = JobOptions(nodes="2", time="30", env=("A=1",), sbatch=ones, job_name="mine")
    keep_options(here / "runs" / "one", kept)
    code, text, _ = slurm("submit", "runs/one", "--dry-run", "--time", "60")
    assert code == 0
    found = directives(text)
    assert (found["nodes"], found["time"], "qos" in found) == ("2", "60", False)
    assert found["job-name"] == "mine"
    assert re.findall("^#SBATCH .*(exclusive|hold|-H|begin|afterok)", text, re.MULTILINE) == [
        "exclusive"
    ]
    assert re.findall("^export A=(.*)$", text, re.MULTILINE) == ["1"]
    code, text, _ = slurm("submit", "runs/one", "--nodes", "1-4", "--dry-run")
    assert (code, directives(text)["nodes"]) == (0, "1-4"), "it goes on with its global batch"


def test_the_verdict_of_a_start_is_one_word_for_the_script_and_a_line_for_the_log(slurm, here):
    (here / "run").mkdir()
    for exit_code, expected, told in (
        ("0", "completed\n", ""),
        ("1", "again\n", "restart 1"),
        ("2", "failed\n", "exit code 2"),  # a mistake comes again
    ):
        words = ("verdict", "run", "--kind", "script", "--code", exit_code)
        code, word, line = slurm(*words)
        assert (code, word, line.count("\n")) == (0, expected, 1)
        assert told in line
    result = json.loads((here / "run" / "result.json").read_text())
    assert (result["status"], result["exit_code"]) == ("failed", 2)
