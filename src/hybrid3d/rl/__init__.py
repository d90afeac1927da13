"""The RL arithmetic: advantages, losses, KL, rewards, data and batches. Needs torch, and no engine."""
