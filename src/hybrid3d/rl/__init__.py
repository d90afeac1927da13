"""Implements the RL computations: advantages, losses, KL, batches and data. Imports torch, but neither engine."""
