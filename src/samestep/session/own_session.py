"""The state, records and checkpoints of a run whose loop the user writes."""

import contextlib
import math
import sys
import time
from pathlib import Path
from signal import Signals
from typing import Any

import tomli_w
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from samestep import dist
from samestep.errors import UserError, listed
from samestep.ranks.process import RankLog
from samestep.run.directory import is_run
from samestep.run.files import write_text
from samestep.run.records import Record
from samestep.session import own_state
from samestep.session.means import Means
from samestep.session.own_options import Options
from samestep.session.own_state import OwnState
from samestep.session.recipe_changes import script_changes
from samestep.session.resuming import load_newest
from samestep.session.session import (
    Session,
    Stopped,
    environment,
    resume_record,
    run_result,
    say,
    start_record,
)
from samestep.settings import Settings, free_names
from samestep.training.alike import check_weights, seed_alike
from samestep.training.meter import Clock
from samestep.training.stopping import Agreement, catch_signals

_SCRIPT_COPY = "script.py"
"""The script as it was when the run began, in the run's directory."""


class OwnSession:
    """What is open within the `with` of `open_run`, on this rank."""

    def __init__(self, options: Options, log: RankLog) -> None:
        """Join the other ranks, open the run directory, seed all alike, catch stop signals."""
        options.check()
        if dist.current_world().connected:
            raise UserError(
                "open_run joins the ranks by itself.", remedy="Leave setup_distributed() out."
            )
        dist.setup_distributed(options.device, options.backend, options.timeout_s)
        self.options, self.world = options, dist.current_world()
        self.session = Session(self.world.on_main(options.choose_path), self.world, log.move_to)
        self.path = self.session.path
        if options.resume and options.is_unnamed:
            say(self.world, f"{self.path} is a new run: to go on with it, name it in open_run.")
        self.state = OwnState(program=options.name, settings=options.settings)
        self.means = Means(self.world)
        """Of the running epoch."""
        self.clock = Clock(self.state.position)
        self.trained: dict[str, Tensor] = {}
        """The weights of the modules in `state`, and what else `run.backward` was given."""
        self.left = ""
        """How the script has left its epochs early, for a record."""
        self._resumed: tuple[str, list[str]] | None = None
        self._saved_at: tuple[int, int] | None = None
        """Epochs and steps of the newest checkpoint."""
        self._signals = catch_signals()
        self.received = self._signals.__enter__()
        self.agreement = Agreement(self.world, self.received)
        # Autocast keeps casts of the weights until its outermost context ends, and that may be
        # around the whole loop: forget them whenever the weights have changed.
        self._hook = register_optimizer_step_post_hook(lambda *_: torch.clear_autocast_cache())
        seed_alike(options.seed)

    def track(self, state: Any) -> None:
        """Take the state that checkpoints hold; restore it if the run is resumed."""
        world, own = self.world, self.state
        world.on_every(lambda: own_state.check_state(state))
        own.state = dict(state)
        own_state.share_weights(own.state, world)
        modules = [(n, one) for n, one in own.state.items() if isinstance(one, nn.Module)]
        self.trained = {f"{n}.{of}": p for n, m in modules for of, p in m.named_parameters()}
        resumes = self.options.resume and world.on_main(lambda: is_run(self.path))
        if resumes and (found := load_newest(self.path, world)):
            free = free_names(Settings).union(self.options.may_change)
            world.on_every(lambda: own_state.restore(own, found.content, self.path, free))
            self.means.sums = own_state.sums_of(found.content["sums"], world)
            self._resumed = found.entry.path, found.problems
            self._saved_at = own.position.epoch, own.position.step
        self.agreement.start(own.position.step)

    def begin(self, order: dict[str, Any], sizes: Record) -> None:
        """Write the first records of the run, once its data is known."""
        world, own, session = self.world, self.state, self.session
        position = own.position
        may_be_new, within = session.begun or position.epoch == 1, position.step_in_epoch > 0
        own_state.check_order(own.order, order, self.path, may_be_new=may_be_new, within=within)
        own.order = order
        if session.begun:
            return
        if session.run is not None:
            self._describe(sizes)
        resume = None
        if self._resumed is not None:
            checkpoint, problems = self._resumed
            if changed := listed(script_changes(self.path / _SCRIPT_COPY, Path(sys.argv[0])), 5):
                problems.append(f"{sys.argv[0]} has changed since the run began: {changed}.")
            goes_on = f"{self.path} goes on after step {position.step}, from {checkpoint}."
            say(world, " ".join([goes_on, *problems]))
            resume = resume_record(world, position.step, checkpoint, problems)
        parameters = own.parameters()
        start = start_record(
            world,
            recipe=own.program,
            run_dir=self.path,
            parameters=parameters,
            world_size=world.world_size,
            **sizes,
            precision=_precision(parameters),
            lower_is_better=["loss"],
            resumed=resume is not None,
        )
        session.begin(start, resume, position.step, None)

    def _describe(self, sizes: Record) -> None:
        """Write settings, environment and a copy of the script into the run."""
        run, own = self.session.run, self.state
        assert run is not None
        table = {name: sizes[name] for name in ("epochs", "global_batch_size")}
        table |= {"seed": own.order["seed"], "options": dict(own.settings)}
        write_text(run.path / "settings.toml", tomli_w.dumps(table))
        kept, script = run.path / _SCRIPT_COPY, Path(sys.argv[0])
        if script.suffix == ".py" and not kept.exists():
            with contextlib.suppress(OSError, UnicodeDecodeError):
                write_text(kept, script.read_text(encoding="utf-8"))
        run.write_environment(environment(self.world))

    def record(self, values: dict[str, float]) -> None:
        """Record what was logged of a step; without a loss as a `metrics` record."""
        if not values:
            return
        self.check_loss(values)
        position = self.state.position
        where = {"step": position.step, "epoch": position.epoch + 1}
        if "loss" in values:
            rate = {"samples": position.samples, **self.clock.rate(position)}
            self.session.emit({"event": "step", **where, **values, **rate})
            self.clock.mark(position)
        else:
            now = {"time": time.time(), "values": values}
            self.session.emit({"event": "metrics", **where, **now})

    def check_loss(self, means: dict[str, float]) -> None:
        """Refuse to go on with a loss that is NaN or infinite."""
        if not math.isfinite(means.get("loss", 0.0)):
            raise UserError(
                f"The loss is NaN or infinite at step {self.state.position.step} or before. "
                "The run has ended; earlier checkpoints are kept. Try a smaller learning rate, or "
                "clip the gradients. What may be infinite can be logged by another name than loss.",
                on_all_ranks=True,
            )

    def check_weights(self) -> None:
        """Check that all ranks have the same weights."""
        step, added = self.state.position.step, "add it up by run.backward, not loss.backward()"
        check_weights(self.trained, self.world, step, added)

    def save(self) -> None:
        """Save where the run stands, if it is not saved yet; all ranks call it."""
        own, started = self.state, time.perf_counter()
        position, keep = own.position, self.options.keep_newest
        if not self.session.begun or self._saved_at == (position.epoch, position.step):
            return
        self.means.read()  # values that wait on the device belong to the sums
        self.check_weights()
        sums = self.world.gather(self.means.sums)
        record = self.world.on_main(
            lambda: self.session.save(
                own_state.content_of(own, sums),
                position,
                metric=own.metric,
                watch=own.watch,
                keep_top_k=keep and 1,
                keep_newest=keep or 0,
            )
        )
        self.session.emit({**record, "seconds": time.perf_counter() - started})
        self._saved_at = position.epoch, position.step

    def stop_on(self, signum: int) -> None:
        """Save and stop if all ranks have agreed on a signal."""
        if signum:
            self.save()
            raise Stopped(signum)

    def end(self, error: BaseException | None) -> None:
        """Write how the run ended."""
        run, own = self.session.run, self.state
        if run is None or not self.session.begun:
            return
        status, reason, step = "completed", "finished", own.position.step
        if isinstance(error, Stopped):
            status, reason = "stopped", Signals(error.signum).name
            text = f"Stopped by {reason} after step {step}; {self.path} goes on from there"
            say(self.world, f"{text} with resume=True.")
        elif error is not None:
            status, reason = "failed", f"failed: {error or type(error).__name__}"
        elif own.finished is not None:
            reason = own.finished["reason"]
        elif self.left:
            reason = self.left
            more = "With resume=True it goes on from there; run.finish() ends it for good."
            say(self.world, f"The run was {reason}. {more}")
        self.session.emit({"event": "stop", "step": step, "reason": reason})
        how = {"recipe": own.program, "status": status, "reason": reason}
        total = own.order.get("global_batch_size")
        run.write_result(run_result(self.world, own.position, **how, global_batch_size=total))

    def close(self, error: BaseException | None) -> None:
        """Stop catching signals, and let another process open the run."""
        self._hook.remove()
        if error is None or isinstance(error, Stopped):
            self._signals.__exit__(None, None, None)
        else:  # a signal that no training could act on is kept for who reports the failure
            self._signals.__exit__(type(error), error, error.__traceback__)
        self.session.close()


def _precision(parameters: list[Tensor]) -> str:
    """Return the least precise type of the weights, by which `compare` knows their rounding."""
    kinds = {p.dtype for p in parameters}
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        if dtype in kinds:
            return name
    return "fp64" if kinds == {torch.float64} else "fp32"
