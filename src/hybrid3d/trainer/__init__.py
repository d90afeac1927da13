"""The training loops, and the checkpoints of a run."""
