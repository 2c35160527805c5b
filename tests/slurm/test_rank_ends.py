"""Of all ranks that ended, the one that ended first and by itself is the cause that is shown."""

import pytest

from samestep.cluster.slurm.rank_ends import first_end, latest_start, lines_of

BEGIN = "samestep: job 4, start 1, on node[1-2], Sun Nov 22 14:00:00 UTC 2026"
LOST = "RuntimeError: [gloo/pair.cc:544] Connection reset by peer [127.0.0.1]:1"


def raised(rank: int, error: str, *frames: tuple[str, int, str]) -> list[str]:
    lines = ["Traceback (most recent call last):"]
    for file, line, code in frames:
        lines += [f'  File "{file}", line {line}, in work', f"    {code}", "    ^^^^^"]
    return [f"{rank}: [rank{rank}]: {line}" for line in [*lines, error]]


def srun(rank: int, how: str, node: str = "node1") -> str:
    return f"srun: error: {node}: task {rank}: {how}"


def test_a_killed_rank_is_the_cause_or_else_the_earliest_account():
    lines = [
        BEGIN,
        *raised(0, LOST, ("/home/ada/train.py", 3, "dist.all_reduce(x)")),
        srun(1, "Killed", "node2"),
        srun(0, "Exited with exit code 1"),
    ]
    for shown in (lines, [*lines[:-2], lines[-1], lines[-2]]):  # in either order
        end = first_end(shown)
        assert (end.rank, end.node, end.signal, end.is_effect) == (1, "node2", "SIGKILL", False)
        assert "rank 1 on node2" in end.sentence
        assert "SIGKILL" in end.sentence
    for word in ("Job step aborted: Waiting up to 32 s.", "launch/slurm: Terminating StepId=1.2"):
        assert first_end([BEGIN, f"srun: {word}", srun(0, "Killed")]).is_effect
    assert not first_end([BEGIN, srun(0, "Killed")]).is_effect
    lines = [
        BEGIN,
        *account(0, -15, "2026-11-22_14:00:01", "node1"),
        *account(3, 1, "2026-11-22_14:00:05", "node2"),
        *account(2, -9, "2026-11-22_14:00:03", "node2"),
        srun(0, "Exited with exit code 1"),
    ]
    end = first_end(lines)
    assert (end.rank, end.node, end.signal) == (2, "node2", "SIGKILL")
    told = "KeyError: 'x'\n  at /a.py:3 in f: g()\n  The whole traceback is in b"
    left = [
        {"rank": 0, "code": 1, "message": "Rank 0 lost contact", "time": 8, "lost_peer": True},
        {"rank": 1, "code": 1, "message": told, "time": 9},
    ]
    end = first_end([], left)
    assert (end.rank, end.said, end.frames) == (1, "KeyError: 'x'", ("  at /a.py:3 in f: g()",))
    end = first_end([BEGIN, *(srun(r, "Exited with exit code 1", "n") for r in (0, 1))], left)
    assert (end.rank, end.node, end.said) == (1, "n", "KeyError: 'x'")


def test_an_error_of_a_scripts_rank_is_shown_with_the_users_own_lines():
    lines = [
        BEGIN,
        *raised(
            1,
            "RuntimeError: boom from rank 1",
            ("/home/ada/train.py", 30, "main()"),
            ("/v/lib/python3.12/site-packages/torch/nn/module.py", 9, "return forward(x)"),
            ("/home/ada/model.py", 12, "raise RuntimeError(text)"),
        ),
        *raised(0, LOST, ("/home/ada/train.py", 30, "main()")),
        srun(0, "Exited with exit code 1"),
        "slurmstepd: error: *** STEP 4.0 ON node1 CANCELLED ***",
        "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.",
        srun(1, "Terminated", "node2"),
    ]
    assert first_end(lines).is_effect, "who lost a peer, or was ended, is no cause"
    lines[-1] = srun(1, "Exited with exit code 1", "node2")
    end = first_end(lines)
    assert end.sentence == "rank 1 on node2: RuntimeError: boom from rank 1"
    assert end.frames == (
        "  at /home/ada/model.py:12 in work: raise RuntimeError(text)",
        "  at /home/ada/train.py:30 in work: main()",
    )


@pytest.mark.parametrize(
    ("how", "signal"),
    [
        ("Killed", "SIGKILL"),
        ("Out Of Memory", "SIGKILL"),
        ("Segmentation fault (core dumped)", "SIGSEGV"),
        ("Exited with exit code 3", ""),
    ],
)
def test_the_words_of_srun_are_read(how, signal):
    end = first_end([BEGIN, srun(0, "Terminated"), f"srun: error: node2: tasks 2,4-5: {how}"])
    assert (end.rank, end.node, end.signal) == (2, "node2", signal)
    assert end.code == (3 if not signal else None)


@pytest.mark.parametrize("label", ["", "1: "])
def test_a_crash_is_shown_with_the_users_innermost_line(tmp_path, label):
    file = tmp_path / "mine.py"
    file.write_text("import ctypes\nctypes.string_at(0)\n")
    stack = [
        "Fatal Python error: Segmentation fault",
        "",
        "Current thread 0x00007f1 [python] (most recent call first):",
        '  File "/usr/lib/python3.12/ctypes/__init__.py", line 9 in string_at',
        f'  File "{file}", line 2 in crash',
        f'  File "{file}", line 1 in <module>',
        "",
        "Extension modules: numpy._core (total: 1)",
    ]
    lines = [BEGIN, *(label + line for line in stack), srun(1, "Segmentation fault")]
    end = first_end(lines)
    assert (end.signal, end.frames[0]) == (
        "SIGSEGV",
        f"  at {file}:2 in crash: ctypes.string_at(0)",
    )
    assert len(end.frames) == 2


def account(rank: int, code: int, time: str, host: str) -> list[str]:
    return [
        "Root Cause (first observed failure):",
        "[0]:",
        f"  time      : {time}",
        f"  host      : {host}",
        f"  rank      : {rank} (local_rank: 0)",
        f"  exitcode  : {code} (pid: 77)",
        "  error_file: <N/A>",
    ]


def test_the_first_that_said_why_counts_by_what_it_raised():
    ends = [srun(rank, "Exited with exit code 1") for rank in (0, 1)]
    lost = ["0: Traceback (most recent call last):"]
    end = first_end([BEGIN, *lost, *raised(1, "ImportError: no"), *ends])
    assert (end.rank, end.said, end.comes_again) == (1, "ImportError: no", True)
    assert first_end([BEGIN, *ends]).rank == 0
    assert not first_end([BEGIN, *lost, *ends]).comes_again
    left = [{"rank": r, "code": 1, "message": f"KeyError: {r}", "time": 10 - r} for r in (0, 1)]
    end = first_end([BEGIN, srun(0, "Exited with exit code 1"), srun(1, "Terminated")], left)
    assert (end.rank, end.said, end.is_effect) == (1, "KeyError: 1", False)
    boom = raised(1, "RuntimeError: boom", ("/home/ada/train.py", 9, "boom()"))
    lines = [BEGIN, *boom, *raised(0, LOST), srun(1, "Aborted"), srun(0, "Exited with exit code 1")]
    end = first_end(lines)
    assert (end.rank, end.said) == (1, "RuntimeError: boom")
    silent = first_end([BEGIN, srun(1, "Aborted")])
    assert (silent.signal, silent.said) == ("SIGABRT", "")


def test_an_earlier_start_does_not_count_and_labels_of_many_tasks_are_padded(tmp_path):
    log = tmp_path / "log"
    log.write_text("\n".join([BEGIN, srun(3, "Killed"), BEGIN.replace("start 1", "start 2"), "x"]))
    assert latest_start(log) == ["x"]
    assert latest_start(tmp_path / "none") == []
    assert first_end([BEGIN, "a line", "srun: error: something else"]) is None
    lines = [" 3: a\n", "13: b", " 3: 13: c\rd\n", "3: [rank3]: e", "samestep: 3: f"]
    assert lines_of(3, lines) == ["a\n", "13: c\rd\n", "e"]
    assert lines_of(13, lines) == ["b"]
