"""Measurements written by hand: every number is known."""

from samestep.prove.profiling.scaling_study import MeasuredSetup, Measurement, Segment, Setup


def measured(
    mode="weak", *, ranks=1, batch=32, ms=(1.0,), rounds=3, segments=4, steps=100, **phases
):
    """Return a setup whose step took `ms[round]` milliseconds, shared out among the phases."""
    setup = Setup(mode=mode, ranks=ranks, global_batch_size=batch, micro_batch_size=batch // ranks)
    found = []
    for number in range(rounds):
        step = ms[number % len(ms)]
        parts = {**phases, "forward": step - sum(phases.values())}
        spent = {name: part * steps / 1000 for name, part in parts.items()}
        one = Segment(steps=steps, samples=steps * batch, phases=spent)
        found.append(measurement([one] * segments))
    return MeasuredSetup(setup=setup, rounds=found)


def measurement(segments, **more):
    return Measurement(
        segments=segments,
        **{"device": "cpu", "threads": 1, "cores": 8, "num_samples": 1000, **more},
    )
