"""RL post-training with Megatron-Core and vLLM: weights move between their layouts by one checked plan."""

__version__ = "0.1.0"
