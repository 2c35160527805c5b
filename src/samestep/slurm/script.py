"""The job script: text from a pure function of a frozen dataclass."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from samestep.ranks.watched import STALLED
from samestep.run.code_copy import HASHES, Code
from samestep.slurm.options import JobOptions, assignment, dependency, interface_names
from samestep.slurm.preflight import NOT_PASSED, TABLE
from samestep.slurm.rank_ends import LATE, STDERR
from samestep.slurm.restarts import BEGUN

MARK = "samestep:"  # a job's comment begins with it; the run directory follows

STARTER = ".start.py"
"""In the run directory: what starts a script, so that a hang of it is seen."""

START = """\
# It starts a script as Python does, and lets samestep see where it hangs.
import os
import sys

try:
    from samestep.script.watched_script import main
except ImportError:
    if os.environ.get("RANK") == "0":
        why = "samestep is not installed where the ranks run: if they hang, it cannot say where."
        print(f"samestep: {why}", file=sys.stderr, flush=True)
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
main()
"""

_PLAIN = re.compile(r"[\w./:@%+,=-]+")

# Ranks import PyTorch for seconds before they handle signals, and Slurm may warn at the start.
_LISTEN_S = 20
_VERDICT_S = 30
_PREFLIGHT_S = 150
_M_SAMESTEP = ("-m", "samestep")
_SEES_RUN = (
    f'[[ -e "$SAMESTEP_RUN_DIR/{BEGUN}" ]] || {{ echo "samestep: failed: $SLURMD_NODENAME does not '
    'see the run directory $SAMESTEP_RUN_DIR: it must be on a file system that all nodes share." '
    ">&2; exit 2; }"
)
_ASK_REQUEUE = [
    "# The site or an admin may forbid a requeue; no answer forbids nothing.",
    "no_requeue() { scontrol -o show job \"$job\" | grep -q ' Requeue=0 '; }",
    "if no_requeue; then",
    '  echo "note    Slurm will not requeue this job: after its time limit, submit it again."',
    "fi",
]
_PORTS = (12000, 18000)  # first, how many; below 32768, from where Linux hands out ports itself
_SC1091 = "# shellcheck disable=SC1091  # it is on the cluster"
_SC2016 = "# shellcheck disable=SC2016  # each task's own shell fills these in"


@dataclass(frozen=True, kw_only=True)
class JobScript:
    """Everything that a job script says; paths are absolute."""

    options: JobOptions
    name: str
    title: str
    run: str
    folder: str  # the directory that the command was typed in
    command: tuple[str, ...]
    """What each rank runs: words after the interpreter, such as ("-m", "samestep", …)."""
    kind: Literal["recipe", "script"]
    python: str = "python"  # the interpreter, unless the ranks enter an environment with its own
    venv: str | None = None
    mounts: tuple[str, ...] = ()
    """Folders to mount in a container: of the run, of the command, of the code and the data."""
    code: Code | None = None
    """What is copied into the run directory before the job is submitted."""
    import_from: tuple[str, ...] = ()
    """Folders of the run's copy of the code, in place of those that they were copied from."""
    uncopied: Path | None = None
    """Without a copy, the file that runs: each start checks that it is that of the submit."""

    @property
    def enters_environment(self) -> bool:
        """Whether the ranks run in an environment that has its own interpreter."""
        options = self.options
        return bool(self.venv or options.conda or options.container or options.container_image)


def script_text(job: JobScript) -> str:
    """Return the text of the job script."""
    parts = (_directives, _signal_handlers, _environment, _master_address, _start_ranks, _end)
    return "\n".join(line for part in parts for line in [*part(job), ""])


def sbatch_options(job: JobScript) -> dict[str, str | None]:
    """Return the options for sbatch with their values; None for those without a value."""
    options = job.options
    values = {
        "job-name": job.name,
        "comment": MARK + job.run,
        "chdir": job.folder,
        "output": options.output or f"{job.run.replace('%', '%%')}/slurm-%j.out",
        "open-mode": "append",
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "nodes": options.nodes,
        # Slurm keeps the first start's number of tasks, which may not fit on the nodes after a
        # requeue. So for a range, sbatch gets what each node needs, and srun gets the tasks.
        "ntasks-per-node": None if options.is_elastic else _tasks_per_node(options),
        "mincpus": _cpus_per_node(options) if options.is_elastic else None,
        "cpus-per-task": _cpus_per_task(options),
        "gpus-per-node": options.gpus_per_node or None,
        "mem": options.mem,
        "time": options.time,
        "signal": f"B:USR1@{options.signal_s}",
        "dependency": ",".join(map(dependency, options.after)) or None,
    }
    given: dict[str, str | None] = {name: str(value) for name, value in values.items() if value}
    if options.after:
        given["kill-on-invalid-dep"] = "yes"
    return given | {"requeue" if options.requeue else "no-requeue": None}


def _directives(job: JobScript) -> list[str]:
    return [
        "#!/usr/bin/env bash",
        f"# {job.title}",
        "# Written by `samestep slurm submit`. Edit it as you like and hand it in with sbatch.",
        *directives(sbatch_options(job), job.options.sbatch),
    ]


def directives(options: Mapping[str, str | None], more: Sequence[str]) -> list[str]:
    """Return the lines of a script that give sbatch these options, and more as they stand."""
    words = []
    for name, value in options.items():
        option = f"--{name}" if value is None else f"--{name}={value}"
        if value and not _PLAIN.fullmatch(value):  # a space would end it, # begin a comment
            escaped = value.replace("\\", "\\\\").replace('"', '\\"')
            option = f'--{name}="{escaped}"'
        words.append(option)
    return [f"#SBATCH {option}" for option in (*words, *more)]


def _tasks_per_node(options: JobOptions) -> int:
    return 1 if options.launcher == "torchrun" else options.ranks_per_node


def _cpus_per_task(options: JobOptions) -> int | None:
    # One torchrun has the cores of all its ranks.
    return options.cpus_per_task if options.launcher == "srun" else _cpus_per_node(options)


def _cpus_per_node(options: JobOptions) -> int:
    return (options.cpus_per_task or 1) * options.ranks_per_node


def _signal_handlers(job: JobScript) -> list[str]:
    patience_s = job.options.signal_s
    listen_s = min(_LISTEN_S, patience_s // 2)
    # samestep keeps a USR1 that comes while it imports. For a user's script, USR1 may mean to
    # continue later.
    cancels = "USR1" if job.kind == "recipe" else "TERM"
    # The verdict and the requeue need some of the time that is left until the limit.
    saves_s = patience_s - min(_VERDICT_S, patience_s // 3)
    steps = " ".join(f'"$job.{n}"' for n in range(job.options.num_steps))
    return f"""\
run={shlex.quote(job.run)}  # the same over all restarts
job=$SLURM_JOB_ID  # in a job array, it may mean every task
[[ -z ${{SLURM_ARRAY_JOB_ID-}} ]] || job=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID

# Slurm sends USR1 ahead of the time limit, `samestep slurm cancel` sends USR2, and TERM says that
# Slurm itself ends the job and has told the ranks. They finish their step, save, end together.
told='' step=''
trap 'told=USR1; [[ -z $step ]] || warn' USR1
trap 'told=USR2; [[ -z $step ]] || cancel' USR2
trap 'told=${{told:-TERM}}' TERM
# From here on it handles signals; `samestep slurm cancel` waits for this file.
echo "$SLURM_JOB_ID ${{SLURM_RESTART_COUNT:-0}}" >"$run/{BEGUN}"
running() {{ kill -0 "$step" 2>/dev/null; }}
starts() {{ squeue --noheader --steps --jobs="$job" --format=%i | grep -q '[.][0-9]'; }}
pass_on() {{
  # Slurm may warn in the first second; the ranks must run, and have come far enough to listen.
  while running && {{ ((SECONDS < began + {listen_s})) || ! starts; }}; do sleep 1; done
  scancel --signal="$1" "$job"  # only the ranks, not this script
}}
end_ranks() {{  # those that still run until the second $1; $2 says after what
  while running && ((SECONDS < $1)); do sleep 1; done
  running || return 0
  echo "{LATE} $2, so they are killed." >&2
  told=${{told/USR1/LATE}}
  scancel --signal=KILL {steps}
}}
warn() {{
  local until=$((SECONDS + {saves_s}))
  pass_on USR1
  end_ranks $until "{saves_s} s after the warning of the time limit"
}}
cancel() {{
  pass_on {cancels}
  end_ranks $((SECONDS + {patience_s})) "{patience_s} s after the cancel"
}}""".split("\n")  # a path may hold other ends of lines


def _environment(job: JobScript) -> list[str]:
    options = job.options
    lines = ["# The place: modules, environment, variables."]
    names = interface_names(options.interface)
    if options.module or job.venv or options.conda or names:
        text = "samestep: failed: $1 did not work on $SLURMD_NODENAME."
        lines.append(f'fail() {{ echo "{text}" >&2; exit 2; }}')
    if options.module:  # what the shell that submitted had loaded is not what the job asks for
        lines.append("module purge || fail 'module purge'")
    lines += [f"module load {shlex.quote(name)} || fail 'module load'" for name in options.module]
    if job.venv:
        lines += [_SC1091, f". {shlex.quote(f'{job.venv}/bin/activate')} || fail activate"]
    if options.conda:
        lines += [
            _SC1091,
            '. "$(conda info --base)/etc/profile.d/conda.sh" || fail conda.sh',
            f"conda activate {shlex.quote(options.conda)} || fail 'conda activate'",
        ]
    lines += [
        f"export SAMESTEP_RUN_DIR={shlex.quote(job.run)}",
        "export PYTHONFAULTHANDLER=1 PYTHONUNBUFFERED=1  # a crash shows its line",
    ]
    if job.kind == "script":  # a recipe's ranks choose by the size of its model
        share = f"SLURM_CPUS_ON_NODE / {options.ranks_per_node}"
        threads = options.cpus_per_task or f"$(({share} > 0 ? {share} : 1))"
        lines.append(f"export OMP_NUM_THREADS={threads}  # the cores that a rank really has")
    lines += [f"[[ -e /sys/class/net/{name} ]] || fail '--interface {name}'" for name in names]
    if options.interface:
        lines.append(f"export NCCL_SOCKET_IFNAME={shlex.quote(options.interface)}")
    if names:  # Gloo knows only names; ^docker or =ib0 are NCCL's
        lines.append(f"export GLOO_SOCKET_IFNAME={','.join(names)}")
    if options.gpus_per_node:
        # A lost peer ends the job with a message instead of a hang.
        lines += [
            "export TORCH_NCCL_ASYNC_ERROR_HANDLING=1",
            "# After NCCL's timeout each rank writes its last collectives into the run directory.",
            "export TORCH_NCCL_TRACE_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1",
            'export TORCH_NCCL_DEBUG_INFO_TEMP_FILE="$run/nccl-trace-rank-"',
        ]
    variables = map(assignment, options.env)
    lines += [f"export {name}={shlex.quote(value)}" for name, value in variables]
    return [*lines, *_code(job)]


def _code(job: JobScript) -> list[str]:
    """Import from the copy of the code, or refuse code that was edited instead of copied."""
    lines = []
    if job.import_from:
        folders = shlex.quote(":".join(job.import_from))
        lines.append(f"export PYTHONPATH={folders}${{PYTHONPATH:+:$PYTHONPATH}}  # of the copy")
    if job.uncopied is not None and not job.options.allow_edit:
        text = "the code is not that of the submit. Undo the edit, or submit with --allow-edit."
        lines += [
            "# The code was not copied: edited, it would be another training.",
            f'sha256sum --quiet --check "$run/{HASHES}" >&2 || {{',
            f'  echo "samestep: failed: {text}" >&2',
            "  exit 2",
            "}",
        ]
    return lines


def _master_address(job: JobScript) -> list[str]:
    lines = [
        "# The addresses at which Slurm itself reaches the nodes; the ranks meet on the first.",
        'addresses=$(scontrol --oneliner show node "$SLURM_JOB_NODELIST" |',
        """  sed -n 's/.* NodeAddr=\\([^ ]*\\).*/\\1/p')""",
        'export addresses="${addresses:-$(scontrol show hostnames "$SLURM_JOB_NODELIST")}"',
        "# Where a node has no scontrol: this script runs on the first node.",
        "addresses=${addresses:-$(hostname --all-ip-addresses | cut -d' ' -f1)}",
    ]
    given = dict(map(assignment, job.options.env))
    if "MASTER_ADDR" not in given:
        lines.append("export MASTER_ADDR=${addresses%%$'\\n'*}")
    if "MASTER_PORT" not in given:
        port = f"{_PORTS[0]} + SLURM_JOB_ID % {_PORTS[1]}"
        lines += [
            f"port=$(({port}))  # its own for each job, unless something else listens there",
            'while (: <>"/dev/tcp/$MASTER_ADDR/$port") 2>/dev/null; do port=$((port + 1)); done',
            "export MASTER_PORT=$port",
        ]
    return lines


def _start_ranks(job: JobScript) -> list[str]:
    enter = _apptainer(job, *(["--nv"] if job.options.gpus_per_node else []))
    comments, program = _torchrun(job) if job.options.launcher == "torchrun" else _rank(job)
    waits = [
        "step=$!",
        "# What came before the ranks.",
        "case $told in USR1) warn ;; USR2) cancel ;; TERM) pass_on TERM ;; esac",
        "",
        "# A signal ends the waiting, not the ranks.",
        'while running; do wait "$step"; done',
        'wait "$step"',
        "code=$?",
    ]
    if job.options.preflight:
        waits = ["follow() {", *(f"  {line}" * bool(line) for line in waits), "}"]
    label = ["--label"] * (job.kind == "script" and job.options.launcher == "srun")
    words = _srun(job, "--kill-on-bad-exit=1", *label)
    ranks = [
        "began=$SECONDS",
        *comments,
        " \\\n  ".join([*_wrap(words), *_wrap([*enter, *program])]) + " &",
        *(["follow"] if job.options.preflight else waits),
    ]
    if job.options.preflight:
        own = ["samestep"] if job.enters_environment else [shlex.quote(job.python), *_M_SAMESTEP]
        doctor = [*enter, *own, "doctor", "--json", '--run-dir="$run"', "--budget-s=1"]
        limited = ["timeout", "--kill-after=10", str(_PREFLIGHT_S), *_srun(job)]
        ranks = [
            *waits,
            "began=$SECONDS",
            "# Are the nodes fit for the ranks? The verdict reads the table.",
            " \\\n  ".join([*_wrap(limited), *_wrap([*doctor, f'>"$run/{TABLE}"'])]) + " &",
            "follow",
            "if [[ $code != 0 || $told ]]; then",
            f"  told=${{told:-{NOT_PASSED}}} code=$((code ? code : 1))",
            "else",
            *ranks,
            "fi",
        ]
    return [
        "start=$((${SLURM_RESTART_COUNT:-0} + 1))",
        'echo "samestep: job $SLURM_JOB_ID, start $start, on $SLURM_JOB_NODELIST, $(date)"',
        *(_ASK_REQUEUE * job.options.requeue),
        *ranks,
    ]


def _srun(job: JobScript, *flags: str) -> list[str]:
    options = job.options
    words = ["srun", *flags]
    if options.is_elastic:
        words.append('--nodes="$SLURM_JOB_NUM_NODES"')
        words.append(f"--ntasks-per-node={_tasks_per_node(options)}")
    if cpus := _cpus_per_task(options):  # srun does not inherit it from sbatch
        words.append(f"--cpus-per-task={cpus}")
    if options.container_image:  # an option of Pyxis, which extends srun
        mounts = ",".join(f"{folder}:{folder}" for folder in job.mounts)
        words.append(f"--container-image={shlex.quote(options.container_image)}")
        words += [f"--container-mounts={shlex.quote(mounts)}"] if mounts else []
        words.append(f"--container-workdir={shlex.quote(job.folder)}")
    return words


def _apptainer(job: JobScript, *flags: str) -> list[str]:
    if not job.options.container:
        return []
    binds = [f"--bind={shlex.quote(folder)}" for folder in job.mounts]
    return ["apptainer", "exec", *flags, *binds, shlex.quote(job.options.container)]


def _command(job: JobScript) -> tuple[str, ...]:
    return (f"{job.run}/{STARTER}", *job.command) if job.kind == "script" else job.command


def _rank(job: JobScript) -> tuple[list[str], list[str]]:
    """Return comments, and words that are already quoted or meant for the shell."""
    python = "python" if job.enters_environment else job.python
    program = [shlex.quote(word) for word in (python, *_command(job))]
    if job.kind == "recipe":
        if job.import_from:  # not from the working directory, which -m would put before the copy
            program.insert(1, "-P")
        return ["# One task for each rank."], program
    # tee is not a child of the rank, since the rank may wait for all its children.
    words = f'tee "$SAMESTEP_RUN_DIR/{STDERR.format(rank="$RANK")}" >&2'
    inner = (
        f"{_SEES_RUN}\n  "
        "export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS "
        f"LOCAL_WORLD_SIZE={job.options.ranks_per_node}\n"
        f'  exec "$@" 2> >((trap "" HUP INT TERM USR1 USR2; exec {words}) <&0 &)'
    )
    comments = [
        "# One task for each rank, with the variables that torchrun would set. srun may lose",
        "# what a rank said last, so its errors also go to a file.",
        _SC2016,
    ]
    return comments, ["bash", "-c", f"'{inner}'", "rank", *program]


def _torchrun(job: JobScript) -> tuple[list[str], list[str]]:
    options = job.options
    module = [shlex.quote(job.python), "-m", "torch.distributed.run"]
    launcher = [
        *(["torchrun"] if job.enters_environment else module),
        '--nnodes="$SLURM_JOB_NUM_NODES"',
        f"--nproc-per-node={options.ranks_per_node}",
        '--rdzv-id="$SLURM_JOB_ID.$SLURM_STEP_ID"',
        "--rdzv-backend=c10d",
        '--rdzv-endpoint="$endpoint"',
        # Otherwise torchrun looks up the node's own name, which may lead to 127.0.1.1.
        '--rdzv-conf="is_host=$((SLURM_NODEID == 0))"',
        # A node without scontrol knows only the first address.
        '${address[SLURM_NODEID]:+--local-addr="${address[SLURM_NODEID]}"}',
        f"--max-restarts={options.max_restarts}",
    ]
    comments = [
        "# torchrun passes the warning on and gives the ranks as long to save (by variables: a",
        "# PyTorch too old for one of these flags passes over it).",
        "export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
        f"export PET_SHUTDOWN_TIMEOUT={options.signal_s}",
    ]
    if job.kind == "script":  # label each line of its output with the rank, as srun does
        launcher += ["--tee=3", '--log-dir="$SAMESTEP_RUN_DIR/torchrun"']
        comments += [
            "# shellcheck disable=SC2016  # torchrun fills in the rank",
            "export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE='${rank}: ' PYTHONUNBUFFERED=1",
        ]
    comments += [
        "# One torchrun for each node; it starts the ranks, and all again when one fails.",
        _SC2016,
    ]
    start = (
        f"{_SEES_RUN}\n  address=($addresses) endpoint=$MASTER_ADDR:$MASTER_PORT\n"
        "  [[ $MASTER_ADDR != *:* ]] || endpoint=[$MASTER_ADDR]:$MASTER_PORT  # IPv6\n"
        f"  exec {launcher[0]}"
    )
    # torchrun's account names the host as the machine calls itself, such as localhost.
    renames = 'sed -u "s/^\\(.*  host  *: \\).*/\\1$SLURMD_NODENAME/" >&2'
    account = f'2> >((trap "" HUP INT TERM USR1 USR2; exec {renames}) <&0 &)'
    inner = " \\\n    ".join([start, *launcher[1:], '"$@"', account])
    words = ["bash", "-c", shlex.quote(inner), "torchrun"]
    return comments, [*words, *map(shlex.quote, _command(job))]


def _wrap(words: list[str], width: int = 96) -> list[str]:
    """Join words to lines of at most `width` characters, unless a word is longer."""
    lines = words[:1]
    for word in words[1:]:
        if len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def _end(job: JobScript) -> list[str]:
    samestep = "samestep" if job.enters_environment else shlex.join([job.python, *_M_SAMESTEP])
    if job.options.container:
        samestep = " ".join([*_apptainer(job), "samestep"])
    if job.options.container_image:  # this script runs outside of it
        samestep = shlex.join([job.python, *_M_SAMESTEP])
    again = '"$again"' if job.options.requeue else "--no-requeue"
    go_on = f"sbatch {shlex.quote(job.run)}/job.sbatch"
    if job.kind == "recipe":
        go_on = f"samestep slurm submit {shlex.quote(job.run)}"
    lines = [
        "# Say how it ended, and whether it continues.",
        *(["again=--exclude; if no_requeue; then again=--no-requeue; fi"] * job.options.requeue),
        f'verdict=$({samestep} slurm verdict "$run" --code "$code" --told "$told" \\',
        f"  --kind {job.kind} --restarts {job.options.restarts} {again})",
        "case $verdict in",
        "  completed) code=0 ;;",
        f"  hung) code={STALLED} ;;",
    ]
    if job.options.requeue:
        lines += [
            "  again*)",
            "    trap '' TERM  # the requeue ends this script too",
            f"    go_on={shlex.quote(go_on)}",
            "    # Slurm waits two minutes, then starts it again. A controller that is away is",
            "    # asked until it answers; a refusal is final.",
            "    for _ in {1..24}; do",
            '      said=$(scontrol requeue "$job" 2>&1) && break',
            '      echo "samestep: the requeue: $said" >&2',
            "      case $said in *contact*|*[Tt]ime*out*|*[Tt]imed*|*[Tt]emporar*) sleep 5 ;; *)",
            '        echo "samestep: Slurm refused the requeue. Continue with: $go_on" >&2',
            "        break ;;",
            "      esac",
            "    done",
            "    exclude=${verdict#again}  # nodes that failed; only a job that waits takes it",
            "    [[ -z $exclude || $said ]] ||",
            '      scontrol update JobId="$job" ExcNodeList="${exclude# }"',
            "    ;;",
        ]
    return [*lines, '  cancelled) scancel "$job" ;;', "esac", 'exit "$code"']
