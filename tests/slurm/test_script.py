"""The job script is text from a pure function: golden files, shellcheck, and bash reads it."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.cluster.slurm.options import JobOptions
from samestep.cluster.slurm.restarts import BEGUN
from samestep.cluster.slurm.script import JobScript, script_text

GOLDEN = Path(__file__).parent / "scripts"


def job(options: JobOptions, **more) -> JobScript:
    run = "/home/me/runs/spiral-1"
    plain = {"name": "spiral", "title": "spiral, recipe.", "kind": "recipe", "run": run}
    plain |= {"folder": "/home/me", "venv": "/home/me/.venv"}
    command = ("-m", "samestep", "train", "spiral", "--run-dir", run, "--resume")
    return JobScript(options=options, **(plain | {"command": command} | more))


def script(**more) -> str:
    own = ("command", "kind", "python", "venv", "mounts")
    given = {"command": ("mine.py",), "kind": "script", "venv": None}
    given |= {name: more.pop(name) for name in own if name in more}
    return script_text(job(JobOptions(**more), **given))


SCRIPT = {"kind": "script", "name": "train"}
SCRIPT |= {"command": ("/home/me/train.py", "--my-flag", "it's 1")}
EVERYTHING = {"partition": "gpu", "account": "physics", "qos": "high", "nodes": "2", "mem": "64G"}
EVERYTHING |= {"gpus_per_node": 8, "cpus_per_task": 4, "time": "2-00:00:00", "interface": "ib0"}
EVERYTHING |= {"after": ("7", "8:any", "9:notok"), "module": ("cuda/12.4", "gcc")}
EVERYTHING |= {"conda": "torch env", "env": ("NCCL_DEBUG=WARN", "A=b c"), "restarts": 5}
EVERYTHING |= {"sbatch": ("--constraint=a100",), "signal_s": 300}
RESTARTED = {"launcher": "torchrun", "max_restarts": 3}
JOBS = {
    "recipe": job(JobOptions()),
    "everything": job(JobOptions(**EVERYTHING), venv=None),
    "torchrun": job(JobOptions(nodes="2", ntasks_per_node=4, cpus_per_task=2, **RESTARTED)),
    "elastic": job(JobOptions(nodes="1-4", ntasks_per_node=2, cpus_per_task=3)),
    "elastic_torchrun": job(JobOptions(nodes="1-4", gpus_per_node=2, launcher="torchrun")),
    "outlives": job(JobOptions(nodes="2", ntasks_per_node=2, elastic="2:4", preflight=True)),
    "preflight": job(JobOptions(nodes="1-2", preflight=True, launcher="torchrun"), **SCRIPT),
    "script": job(JobOptions(nodes="2", ntasks_per_node=2), **SCRIPT),
    "no_environment": job(JobOptions(requeue=False), venv=None, python="/usr/bin/python3"),
    "torchrun_script": job(JobOptions(ntasks_per_node=2, launcher="torchrun"), **SCRIPT),
    "container": job(
        JobOptions(container="/images/my torch.sif", gpus_per_node=1),
        venv=None,
        mounts=("/data/my set", "/home/me"),
    ),
    "pyxis": job(
        JobOptions(container_image="host.example#nvidia/pytorch:25.01-py3", interface="^docker,lo"),
        venv=None,
        mounts=("/data", "/home/me"),
        python="/home/me/.venv/bin/python",
        **SCRIPT,
    ),
    "quotes": job(
        JobOptions(job_name='my "first" job'),
        run='/home/it\'s me/a "run" of 5%',
        folder="/home/it's me",
    ),
}


@pytest.mark.parametrize("name", JOBS)
def test_the_script_is_the_golden_one(name):
    text = script_text(JOBS[name])
    path = GOLDEN / f"{name}.sbatch"
    if os.environ.get("SAMESTEP_WRITE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("name", JOBS)
def test_bash_and_shellcheck_find_nothing_to_say(name):
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed: apt install shellcheck")
    path = GOLDEN / f"{name}.sbatch"
    for command in (["bash", "-n"], ["shellcheck"]):
        done = subprocess.run([*command, path], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout + done.stderr) == (0, "")


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0\n\r"), min_size=1, max_size=20)
NASTY = st.text("'\"\\$`!*?[]{}()<>|&;#~ \ta-=%", min_size=1, max_size=12)
FUNCTIONS = re.MULTILINE | re.DOTALL
STUBS = """
running() {{ (( --left > 0 )); }}
pass_on() {{ echo "told $1"; }}
sleep() {{ SECONDS=$((SECONDS + 1)); }}
scancel() {{ echo "scancel $*"; }}
job=7 left={left}
"""


def played(kind: str, left: int, what: str) -> subprocess.CompletedProcess[str]:
    """Let bash run functions of a script whose ranks run for `left` seconds more."""
    text = script(kind=kind, signal_s=30)
    functions = re.search(r"^end_ranks\(\) \{.*?^cancel\(\) \{.*?^\}", text, FUNCTIONS)[0]
    shell = functions + STUBS.format(left=left) + what
    return subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True)


@pytest.mark.parametrize(("left", "killed"), [(5, False), (1000, True)])
@pytest.mark.parametrize(("kind", "told"), [("recipe", "USR1"), ("script", "TERM")])
def test_a_cancel_tells_the_ranks_and_kills_those_that_hang(kind, told, left, killed):
    done = played(kind, left, "cancel")
    kills = ["scancel --signal=KILL 7.0"] * killed
    assert done.stdout.splitlines() == [f"told {told}", *kills]
    assert ("30 s" in done.stderr) is killed


@pytest.mark.parametrize(("left", "told"), [(5, "USR1"), (1000, "LATE")])
def test_ranks_that_pass_over_the_warning_are_killed_before_the_limit(left, told):
    done = played("recipe", left, 'told=USR1\nwarn\necho "$told $SECONDS"')
    first, *kills, last = done.stdout.splitlines()
    assert (first, last.split()[0], len(kills)) == ("told USR1", told, told == "LATE")
    assert int(last.split()[1]) < 30


def evaluated(shell: str) -> list[str]:
    """Return the words that a text prints in bash, each with a NUL behind it."""
    done = subprocess.run(["bash", "--norc", "-c", shell], capture_output=True, check=True)
    assert done.stderr == b""
    return done.stdout.decode().split("\0")[:-1]


def start_words(text: str) -> list[str]:
    begin = re.search(r"^srun ", text, re.MULTILINE).start()
    line = text[begin : text.index(" &\nstep=$!", begin)]
    return evaluated(f"srun() {{ printf '%s\\0' \"$@\"; }}\n{line}")


def line(text: str, start: str) -> str:
    return re.search(rf"^{start}.*$", text, re.MULTILINE)[0]


@settings(max_examples=15)
@given(run=NASTY | TEXTS, argument=NASTY | TEXTS)
def test_any_path_and_any_argument_reach_the_ranks_as_they_are(run, argument):
    text = script_text(job(JobOptions(), run=f"/{run}", command=("train.py", argument)))
    assert start_words(text) == ["--kill-on-bad-exit=1", "python", "train.py", argument]
    assert evaluated(f"{line(text, 'run=')}\nprintf '%s\\0' \"$run\"") == [f"/{run}"]


@settings(max_examples=20)
@given(
    folder=NASTY | TEXTS,
    arguments=st.lists(TEXTS | NASTY, min_size=1, max_size=3),
    launcher=st.sampled_from(["srun", "torchrun"]),
)
def test_interpreter_and_arguments_pass_the_inner_shell_unchanged(folder, arguments, launcher):
    python = f"/opt/{folder}/python"
    command = ("/home/ada/my script.py", *arguments)
    words = start_words(script(command=command, python=python, launcher=launcher))
    inner = words[words.index("bash") :]
    assert inner[:2] == ["bash", "-c"]
    # The inner shell would start the program: let it print the words in place of that.
    prints = inner[2].replace("exec ", "printf '%s\\0' ", 1)
    prints = prints.replace("[[ -e", "true || [[ -e", 1)  # the run directory is no folder here
    said = evaluated(f"set -- {shlex.join(inner[4:])}\n{prints}")
    assert said[0] == python
    assert tuple(said[-len(command) :]) == command


@settings(max_examples=15)
@given(NASTY)
def test_a_variable_has_its_value_unchanged_and_a_container_is_one_word(name):
    mounts, image = (f"/data/{name}",), f"/images/{name}.sif"
    text = script(env=(f"VALUE={name}",), container=image, mounts=mounts)
    assert evaluated(f"{line(text, 'export VALUE=')}\nprintf '%s\\0' \"$VALUE\"") == [name]
    words = start_words(text)
    after = words.index("exec") + 1
    assert words[after : after + 2] == [f"--bind={mounts[0]}", image]


def test_a_node_without_the_interface_ends_the_job_as_a_mistake():
    text = script(interface="no-such-0")
    lines = [x for x in text.splitlines() if x.startswith(("fail()", "[[ -e /sys"))]
    shell = "\n".join(["SLURMD_NODENAME=node1", *lines, "exit 0"])
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no-such-0" in done.stderr


@pytest.mark.parametrize(
    ("own", "queue", "begins"),
    [(8, "echo 7", False), (8, "false", True), (7, "echo 7", True), (8, "echo 9", True)],
)
def test_a_second_job_of_a_run_ends_before_it_writes_to_it(tmp_path, own, queue, begins):
    (tmp_path / BEGUN).write_text("7 0 spiral\n")
    text = script_text(job(JobOptions(), run=str(tmp_path)))
    first_lines = text[text.index("read -r other") : text.index("running() {")]
    shell = f"run={tmp_path} SLURM_JOB_ID={own} name=x\nsqueue() {{ {queue}; }}\n{first_lines}"
    assert subprocess.run(["bash", "-c", shell], check=False).returncode == (0 if begins else 2)
    assert (tmp_path / BEGUN).read_text().startswith(str(own if begins else 7))


@pytest.mark.parametrize(("cores", "ranks", "each"), [(8, 4, 2), (8, 3, 2), (2, 4, 1), (5, 1, 5)])
def test_a_rank_has_its_share_of_the_cores_and_one_at_least(cores, ranks, each):
    sets = line(script(ntasks_per_node=ranks), "export OMP_NUM_THREADS=")
    said = evaluated(f"SLURM_CPUS_ON_NODE={cores}\n{sets}\nprintf '%s\\0' $OMP_NUM_THREADS")
    assert said == [str(each)]
    assert "\nexport OMP_NUM_THREADS=3 " in script(cpus_per_task=3, launcher="torchrun")


@settings(max_examples=10)
@given(st.integers(1, 2**31 - 1))
def test_the_ranks_meet_at_a_port_below_those_that_linux_hands_out(job):
    sets = line(script(), "port=")
    port = int(evaluated(f"SLURM_JOB_ID={job}\n{sets}\nprintf '%s\\0' $port")[0])
    assert 1024 < port < 32768
