"""Where a user's own loop is, and what it has there: a call elsewhere ends with a message."""

from dataclasses import dataclass, field
from typing import NoReturn

from samestep.base.errors import UserError
from samestep.core.loops.loop_data import OwnBatch
from samestep.launch.ranks import process_group
from samestep.launch.ranks.process import report

BEFORE_EPOCHS = "before the epochs"
BEFORE_BATCHES = "before the batches of an epoch"
IN_BATCHES = "between the batches of an epoch"
AFTER_BATCHES = "after the batches of an epoch"
AFTER_EPOCHS = "after the epochs"


@dataclass
class LoopState:
    """What the script of a run has reached, on this rank."""

    is_open: bool = False
    """Whether the script is within its `with`."""
    place: str = BEFORE_EPOCHS
    """Where it is; a phrase for messages."""
    batch: OwnBatch | None = None
    """The batch that it has now, in training or validation."""
    used: bool = False
    """Whether it has done anything with that batch."""
    backwards: int = 0
    """How often it has called `run.backward` in the running step."""
    means: dict[str, float] = field(default_factory=dict)
    """What `run.means` has."""

    def refuse_closed(self) -> NoReturn:
        """End the script with a message: this mistake needs no traceback."""
        error = UserError(
            "The run was used outside of `with samestep.open_run(…) as run:`.",
            remedy="Put the whole training inside the `with` block.",
        )
        process_group.end_reported(report(error))

    def check_place(self, what: str, *places: str) -> None:
        """Refuse a call that belongs elsewhere."""
        if not self.is_open:
            self.refuse_closed()
        if self.place not in places:
            held = (
                " If tqdm or the like holds the iterator, close it after a break: batches = "
                "run.batches(…), then batches.close()."
            )
            raise UserError(
                f"{what} was reached {self.place}; it belongs {' or '.join(places)}: for epoch in "
                "run.epochs(…), and within it, once, for batch in run.batches(…)."
                + (held if self.place == IN_BATCHES else "")
            )

    def use_batch(self, what: str, *, trains: bool = False) -> OwnBatch:
        """Return the batch that the script has; `trains` refuses one of a validation."""
        if not self.is_open:
            self.refuse_closed()
        if self.batch is None or (trains and self.place != IN_BATCHES):
            raise UserError(
                f"{what} was called {self.place}; it belongs to a batch: call it in the loop over "
                "run.batches."
            )
        self.used = True
        return self.batch
