"""What a page shows of a run above its curves: header, settings, environment, commands."""

import shlex
from dataclasses import fields
from pathlib import Path

from samestep.base.run.code_copy import kept_code
from samestep.base.run.records import metric_values
from samestep.base.run.user_modules import kept_modules
from samestep.base.settings import Settings, flag_name
from samestep.base.table import Table
from samestep.base.words import as_typed, count, duration, flatten, number, short, shortened, size
from samestep.show.reporting.curves import Throughput, throughput
from samestep.show.reporting.run_data import RunData

Pairs = tuple[tuple[str, str], ...]
_LONGEST = 160
"""Characters of a value; a list of thousands of names is not a setting to read."""


def header(run: RunData) -> Pairs:
    """Return the facts that a reader looks for first."""
    plan, speed, most = run.plan, throughput(run), run.result.get("peak_memory_bytes")
    versions = [n for n in ("samestep", "python", "torch", "cuda") if n in run.facts]
    facts = {
        "trained": _trained(run),
        "left": _time_left(run),
        "best": _best(run),
        "test": _test(run),
        "duration": _duration(run),
        "ranks": _ranks_and_device(run),
        "throughput": _speed(speed) if speed else "",
        "parameters": f"{plan['parameters']:,}" if isinstance(plan.get("parameters"), int) else "",
        "memory": f"{size(most)} at most, on rank 0" if isinstance(most, int) else "",
        "precision": str(plan.get("precision", "")),
        "versions": ", ".join(f"{name} {run.facts[name]}" for name in versions),
        "code": _code(run),
    }
    return tuple((name, value) for name, value in facts.items() if value)


def _speed(speed: Throughput) -> str:
    rates = [f"{short(speed.samples_per_s)} samples/s over {speed.basis}"]
    rates += [] if speed.flops_per_s is None else [f"{short(speed.flops_per_s)} FLOP/s"]
    rates += [] if speed.mfu is None else [f"{speed.mfu:.1%} MFU"]
    return ", ".join(rates)


def last_step(run: RunData) -> int:
    """Return the last step that a record tells of."""
    steps = (r["step"] for r in reversed(run.records) if isinstance(r.get("step"), int))
    return next(steps, 0)


def _trained(run: RunData) -> str:
    steps, total = last_step(run), run.plan.get("total_steps")
    of = f" of {total:,}" if isinstance(total, int) and total > steps else ""
    epochs = len({r["epoch"] for r in run.of("epoch")})
    return f"{count(epochs, 'epoch')}, {steps:,}{of} steps"


def _time_left(run: RunData) -> str:
    """Return the time that a run has left, by its latest steps."""
    total, steps = run.plan.get("total_steps"), run.of("step")[-20:]
    if run.status != "running" or not isinstance(total, int) or len(steps) < 2:
        return ""
    took, done = (steps[-1][name] - steps[0][name] for name in ("seconds", "step"))
    if took <= 0 or done <= 0:
        return ""
    left = max(0, total - last_step(run))
    return f"{duration(round(left * took / done))} of training at the latest speed"


def _best(run: RunData) -> str:
    best = run.best
    if best.get("value") is None:
        return ""
    epoch = f", epoch {best['epoch']}" if best.get("epoch") is not None else ""
    return f"{best.get('metric', 'metric')} {number(best['value'])} on validation{epoch}"


def _test(run: RunData) -> str:
    test = run.result.get("test")
    if not isinstance(test, dict):
        test = (run.of("evaluation", "test") or [{}])[-1]
    values = list(metric_values(test).items())[:4]
    scores = ", ".join(f"{name} {number(value)}" for name, value in values)
    of = f" ({count(test['samples'], 'sample')})" if isinstance(test.get("samples"), int) else ""
    return scores + of if scores else ""


def _duration(run: RunData) -> str:
    seconds = run.result.get("training_seconds")
    if not isinstance(seconds, int | float):
        seconds = next((r["seconds"] for r in reversed(run.of("step"))), None)
    return f"{duration(seconds)} of training" if seconds is not None else ""


def _ranks_and_device(run: RunData) -> str:
    plan = run.plan
    if not plan:
        return ""
    nodes = plan.get("num_nodes")
    on = f" on {nodes} nodes" if isinstance(nodes, int) and nodes > 1 else ""
    batch = f", {count(plan['global_batch_size'], 'sample')} per step"
    if tokens := plan.get("batch_tokens"):
        batch = f", {count(tokens, 'token')} per step"
    return f"{count(plan['world_size'], 'rank')}{on}, {plan.get('device', 'device unknown')}{batch}"


def _code(run: RunData) -> str:
    """Return a phrase on the code: the run directory has a copy of a recipe's or script's file."""
    places = []
    if copy := kept_code(run.path):
        places.append(f"code/ in the run directory ({copy.get('files', '?')} files)")
    elif recipe_file := run.facts.get("recipe.py"):
        places.append(f"recipe.py in the run directory, {recipe_file}")
        if modules := kept_modules(run.path):
            places.append(f"{count(len(modules.files), 'module')} that it imports in code/")
    elif (run.path / "script.py").is_file():
        places.append("script.py in the run directory")
    if commit := run.environment.get("git_commit"):
        changes = " and changes" if copy.get("changed") else ""
        places.append(f"git commit {str(commit)[:10]}{changes}")
    return ", ".join(places)


def settings_tables(run: RunData) -> tuple[Table, ...]:
    """Return the settings that say what is special about the run, then the others.

    Special is what was given on the command line, and what is not samestep's default: the recipe's
    own defaults are among it.
    """
    usual = {field.name: field.default for field in fields(Settings)}
    own = _is_own(_command(run))
    typed = {word.partition("=")[0] for word in _command(run) if word.startswith("--")}
    special, others = "Settings that are not samestep's defaults", "Other settings, and options"
    rows: dict[str, list[tuple[str, ...]]] = {special: [], others: []}
    for name, value in (run.settings or {}).items():
        table, why = others, "" if name in usual else "option of the recipe"
        if own:
            table, why = special, "of the loop"
        elif f"--{flag_name(name)}" in typed:
            table, why = special, "given on the command line"
        elif name in usual and value != usual[name]:
            table, why = special, "of the recipe, or derived"
        rows[table].append((name, shortened(as_typed(value), _LONGEST), why))
    head = ("setting", "value", "")
    return tuple(Table(title=title, columns=head, rows=of) for title, of in rows.items() if of)


def environment_table(run: RunData) -> Table | None:
    """Return a table of environment.json, or None if it is empty."""
    rows = [
        (name, shortened(as_typed(value), _LONGEST))
        for name, value in flatten(run.environment, by=".").items()
        if value not in (None, "", [])
    ]
    return Table(title="Environment", columns=("", ""), rows=rows) if rows else None


def _command(run: RunData) -> list[str]:
    words = run.environment.get("command")
    return [str(word) for word in words] if isinstance(words, list) else []


def _is_own(words: list[str]) -> bool:
    """Whether the run is of a loop of the user's own."""
    return bool(words) and Path(words[0]).stem not in ("samestep", "__main__")


def _anew(words: list[str], run: Path) -> list[str]:
    """Return the words of a command without what makes it continue in the run's own directory."""
    trains = words[:1] == ["train"]  # its target may be a run: a new one begins with its settings
    again, rest = words[: 2 * trains], iter(words[2 * trains :])
    for word in rest:
        name, equals, _ = word.partition("=")
        if trains and name.replace("_", "-") in ("--run-dir", "--allow-change"):
            if not equals:
                next(rest, None)
        elif name not in ("--resume", "--recipe-of-run"):
            again.append(f"{word.rstrip('/')}-again" if Path(word).name == run.name else word)
    return again


def commands(run: RunData) -> Pairs:
    """Return the commands to repeat the run, to continue it, and to look further."""
    words = _command(run)
    path = shlex.quote(str(run.path))
    own = _is_own(words)
    rows = []
    if words:
        program = ["python", words[0]] if own else ["samestep"]
        rows.append(("repeat it", shlex.join([*program, *_anew(words[1:], run.path)])))
    if not own:
        rows += [
            ("train again with its settings", f"samestep train {path}"),
            ("continue it", f"samestep train {path} --resume"),
            ("evaluate it", f"samestep evaluate {path} --checkpoint best"),
        ]
    return (*rows, ("compare it", f"samestep compare {path} runs/OTHER"))


def baselines_table(run: RunData) -> Table | None:
    """Return a table of the baselines' and the model's scores on the test set."""
    rows, test = run.result.get("baselines"), run.result.get("test")
    if not isinstance(rows, dict):
        rows = (run.of("baselines") or [{}])[-1].get("values")
    if not isinstance(rows, dict) or not rows:
        return None
    baselines = {name: row for name, row in rows.items() if isinstance(row, dict)}
    names = list(dict.fromkeys(metric for row in baselines.values() for metric in row))
    model = [("the model", test)] if isinstance(test, dict) else []
    return Table(
        title="The model and the baselines on the test set",
        columns=("", *names),
        rows=[
            (name, *(number(row.get(m)) for m in names))
            for name, row in (*model, *baselines.items())
        ],
        marked=frozenset({0} if model else ()),
    )
