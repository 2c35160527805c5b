"""Is it the same training? A recipe's own model and data, on 1 and on N ranks, for a few steps."""

# Settings that a verification decides by itself, or has no use for.
NO_EFFECT = (
    *("run_dir", "epochs", "max_steps", "engine", "compile", "log_every"),
    *("batch_size_per_rank", "batch_tokens", "micro_batch_size", "accumulate"),
    *("eval_every_epochs", "eval_every_steps", "checkpoint_every_epochs", "monitor", "mode"),
    "timeout_s",
    "stall_s",
    *("checkpoint_every_steps", "checkpoint_every_minutes", "keep_top_k"),
    *("keep_newest", "keep_hours", "patience", "min_delta", "stop_monitor"),
    "halving",
)
