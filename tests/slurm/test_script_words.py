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


def script(
    *, command=("mine.py",), kind="script", python="python", venv=None, mounts=(), **options
) -> str:
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
            mounts=mounts,
        )
    )


CANCEL = """
running() {{ (( --left > 0 )); }}
pass_on() {{ echo "told $1"; }}
sleep() {{ :; }}
scancel() {{ echo "scancel $*"; }}
SLURM_JOB_ID=7 left={left}
cancel
"""


@pytest.mark.parametrize(("left", "killed"), [(5, False), (1000, True)])
@pytest.mark.parametrize(("kind", "told"), [("recipe", "USR1"), ("script", "TERM")])
def test_a_cancel_tells_the_ranks_and_kills_those_that_hang(kind, told, left, killed):
    text = script(kind=kind, signal_s=30)
    function = re.search(r"^cancel\(\) \{.*?^\}", text, re.MULTILINE | re.DOTALL)[0]
    shell = function + CANCEL.format(left=left)
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True)
    kills = ["scancel --signal=KILL 7.0"] if killed else []
    assert done.stdout.splitlines() == [f"told {told}", *kills]
    assert ("30 s" in done.stderr) is killed


def test_the_script_says_that_it_can_be_told_once_its_traps_are_set():
    lines = script().splitlines()
    begun = next(n for n, x in enumerate(lines) if x.endswith('/.begun"'))
    traps = [n for n, x in enumerate(lines) if re.match(r"trap .* (USR1|USR2|TERM)$", x)]
    assert len(traps) == 3
    assert max(traps) < begun


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
    said = evaluated(f"set -- {shlex.join(inner[4:])}\n{prints}")
    assert said[0] == python
    assert tuple(said[-len(command) :]) == command


@settings(max_examples=15)
@given(TEXTS | NASTY)
def test_a_variable_has_its_value_unchanged(value):
    text = script(env=(f"VALUE={value}",))
    assert evaluated(f"{line(text, 'export VALUE=')}\nprintf '%s\\0' \"$VALUE\"") == [value]


@settings(max_examples=15)
@given(NASTY)
def test_a_container_is_one_word(image):
    words = start_words(script(container=f"/images/{image}.sif", mounts=(f"/data/{image}",)))
    after = words.index("exec") + 1
    assert words[after : after + 2] == [f"--bind=/data/{image}", f"/images/{image}.sif"]


@pytest.mark.parametrize(
    ("interface", "nccl", "gloo"),
    [("ib0", "ib0", "ib0"), ("ib0,ib1", "ib0,ib1", "ib0,ib1"), ("^docker,lo", "^docker,lo", "")],
)
def test_gloo_is_told_names_alone_of_an_interface(interface, nccl, gloo):
    lines = [x for x in script(interface=interface).splitlines() if "_SOCKET_IFNAME=" in x]
    prints = 'printf \'%s\\0\' "$NCCL_SOCKET_IFNAME" "$GLOO_SOCKET_IFNAME"'
    assert evaluated("\n".join([*lines, prints])) == [nccl, gloo]


def test_a_node_without_the_interface_ends_the_job_as_a_mistake():
    text = script(interface="no-such-0")
    lines = [x for x in text.splitlines() if x.startswith(("fail()", "[[ -e /sys"))]
    shell = "\n".join(["SLURMD_NODENAME=node1", *lines, "exit 0"])
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no-such-0" in done.stderr


def test_each_line_of_a_script_under_torchrun_has_its_rank_before_it():
    text = script(launcher="torchrun", ntasks_per_node=2)
    sets = line(text, "export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE=")
    assert evaluated(f"{sets}\nprintf '%s\\0' \"$TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE\"") == [
        "${rank}: "
    ]
    assert "--tee=3" in text
    assert "--label" not in start_words(text)


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


@settings(max_examples=10)
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
