"""What bash makes of the words of a job script, evaluated by bash itself."""

import re
import shlex
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.slurm.options import JobOptions
from samestep.slurm.script import JobScript, script_text

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0\n\r"), min_size=1, max_size=20)
NASTY = st.text("'\"\\$`!*?[]{}()<>|&;#~ \ta-=%", min_size=1, max_size=12)
RUN = "/home/ada/runs/one"


def script(*, command=("mine.py",), kind="script", python="python", venv=None, **options) -> str:
    return script_text(
        JobScript(
            options=JobOptions(**options),
            name="mine",
            title="mine",
            run=RUN,
            folder="/home/ada",
            kind=kind,
            command=tuple(command),
            python=python,
            venv=venv,
        )
    )


def evaluated(shell: str) -> list[str]:
    """Return the words that a text prints in bash, each with a NUL behind it."""
    done = subprocess.run(["bash", "--norc", "-c", shell], capture_output=True, check=True)
    assert done.stderr == b""
    return done.stdout.decode().split("\0")[:-1]


def start_words(text: str) -> list[str]:
    """Return the words that srun gets."""
    begin = re.search(r"^srun ", text, re.MULTILINE).start()
    line = text[begin : text.index(" &\nstep=$!", begin)]
    return evaluated(f"srun() {{ printf '%s\\0' \"$@\"; }}\n{line}")


def line(text: str, start: str) -> str:
    return re.search(rf"^{start}.*$", text, re.MULTILINE)[0]


@settings(max_examples=20, deadline=None)
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
    said = evaluated(f"set -- {shlex.join(inner[4:])}\n{prints}")
    assert said[0] == python
    assert tuple(said[-len(command) :]) == command


@settings(max_examples=15, deadline=None)
@given(TEXTS | NASTY)
def test_a_variable_has_its_value_unchanged(value):
    text = script(env=(f"VALUE={value}",))
    assert evaluated(f"{line(text, 'export VALUE=')}\nprintf '%s\\0' \"$VALUE\"") == [value]


@settings(max_examples=15, deadline=None)
@given(NASTY)
def test_a_container_is_one_word(image):
    words = start_words(script(container=f"/images/{image}.sif"))
    assert words[words.index("exec") + 1] == f"/images/{image}.sif"


def test_torchrun_has_the_cores_of_all_its_ranks():
    text = script(ntasks_per_node=4, cpus_per_task=3, launcher="torchrun")
    assert "#SBATCH --ntasks-per-node=1\n#SBATCH --cpus-per-task=12\n" in text
    assert "--cpus-per-task=12" in start_words(text)
    assert evaluated(f"{line(text, 'export OMP_')}\nprintf '%s\\0' $OMP_NUM_THREADS") == ["3"]


@pytest.mark.parametrize(("cores", "ranks", "each"), [(8, 4, 2), (8, 3, 2), (2, 4, 1), (5, 1, 5)])
def test_a_rank_has_its_share_of_the_cores_and_one_at_least(cores, ranks, each):
    sets = line(script(ntasks_per_node=ranks), "export OMP_NUM_THREADS=")
    said = evaluated(f"SLURM_CPUS_ON_NODE={cores}\n{sets}\nprintf '%s\\0' $OMP_NUM_THREADS")
    assert said == [str(each)]


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 2**31 - 1))
def test_the_ranks_meet_at_a_port_below_those_that_linux_hands_out(job):
    sets = line(script(), "export MASTER_PORT=")
    port = int(evaluated(f"SLURM_JOB_ID={job}\n{sets}\nprintf '%s\\0' $MASTER_PORT")[0])
    assert 1024 < port < 32768


def test_what_was_not_asked_for_is_no_directive():
    asked = re.findall(r"^#SBATCH (--[a-z-]+)", script(), re.MULTILINE)
    assert sorted(asked) == [
        "--chdir",
        "--comment",
        "--job-name",
        "--nodes",
        "--ntasks-per-node",
        "--open-mode",
        "--output",
        "--requeue",
        "--signal",
    ]
