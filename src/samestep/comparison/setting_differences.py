"""What differs in the settings of some runs, and where they ran."""

from collections.abc import Sequence
from dataclasses import dataclass

from samestep.comparison.run_data import RunData
from samestep.settings import Settings, free_names

# Derived, or of where and how fast: the training is the same without them.
_SAME_TRAINING = free_names(Settings) | {
    *("engine", "world_size", "num_nodes", "host", "cores_usable"),
    *("samestep", "python", "torch", "cuda", "sync_batchnorm", "monitor", "mode", "precision"),
}
_FREE_OPTIONS = frozenset(
    {"data_dir", "download", "cache", "max_corrupt", "cache_dir", "skip_bad", "trees"}
)
"""Of built-in recipes, for runs that do not say which of their options train nothing else."""
_LENGTH = frozenset({"epochs", "max_steps"})
# The plan has these as the settings do. Of the same name, but something else, are `num_samples` (an
# option of spiral) and `device` (what was asked for).
_SIZES = ("batch_size", "micro_batch_size", "accumulate")
UNKNOWN, UNSET = "?", "–"


@dataclass(frozen=True, kw_only=True)
class SettingDifference:
    """One setting, or fact, that is not the same in all runs."""

    name: str
    values: tuple[str, ...]
    """One a run: `?` where the run does not tell, `–` where it is not set."""
    decides: bool
    """Whether it makes another training of it."""


def differences(runs: Sequence[RunData]) -> list[SettingDifference]:
    """Return what differs: settings first, then where the runs ran; each in its usual order."""
    settings = dict.fromkeys(name for run in runs for name in run.settings or {})
    facts = dict.fromkeys(name for run in runs for name in run.facts if name not in settings)
    same = _SAME_TRAINING.union(*(run.plan.get("free_options", _FREE_OPTIONS) for run in runs))
    if any(map(_follows_length, runs)):
        same -= _LENGTH
    found = []
    for name in (*settings, *facts):
        values = tuple(_value(run, name, is_fact=name in facts) for run in runs)
        if len({value for value in values if value != UNKNOWN}) > 1:
            decides = name not in same
            found.append(SettingDifference(name=name, values=values, decides=decides))
    return found


def _follows_length(run: RunData) -> bool:
    """Whether the learning rate of a step depends on how many there are."""
    cosine = (run.settings or {}).get("schedule") == "cosine"
    return cosine or bool(run.plan.get("own_schedule"))


def _value(run: RunData, name: str, *, is_fact: bool) -> str:
    if run.settings is not None and name in run.settings:
        return _shown(run.settings[name])
    if name in run.facts and (is_fact or (run.settings is None and name in _SIZES)):
        return _shown(run.facts[name])
    return UNKNOWN if is_fact or run.settings is None else UNSET


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        return " ".join(map(_shown, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
