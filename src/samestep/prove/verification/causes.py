"""The causes that `verify` knows: a name, why it is likely here, and what to do about it."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Cause:
    """A likely cause; in the table below, its reason has placeholders."""

    name: str | None = None
    why: str = ""  # what in this recipe is the cause, and how that was found
    advice: str = ""

    def of(self, **facts: object) -> "Cause":
        """Return this cause with the facts that its reason has placeholders for."""
        return replace(self, why=self.why.format(**facts))


NO_CAUSE = Cause()

# Data.
OTHER_ORDER = Cause(
    "order",
    "Processes hold different samples at the same index: data() returns a different order, or "
    "different samples, on each call.",
    "Sort what comes from a folder or a set, and seed each generator in data().",
)
DATA_BY_RANK = Cause(
    "data that depends on the rank",
    "{rank} holds different values from rank 0 at the same index; every rank 0 holds the same "
    "ones: data() or the data set reads the rank.",
    "Let data() return the same in every process: samestep gives each rank its share.",
)
LENGTHS = Cause(
    "lengths that differ per rank",
    "Processes have different numbers of training samples: {lengths}.",
    "Let data() return all samples in every process: samestep shares them out.",
)
UNKEYED = {
    part: Cause("unkeyed augmentation", f"{who} returns different values {{when}}.", advice)
    for part, who, advice in (
        (
            "dataset",
            "The data set",
            (
                "Draw in __getitem__ from torch, random or np.random: samestep seeds those by "
                "(seed, epoch, sample), but not the data set's own generator."
            ),
        ),
        (
            "transform",
            "transform()",
            "Draw in augment() instead, from its keys: samestep.uniform(keys, draws).",
        ),
        ("augment", "augment()", "Draw from the keys it is given: samestep.uniform(keys, draws)."),
    )
}
COLLATE_DRAWS = Cause(
    "draws in collate",
    "collate() draws from {draws} when it builds a batch: on N ranks each builds its own share, "
    "so a sample gets different numbers.",
    "Draw in the data set's __getitem__, where samestep seeds torch, random and np.random by "
    "(seed, epoch, sample). A library's collator, as for masked language modelling, can be called "
    "there with that one sample.",
)

# The loss and the metrics.
OF_BATCH = Cause(
    "the loss is made over the batch",
    "A sample's loss depends on the outputs of the others in its batch, as in a contrastive loss. "
    "On N ranks each sample meets only 1/N of the batch, and even fewer in micro-steps, so the "
    "loss and its gradients differ.",
    'Declare it: Recipe(loss_over="batch"). The loss then gets outputs and targets of the whole '
    "global batch, on any number of ranks.",
)
OF_TERMS = Cause(
    "loss that is not a mean over its loss_terms",
    "The loss of a batch is not the mean of its parts' losses weighted by loss_terms.",
    "Let loss_terms return what the loss divides by: tokens, or a sum of weights. If it "
    "does, a sample's output depends on its batch, for example on how far it is padded.",
)
A_SUM = Cause(
    "loss that is not a mean over samples",
    "The loss of a batch is the sum of its parts' losses: a sum, or divided by a fixed number.",
    'Declare it: Recipe(reduction="sum"). Or return the mean over the samples of the batch.',
)
A_MEAN = Cause(
    "loss that is not a sum over samples",
    'Recipe(reduction="sum") says that the loss is a sum, but a batch\'s loss is the mean of its '
    "parts' losses.",
    "Leave reduction out, or return the sum over the samples.",
)
NOT_A_SUM = Cause(
    A_MEAN.name,
    'Recipe(reduction="sum") says that the loss is a sum, but a batch\'s loss is not the sum of '
    "its parts' losses.",
    "Return the sum over the samples, or leave reduction out and say in Recipe(loss_terms=…) what "
    "the loss is a mean over.",
)
NOT_A_MEAN = Cause(
    A_SUM.name,
    "The loss of a batch is not the mean of its parts' losses weighted by samples: it has weights "
    "(class weights, ignored targets), or is computed over the whole batch.",
    "Say in Recipe(loss_terms=…) what it is a mean over: tokens, targets that are not ignored, "
    "the sum of their weights. If it is computed over the whole batch, as soft Dice is, set "
    'Recipe(loss_over="batch"). Otherwise let each of n samples weigh 1/n.',
)
PADDED = Cause(
    "padding changes the outputs",
    "A sample's output depends on what collate() makes of its batch, mostly on how far it is "
    "padded. A rank's share of a batch is padded by its own longest sample.",
    "Exclude the padding in the model, by a mask or by lengths: in means, in attention, in the "
    "last state of a recurrent network.",
)
UNEVEN_BATCH = Cause(
    "the last uneven batch",
    "The last batch of an epoch has {samples} here: {problem}.",
    "Take the number of samples from the batch (len(inputs)), or use --drop-last.",
)
ONE_SAMPLE = Cause(
    UNEVEN_BATCH.name,
    "It fails: {error}.",
    "Choose sizes that never leave one sample, or --drop-last.",
)
OVER_RANKS = Cause(
    "metric averaged over ranks",
    "{metric} of a rank's samples changes with what other ranks measure: it is averaged over ranks "
    "inside the metric.",
    "Return one value per sample, of only this rank; samestep adds up sums and counts over ranks.",
)
OVER_BATCH = replace(
    OVER_RANKS,
    why="{metric} of a sample depends on the others in its batch, and each rank has another batch.",
    advice="Return one value per sample. In a metric object, update() must treat each sample "
    "independently: pass probabilities rather than test for logits, and keep sums and counts.",
)

# The model.
INITIAL_WEIGHTS = Cause(
    "initial weights that differ per process",
    "{parameter} starts with different values in {rank} and in {first}, though all processes have "
    "the same seed. (DDP copies rank 0's to all ranks; the next start has different ones again.)",
    "Draw initial weights from torch, random or NumPy as they are seeded: not from os.urandom, the "
    "time, the process, or a generator without a fixed seed.",
)
FORWARD_BY_RANK = Cause(
    "forward or loss that depends on the rank",
    "{module} returns different values in {rank} and in {first} ({difference:.0e}), with equal "
    "weights and inputs: it reads the rank, the world size, or other state of its process{lines}.",
    "Do not read the rank in forward or loss.",
)
MIXED = Cause(
    "samples that see each other",
    "{module} returns different values ({difference:.0e}) for a sample when the rest of its batch "
    "changes: it computes over the batch, and each rank has its own.",
    "Compute over a sample's own values (GroupNorm, LayerNorm), or over all ranks.",
)
BUFFERS = Cause(
    "buffers made of a rank's samples",
    "Forward updates {names} from the samples of the batch: they differ per rank, and only rank "
    "0's values are kept.",
    "Update it from the samples of all ranks: torch.distributed.all_reduce() in forward, if "
    "torch.distributed.is_initialized().",
)
WRITTEN = Cause(
    "forward that writes a parameter",
    "Forward sets {names} from the samples of the batch, as ActNorm does in its first one: they "
    "differ per rank, so the ranks' weights diverge.",
    "Set it in model(), from samples that are the same in every process; or compute it from the "
    "samples of all ranks: torch.distributed.all_reduce() in forward, if "
    "torch.distributed.is_initialized().",
)
MOVED_BUFFER = Cause(
    "buffer that every forward moves",
    "Every forward changes {names}, as spectral_norm does: 2 micro-steps change it twice per "
    "step. Without micro-steps the ranks train the same.",
    "Train without --accumulate (a --micro-batch-size as large as a rank's share), or update it "
    "once per optimizer step.",
)
UNUSED = Cause(
    "unused parameters",
    "{loss}, so ranks would wait for a gradient that never comes.",
    "Use them in every step, or freeze them: requires_grad_(False). If some steps skip branches "
    "on purpose, add --find-unused.",
)
BATCHNORM = Cause(
    "BatchNorm statistics per rank",
    "Layer {layers}: each rank normalises over its own share of the batch; frozen, ranks agree.",
    "Use GroupNorm, or --sync-batchnorm on NVIDIA GPUs; or accept it: --accept batchnorm, or "
    'accepts=("batchnorm",) in the recipe.',
)
DROPOUT = Cause(
    "dropout",
    "The model draws from torch{lines}. Each rank draws different numbers for its samples; with "
    "the random draws fixed, the difference disappears.",
    'If this is intended, accept it: --accept dropout, or accepts=("dropout",) in the recipe; or '
    "compare only losses, with --tolerance 0.1. Otherwise train with --virtual-ranks, or set its "
    "probability to 0.",
)

# State that no checkpoint holds.
OUTSIDE_MODULE = Cause(
    "state outside the module",
    "{module} returns different values ({difference:.0e}) in a second forward with equal weights, "
    "buffers and inputs: it keeps a number or a generator that no checkpoint holds.{kept}",
    "Keep it with register_buffer(), so that checkpoints hold it, and change it once per step.",
)
ATTRIBUTE = replace(
    OUTSIDE_MODULE,
    why="Forward or loss changes {names}: a plain attribute, which no checkpoint holds and "
    "which differs per rank.",
)
OWN_GENERATOR = Cause(
    OUTSIDE_MODULE.name,
    "The model or the loss draws from a torch.Generator of its own{lines}, kept from step to "
    "step: no checkpoint holds it, so a resumed run and each rank draw different numbers.",
    "Draw without generator=: torch's own is seeded in every step.",
)
OTHER_GENERATORS = Cause(
    OUTSIDE_MODULE.name,
    "The model or the loss draws from {names}, whose state differs on every rank and after a stop; "
    "with it fixed, the difference disappears.",
    "Draw from torch, which is seeded in every step.",
)
IN_LOSS = Cause(
    "state in the loss",
    "The loss changes ({change:.0e}) when it is called again with equal outputs and targets: it "
    "keeps a number from call to call. No checkpoint holds that, each rank has one, and "
    "evaluations change it too.{kept}",
    "Compute the loss from outputs and targets, and from `step` or `epoch` if it names them among "
    "its arguments. Any other state can be a buffer that the model returns.",
)
CLOCK = Cause(
    "forward or loss that reads the clock",
    "Forward or loss reads {lines}, and returns different values each time.",
    "Compute only from inputs, weights and buffers.",
)
OPTIMIZER = Cause(
    "state outside the optimizer's own",
    "Each step changes {names}, and no checkpoint holds it: a resumed run starts without it.",
    "Keep it in self.state[parameter], which checkpoints hold.",
)
DRAWS = Cause(
    "the optimizer draws",
    "The optimizer's step draws from {names}: ranks and resumed runs may draw different numbers.",
    "Draw from torch's own generator in step(): samestep seeds it alike on all ranks.",
)
OPTIMIZER_ROUNDS = Cause(
    "the optimizer's own rounding",
    "The optimizer computes in {kind}: a gradient that is off by {unit:.0e} gives {what} that are "
    "off by {moved:.0e}, in one process too. So everything after the first update is compared up "
    "to {allowed:.0e}; the loss and the gradient of step 1 are compared exactly.",
    "For a sharper comparison, let the optimizer compute in the type of the weights.",
)
LEARNED = Cause(
    "a learned parameter outside the model",
    "The loss depends on {names}, which is not among the model's parameters: its gradient is not "
    "added up over ranks, and no checkpoint holds it.",
    "Make it an nn.Parameter of the model, so that the optimizer gets it; the model may return it "
    "with its outputs for the loss.",
)

# A loop of the user's own.
NOT_ADDED_UP = Cause(
    "gradients that are not added up",
    "In step {step} the optimizer steps on gradients that differ between the ranks, first in "
    "{parameter}: each rank has those of its own samples. {backward}.",
    "Call run.backward(loss, model), not loss.backward(), and name all that the optimizer steps.",
)
RANKS_AVERAGED = Cause(
    "mean of the ranks' means",
    "All ranks have the same gradients, but not those of one process, and run.backward was never "
    "called: an average over ranks gives the samples of a smaller share more weight.",
    "Call run.backward(loss, model), which weighs each share by its samples; or multiply the loss "
    "by batch.weight * run.world_size before the average.",
)
BY_NUM_RANKS = Cause(
    "loss that is divided by the number of ranks",
    "Each rank's loss counts {factor:.3g} times in the sum that one process has: run.backward "
    "already weights each share by its samples.",
    "Pass run.backward the mean over the samples of batch.data, without a factor for the ranks.",
)
SCALED = Cause(
    "loss that is scaled by the ranks",
    "The gradient of the batch is the sum of its shares' gradients with factors that do not add "
    "up to one: {shares}. The loss is multiplied by a number that depends on the number of ranks, "
    "such as a count that grows with a rank's samples.",
    "Count what is the same on any number of ranks: batch.step, or samples of the global batch.",
)
OPTIMIZER_SETTINGS = Cause(
    "optimizer settings that depend on the ranks",
    "In step {step} the optimizer's {name} is {one:g} in one process and {other:g} in {rank}: it "
    "follows the rank, or a count that grows with a rank's samples or with the number of ranks.",
    "Set it from what is the same on any number of ranks: batch.step, or the global batch.",
)
BATCH_BY_RANKS = Cause(
    "batch that depends on the number of ranks",
    "The global batch has {sizes}.",
    "global_batch_size counts the samples of all ranks: run.batches shares them out.",
)

DRAWN_IN_VALIDATION = Cause(
    "draws in the validation",
    "The model or the loop draws from torch in the validation{lines}: each rank draws different "
    "numbers for its samples.",
    "Call model.eval() before it, and model.train() after.",
)

# Output.
ALL_WRITE = Cause(
    "every rank writes",
    "{line} writes {files} on every rank at the same time.",
    "A recipe's code runs on every rank: write the file before training, or put the rank in its "
    'name: os.environ.get("RANK", "0").',
)
ALL_PRINT = Cause(
    "every rank prints",
    "{line} prints {text!r} on every rank; samestep shows rank 0's, the others are in rank-N.log.",
)
UNKNOWN = Cause(
    "unknown",
    "None of the known causes was found. What differs first: {first}.",
    "Look for what depends on the rank, on how many samples a rank holds, or on what ran before.",
)
