"""What a checkpoint holds: all that the next step depends on, as plain tensors and numbers."""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from itertools import zip_longest
from typing import Any

import torch

from samestep.base.errors import UserError, defined_at, listed
from samestep.base.run.checkpoints import FORMAT
from samestep.core.data.keyed_random import mix, seed_rank
from samestep.core.data.order import held_parts
from samestep.core.learner.agreement import check_weights, may_draw, rng_state, set_rng_state
from samestep.core.learner.device import share_of_scale
from samestep.core.learner.model_state import load_model
from samestep.core.learner.optimizer import set_lr
from samestep.core.learner.optimizer_state import load_state, parameters_in, what_groups_keep
from samestep.core.learner.prepare import match_layouts
from samestep.core.plan import learning_rate, warmup_steps
from samestep.core.training.stopping import Watch
from samestep.core.training.work import Learner, Position, State, Sums, Work
from samestep.launch.ranks.mesh import is_sharded, whole


def capture(work: Work, state: State, recipe: str) -> dict[str, Any]:
    """Return a checkpoint's contents. All ranks call it; each adds its own part."""
    position = state.position
    check_alike(work, position.step)
    _check_stepped(work.learner, position.step)
    learner, plan, settings = work.learner, work.plan, work.settings
    scaler, average, virtual = learner.scaler, learner.average, settings.virtual_ranks is not None
    scheduler = learner.scheduler
    share = share_of_scale(work.world.world_size, work.world.virtual_ranks)
    scheduled = {}
    if scheduler is None:
        next_lr = learning_rate(plan, settings, position.step, state.validated)
        set_lr(learner.optimizer, next_lr)  # the steps do not keep it up to date
    else:
        next_lr, scheduled = scheduler.next_lr, {"scheduler": scheduler.state()}
    # The sums of elastic ranks are those of all.
    counts = work.world.is_main or not work.world.elastic
    mine: dict[str, Any] = {
        "rng": rng_state(),
        "loss_sum": state.sums.loss * counts,
        "part_sums": {
            name: part * counts for name, part in zip(learner.parts, state.sums.parts, strict=False)
        },
        "measured": state.measured.state(),
        # Where this rank's part of a stream continues.
        "stream": work.train.marks_at(position.epoch, position.step_in_epoch)
        if plan.is_stream
        else {},
    }
    ranks = work.world.gather(mine)
    follows = "metrics" in plan.schedule_asks or work.after_epoch is not None
    carried = {} if learner.carried is None else {"carried": learner.carried.state()}
    groups = {}
    if learner.made:
        from samestep.core.learner.kept_objects import packed  # noqa: PLC0415 - of one's own

        groups["optimizer"] = packed(learner.optimizer)
        sets = () if scheduler is None else scheduler.sets
        groups["optimizer_groups"] = what_groups_keep(learner.optimizer, learner.made, sets)
    return {
        "format": FORMAT,
        "recipe": recipe,
        "classes": list(work.classes),
        "model": learner.model.state_dict(),
        **({"weights_sha256": weights_sha256(learner.model)} if virtual else {}),
        **({} if average is None else {"ema": average.state()}),
        **carried,
        "optimizer": learner.optimizer.state_dict(),
        **groups,
        "scaler": None if scaler is None else _rescaled(scaler.state_dict(), 1 / share),
        "schedule": {
            "schedule": settings.schedule,
            "warmup_steps": warmup_steps(plan, settings),
            "total_steps": plan.total_steps,
            "next_lr": float(next_lr),
        },
        **scheduled,
        **({"validated": state.validated} if follows else {}),
        **({} if work.after_epoch is None else {"frozen": work.after_epoch.frozen()}),
        "rng": [rank["rng"] for rank in ranks],
        "position": asdict(position),
        "loss_sums": [rank["loss_sum"] for rank in ranks],
        **({"part_sums": [rank["part_sums"] for rank in ranks]} if learner.parts else {}),
        "terms": state.sums.terms,
        "measured": [part for rank in ranks for part in rank["measured"]],
        "watch": asdict(state.watch),
        **({} if state.stops is None else {"stops": asdict(state.stops)}),
        "order": work.order,
        "stream": [rank["stream"] for rank in ranks],
    }


def _check_stepped(learner: Learner, step: int) -> None:
    """Check that the model has no parameters that came later, which the optimizer does not step."""
    stepped = {*map(id, parameters_in(learner.optimizer))}
    named = learner.model.named_parameters()
    if new := [name for name, p in named if p.requires_grad and id(p) not in stepped]:
        raise UserError(
            f"After step {step} the model{defined_at(*learner.makers[:1])} has parameters that no "
            f"optimizer step changes: {listed(new)}. They replaced those it started with, for "
            "example by an assignment in forward.",
            remedy="Create all layers when the model is built, and choose between them in forward.",
        )


def check_alike(work: Work, step: int) -> None:
    """Check that all ranks have the same weights; with virtual ranks, also buffers."""
    if not work.world.connected:
        return
    model = work.learner.model
    # Each rank has a part of its own of what is sharded, so there is nothing to compare.
    named: dict[str, torch.Tensor] = {
        name: p for name, p in model.named_parameters() if not is_sharded(p)
    }
    if work.settings.virtual_ranks is not None:
        named |= dict(model.named_buffers())
    added = "something changes it after the ranks have reduced it, such as a hook"
    draws = may_draw(work.learner.optimizer)
    how: Any = {"draws": draws, "optimizers": [work.learner.optimizer]}
    how["modules"] = {"": model} if work.settings.self_check else {}
    check_weights(named, work.world, step, added, **how)


def check_resumable(work: Work, step: int) -> None:
    """Check that ranks have the same weights, and that a checkpoint would lead back to them."""
    check_alike(work, step)
    subject = f"The recipe's model{defined_at(*work.learner.makers[:1])}"
    work.world.on_every(lambda: work.trial.check(work.learner.model, subject))
    _check_stepped(work.learner, step)


def kept_parts(work: Work) -> tuple[str, ...]:
    """Return the parts of a checkpoint that a restored training keeps as they were read."""
    copies = work.world.device.type != "cpu" or work.learner.sharded
    return () if copies else ("optimizer",)


def _gone_on(watch: Watch, saved: dict[str, Any]) -> Watch:
    """Return what a checkpoint has of a watch; by another measure its best is not the best."""
    earlier = (Watch(**saved[name]) for name in ("watch", "stops") if name in saved)
    return next((w for w in earlier if (w.metric, w.mode) == (watch.metric, watch.mode)), watch)


def restore(work: Work, state: State, recipe: str, saved: dict[str, Any]) -> None:
    """Restore a checkpoint into a new training, on any number of ranks.

    The tensors of `kept_parts` are the training's from now on, so they must not lie in the file.
    """
    check_recipe(saved, recipe)
    check_classes(saved, work.classes)
    order = work.order
    for name in order | saved["order"]:
        before, now = saved["order"].get(name), order.get(name)
        if before != now:
            raise UserError(
                f"The checkpoint was trained with {name} = {before}, now it is {now}: the order of "
                "samples would change within the run. Start a new run instead."
            )
    share = share_of_scale(work.world.world_size, work.world.virtual_ranks)
    _restore_learner(work.learner, saved, share, owned="optimizer" in kept_parts(work))
    if work.after_epoch is not None and "frozen" in saved:
        work.after_epoch.freeze(saved["frozen"])
    state.validated = saved.get("validated", {})
    state.position = Position(**saved["position"])
    work.learner.moment.after(saved["position"])
    if work.train.is_stream:
        marks = {lane: mark for rank in saved["stream"] for lane, mark in rank.items()}
        work.train.start_from(state.position.epoch, state.position.step_in_epoch, marks)
    state.watch = _gone_on(state.watch, saved)
    state.stops = state.stops and _gone_on(state.stops, saved)
    world = work.world
    if len(saved["rng"]) == world.world_size:
        set_rng_state(saved["rng"][world.rank])
        ranks = [world.rank]
    else:
        seed_rank(mix(work.settings.seed, state.position.step), world.rank)
        # Only the sum over the ranks counts, so one of them takes it all.
        ranks = [*range(len(saved["rng"]))] if world.is_main else []
    if world.elastic:
        ranks = [*range(len(saved["rng"]))]
    loss_sum = sum((saved["loss_sums"][rank] for rank in ranks), start=0.0)
    measured = saved.get("measured", [])
    if len(measured) == world.num_parts:
        state.measured.load([[measured[part]] for part in held_parts(world)])
    else:
        state.measured.load([measured] if world.is_main else [])
    by_name, parts = saved.get("part_sums", [{}]), work.learner.parts
    if by_name[0].keys() != {*parts}:  # the recipe has other losses now: the next epoch has all
        parts = ()
    part_sums = tuple(sum((by_name[rank][name] for rank in ranks), start=0.0) for name in parts)
    state.sums = Sums(loss_sum, saved.get("terms", 0.0), part_sums)


def _restore_learner(learner: Learner, saved: dict[str, Any], share: float, *, owned: bool) -> None:
    load_model(learner.model, saved)
    if learner.average is not None:
        learner.average.load(saved.get("ema"))
    if learner.carried is not None:
        learner.carried.load(saved.get("carried"))
    groups = saved.get("optimizer_groups")
    load_state(learner.optimizer, saved["optimizer"], learner.made, groups)
    if learner.scheduler is not None:
        learner.scheduler.load(saved.get("scheduler"))
    match_layouts(learner.optimizer, owned=owned)
    if learner.scaler is not None and saved["scaler"] is not None:
        learner.scaler.load_state_dict(_rescaled(saved["scaler"], share))


def _rescaled(scaler: dict[str, Any], factor: float) -> dict[str, Any]:
    """Return the state of a gradient scaler; a checkpoint has the scale of a single process."""
    return {**scaler, "scale": scaler["scale"] * factor} if "scale" in scaler else scaler


def weights_sha256(model: torch.nn.Module) -> str:
    """Return the SHA-256 of a model's state but its integers: names, types, shapes and bytes.

    Where the model is sharded all ranks call it: one weight at a time is put together.
    """
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
            flat = whole(value).cpu().resolve_conj().contiguous().view(-1)
            digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_recipe(state: dict[str, Any], recipe: str) -> None:
    """Check that a checkpoint is of this recipe."""
    if state["recipe"] != recipe:
        raise UserError(f"The checkpoint is of recipe {state['recipe']!r}, not of {recipe!r}.")


def check_classes(state: dict[str, Any], classes: Sequence[str]) -> None:
    """Check that the data has the checkpoint's classes, in the same order."""
    saved = state.get("classes") or []
    if saved and classes and saved != list(classes):
        differing = [
            f"number {place} is {saved_name!r} there and {other!r} here"
            for place, (saved_name, other) in enumerate(zip_longest(saved, classes))
            if saved_name != other
        ]
        raise UserError(
            f"The checkpoint was trained on other classes than the data has: {differing[0]} "
            f"({len(saved)} there, {len(classes)} here, {len(differing)} of them differ). Name "
            "the folder of the data that it was trained on."
        )


def evaluated_weights(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of the model that a checkpoint's evaluation used: averaged, if it was."""
    model = state["model"]  # in whose types it was: averages are kept in float32 at least
    averages = {n: a.to(model[n].dtype) for n, a in state.get("ema", {}).items() if n in model}
    return {**model, **averages}


def load_evaluated(model: torch.nn.Module, state: dict[str, Any]) -> None:
    """Load the weights that a checkpoint's evaluation used."""
    load_model(model, {**state, "model": evaluated_weights(state)})
