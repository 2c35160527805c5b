"""BatchNorm: each rank normalises over its own share of the batch."""

from samestep.errors import listed
from samestep.training.side_effects import batch_norms
from samestep.verification.evidence import Cause, Check, Evidence, TableRow
from samestep.verification.recipe_under_test import RecipeUnderTest
from samestep.verification.rows.left_free import answer, left_free

NAME = "BatchNorm"
CAUSE = "BatchNorm statistics per rank"


def _look(tested: RecipeUnderTest) -> list[str]:
    return list(batch_norms(tested.free_step.model))


def _answer(evidence: Evidence) -> Check:
    names = evidence.found(NAME, list[str])
    if not names:
        return Check("same", "the model has none")
    cause = Cause(
        CAUSE,
        f"Layer {listed(names, 1)}: each rank normalises over its own share of the batch; frozen, "
        "they make no difference.",
        "GroupNorm needs no batch; --sync-batchnorm works on NVIDIA GPUs; or accept it: --accept "
        'batchnorm, in the recipe accepts=("batchnorm",).',
    )
    compared = f"{len(names)} layers as they are" if len(names) > 1 else "1 layer as it is"
    return answer(evidence, "batchnorm", compared, cause)


ROW = TableRow(
    name=NAME, look=_look, training=left_free("batchnorm"), answer=_answer, with_virtual_ranks=False
)
