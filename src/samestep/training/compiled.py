"""Whole steps compiled into one graph."""

from samestep.settings import Settings
from samestep.training.plan import Plan
from samestep.training.step import EagerStep, Trainee
from samestep.world import World


def make_step(trainee: Trainee, settings: Settings, world: World, plan: Plan) -> EagerStep:
    return EagerStep(trainee, settings, world, plan.batch_size)
