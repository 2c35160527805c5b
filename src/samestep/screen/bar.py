"""The progress bar's words: as many as there is room for, each as wide from the first step on.

So the bar beside them keeps its length, whatever the numbers are.
"""

from dataclasses import dataclass, replace

from samestep.run.records import Record
from samestep.screen.words import duration, short

_LEAST_BAR = 12
_SMOOTHING = 0.2
"""How much a new rate counts beside those before it; a single one would let the ETA jump."""


@dataclass(frozen=True, kw_only=True)
class BarState:
    """What the bar tells."""

    plan: Record
    """The `start` record."""
    step: int = 0
    now: int = 1
    """The epoch of the latest record that names one."""
    loss: float | None = None
    metric: str = ""
    """The monitored metric at the latest evaluation, as it is shown."""
    rate: float | None = None
    """Samples per second, smoothed."""
    evaluating: bool = False

    def after(self, record: Record) -> "BarState":
        """Return the state after a `step` or `progress` record."""
        new = max(float(record["samples_per_s"]), 1e-9)
        rate = new if self.rate is None else self.rate + _SMOOTHING * (new - self.rate)
        loss = record.get("loss", self.loss)
        now = record.get("epoch", self.now)
        return replace(self, step=record["step"], now=now, loss=loss, rate=rate, evaluating=False)

    @property
    def epoch(self) -> str:
        """The epoch that the latest step belongs to, and how many there are."""
        epochs, per_epoch = self.plan["epochs"], self.plan["steps_per_epoch"]
        if per_epoch is None:  # of a stream; only its records know
            return f"{self.now}/{epochs}" if epochs else str(self.now)
        now = max(1, -(-self.step // per_epoch))
        return f"{min(now, epochs):>{len(str(epochs))}}/{epochs}"

    def numbers(self, width: int) -> str:
        """Return what stands behind the bar on a terminal of so many columns."""
        total, monitor = self.plan["total_steps"], str(self.plan.get("monitor", "loss"))
        eta, rate, loss = "", "", ""
        if self.rate is not None:
            rate = f"{short(self.rate):>5} samples/s"
        if self.rate is not None and total is not None:
            left = max(0, total - self.step) * self.plan["global_batch_size"]
            eta = f"ETA {duration(round(left / self.rate))}"
        if self.loss is not None:
            loss = f"loss {self.loss:.4f}"
        # In the order in which they stand, with their widths; the least important come first in
        # the order in which they are left out.
        parts = {
            **({} if total is None else {"done": f"{self.step / total:4.0%}"}),
            "steps": f"{self.step:,} steps"
            if total is None
            else f"{self.step:>{len(f'{total:,}')},}/{total:,}",
            "loss": f"{loss:<12}",
            "metric": f"{self.metric:<{len(f'val. {monitor}') + 7}}",
            "rate": f"{rate:<15}",
            "eta": f"{'evaluating' if self.evaluating else eta:<11}",
        }
        room = width - len(f"epoch {self.epoch}") - _LEAST_BAR - 2
        for name in ("metric", "rate", "loss", "eta", "steps"):
            if len("  ".join(parts.values())) > room:
                del parts[name]
        return "  ".join(parts.values())
