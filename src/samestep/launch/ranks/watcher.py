"""Watch the ranks of one node, in a process of its own without PyTorch, and end them if they hang.

`python -m samestep.launch.ranks.watcher '{"folder": …}'`, with the fields of `Node`.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.base.errors import UserError
from samestep.base.run.files import read_object, write_object
from samestep.base.startup import JOB_RUN, PARENT, stop_signals
from samestep.launch.ranks.process import FAILURE, HUNG, MEMBER, print_error
from samestep.launch.ranks.watched import CLAIM, HEARTBEAT, PULSES, RUN, STALLED
from samestep.launch.stall.pulse import PULSE, TIMED_OUT, RankPulse, read_pulses
from samestep.launch.stall.stacks import host_name, state_of

if TYPE_CHECKING:
    from samestep.launch.stall.stall_report import Stalled

VERDICT = "verdict.json"
"""In the folder of the pulses: the verdict, for the process that started the ranks."""

_POLL_EVERY_S, _BEAT_EVERY_S = 0.5, 5.0
_LATE_S = 5.0  # a look that comes this much later: this machine or this process was suspended
_OLD_S = 600.0
_OTHERS_S, _VERDICT_S = 5.0, 15.0
_SLOW_TIMES = 10  # ranks that all compute may just have a long step


@dataclass(frozen=True, kw_only=True)
class Node:
    """Which ranks are watched, and how patiently."""

    folder: Path
    node: int
    num_nodes: int
    local_world_size: int
    world_size: int
    least_s: float
    """The least time without a step after which ranks count as hung."""
    exact: bool
    """Whether that is the user's word, and slow steps do not make it longer."""

    def limit_s(self, pulse: RankPulse) -> float:
        """Return the seconds that a rank may be still in its phase."""
        from samestep.launch.stall.stall_verdict import patience  # noqa: PLC0415 - seldom, and late

        steps = self.least_s if self.exact else patience(pulse.step_times, self.least_s)
        return max(steps, pulse.times * self.least_s)


def main(arguments: Sequence[str]) -> None:
    """Watch until the ranks have ended, or end them."""
    for number in stop_signals():  # they are the ranks' business
        signal.signal(number, signal.SIG_IGN)
    values = json.loads(arguments[0])
    _Watcher(Node(**values | {"folder": Path(values["folder"])})).watch()


class _Watcher:
    def __init__(self, node: Node) -> None:
        self._node, self._began = node, time.time()
        job = os.environ.get(JOB_RUN)
        self._run = Path(job) if job else None
        for pulse in read_pulses(node.folder):  # of an earlier start at the same address
            if not state_of(pulse.pid):
                (node.folder / PULSE.format(rank=pulse.rank)).unlink(missing_ok=True)
        # Slurm may kill a watcher together with its ranks.
        for other in Path(tempfile.gettempdir()).glob(PULSES.format(own=f"{os.getuid()}-*")):
            with contextlib.suppress(OSError):
                is_old = time.time() - other.stat().st_mtime > _OLD_S
                if is_old and not any(state_of(pulse.pid) for pulse in read_pulses(other)):
                    shutil.rmtree(other)

    def watch(self) -> None:
        try:
            self._watch()
        finally:
            if self._run is not None:
                (self._run / HEARTBEAT.format(node=self._node.node)).unlink(missing_ok=True)
            if PARENT not in os.environ:  # else it is the parent's, which reads the verdict
                shutil.rmtree(self._node.folder, ignore_errors=True)

    def _watch(self) -> None:
        since = last_poll = last_beat = next_inspection = time.monotonic()
        while pulses := self._living():
            time.sleep(_POLL_EVERY_S)
            now = time.monotonic()
            if now - last_poll > _LATE_S or all(state_of(pulse.pid) in "Tt" for pulse in pulses):
                since = now
            last_poll = now
            with contextlib.suppress(OSError):
                self._run = Path((self._node.folder / RUN).read_text())
            still_s = now - max(since, *(pulse.moved for pulse in pulses))
            limit_s = max(self._node.limit_s(pulse) for pulse in pulses)
            if now - last_beat > _BEAT_EVERY_S:
                last_beat = now
                self._report(pulses, still_s, limit_s)
            sure = any(pulse.doing == TIMED_OUT for pulse in pulses) or self._is_asked()
            if sure or (still_s >= limit_s and now >= next_inspection and self._others_are_still()):
                slow = not sure and still_s < _SLOW_TIMES * limit_s
                if self._has_ended_stall(may_be_slow=slow):
                    return
                next_inspection = time.monotonic() + limit_s
        record_mismatch(self._node.folder)

    @property
    def _claim(self) -> Path:
        """The file by which one node asks the others where their ranks stand, and judges."""
        name = re.sub("-node[0-9]+$", "", self._node.folder.name)
        return (self._run or self._node.folder) / CLAIM.format(name=name)

    def _is_asked(self) -> bool:
        if self._node.num_nodes == 1:
            return False
        try:
            return self._claim.stat().st_mtime > self._began - _LATE_S  # else of an earlier start
        except OSError:
            return False

    def _living(self) -> list[RankPulse]:
        pulses = read_pulses(self._node.folder)
        return [pulse for pulse in pulses if pulse.code is None and state_of(pulse.pid)]

    def _report(self, pulses: Sequence[RankPulse], still_s: float, limit_s: float) -> None:
        """Write the heartbeat, which `samestep slurm status` and the other nodes read."""
        if self._run is None:
            return
        now = time.monotonic()
        ranks = [
            {
                "rank": pulse.rank,
                "step": pulse.steps,
                "phase": pulse.phase,
                "age_s": round(now - pulse.moved, 1),
                "call": _last_call(pulse),
            }
            for pulse in pulses
        ]
        beat = {"time": time.time(), "host": host_name(), "ranks": ranks}
        beat |= {"still_s": still_s, "limit_s": limit_s}
        with contextlib.suppress(UserError):  # a full disk
            write_object(self._run / HEARTBEAT.format(node=self._node.node), beat, sync=False)

    def _others_are_still(self) -> bool:
        """Whether the ranks of all other nodes stand still, too, as far as these have told."""
        run, others = self._run, {*range(self._node.num_nodes)} - {self._node.node}
        beats = [read_object(run / HEARTBEAT.format(node=n)) for n in others] if run else []
        # A file system may show an old one: its ranks have stood still since then, too.
        return all(
            beat["still_s"] + time.time() - beat["time"] >= beat["limit_s"]
            for beat in beats
            if beat.get("time", 0) > self._began - _LATE_S
        )

    def _has_ended_stall(self, *, may_be_slow: bool) -> bool:
        """Find out who hangs, tell it and end this node's ranks; False if none hangs."""
        from samestep.launch.stall.stacks import inspect_ranks  # noqa: PLC0415 - seldom
        from samestep.launch.stall.stall_report import write_report  # noqa: PLC0415

        node, place = self._node, self._run or self._node.folder
        judges = not self._is_asked()
        if judges:
            self._claim.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self._claim.touch(exist_ok=False)
        stands = inspect_ranks(node.folder, read_pulses(node.folder))
        if all(stand.doing in ("stopped", "gone") for stand in stands):
            hang = False
        else:
            for stand in stands:
                write_report(stand, node.folder, place)
            hang = not judges or self._agree_on_verdict(place, may_be_slow=may_be_slow)
        if judges and (not hang or node.num_nodes == 1):
            self._claim.unlink(missing_ok=True)
        until = time.monotonic() + _VERDICT_S
        while not judges and self._is_asked() and time.monotonic() < until:
            if self._claim.stat().st_size:
                break
            time.sleep(_POLL_EVERY_S)
        if not hang or not (judges or self._is_asked()):
            return False
        living = [pulse.pid for pulse in self._living()]
        if JOB_RUN in os.environ and "TORCHELASTIC_RUN_ID" in os.environ:
            import psutil  # noqa: PLC0415 - seldom

            # The job starts again as a whole. torchrun would restart the ranks of each node as soon
            # as they end, and they do not always find those of the other nodes.
            with contextlib.suppress(psutil.Error):  # they have just ended
                living += {psutil.Process(pid).ppid() for pid in living}
        for pid in reversed(living):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        return True

    def _agree_on_verdict(self, place: Path, *, may_be_slow: bool) -> bool:
        """Wait for what the other nodes tell, and announce who hangs; False if none does."""
        from samestep.launch.stall.stall_report import STAND, read_reports, verdict_on  # noqa: PLC0415 - seldom

        node = self._node
        expected = node.world_size if self._run else node.local_world_size
        until = time.monotonic() + _OTHERS_S
        while (
            len(reports := read_reports(place, self._began)) < expected and time.monotonic() < until
        ):
            time.sleep(_POLL_EVERY_S)
        verdict = verdict_on(reports, expected, may_be_slow=may_be_slow)
        if verdict is not None and verdict.sure and MEMBER in os.environ:
            for pulse in self._living():  # the ranks outlive each other: the others continue
                if pulse.rank == verdict.rank:
                    why = verdict.message.splitlines()[0]
                    (self._node.folder / HUNG.format(rank=pulse.rank)).write_text(why)
                    os.kill(pulse.pid, signal.SIGKILL)
            return False
        if verdict is not None:
            self._announce(verdict, max(report.stand.pulse.steps for report in reports))
            for rank in range(node.world_size):
                (place / STAND.format(rank=rank)).unlink(missing_ok=True)
            write_object(self._claim, verdict.stall, sync=False)
        return verdict is not None

    def _announce(self, verdict: "Stalled", steps: int) -> None:
        """Leave the verdict wherever someone looks for it."""
        reason: dict[str, Any] = {"status": "failed", "reason": f"failed: {verdict.message}"}
        reason |= {"exit_code": STALLED, "steps": steps, "stall": verdict.stall}
        if self._run is not None:
            with contextlib.suppress(UserError):
                file = self._run / "result.json"
                write_object(file, read_object(file) | reason)
        failure = {"rank": verdict.rank, "code": STALLED, "message": verdict.message}
        failure |= {"time": time.time(), "lost_peer": False, "raised": False, "stalled": True}
        if job := os.environ.get(JOB_RUN):
            with contextlib.suppress(UserError):
                write_object(Path(job, FAILURE.format(rank=verdict.rank)), failure)
        elif PARENT in os.environ:
            write_object(self._node.folder / VERDICT, failure | {"run": str(self._run or "")})
        else:
            print_error(verdict.message)


def record_mismatch(folder: Path) -> str:
    """Describe the mismatch of this node's ranks' calls, if some have died in them; else "".

    The verdict on the job gets it as the error of these ranks.
    """
    from samestep.launch.stall.stall_verdict import mismatch  # noqa: PLC0415 - seldom

    verdict = mismatch(read_pulses(folder))
    if verdict is None:
        return ""
    failure = {"code": 1, "message": verdict.sentence, "time": time.time(), "lost_peer": False}
    if job := os.environ.get(JOB_RUN):
        for rank in verdict.does:
            with contextlib.suppress(UserError):
                own = failure | {"rank": rank, "raised": True}
                write_object(Path(job, FAILURE.format(rank=rank)), own)
    return verdict.sentence


def _last_call(pulse: RankPulse) -> str:
    """Return the last call in which ranks meet, and whether the rank is still in it."""
    if pulse.now is None and not pulse.calls:
        return ""
    last = pulse.now or pulse.calls[-1]
    number = f" #{last.seq}" if last.seq else ""
    return f"{'in' if pulse.now else 'after'} {last.kind}{number} of {last.where}"


if __name__ == "__main__":
    main(sys.argv[1:])
