"""Megatron-Core behind the trainer: the only package that imports it."""
