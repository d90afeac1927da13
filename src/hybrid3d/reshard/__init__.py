"""Resharding: move boxes of canonical tensors from the ranks that hold them to the ranks that want them.

Planning (`box`, `layout`, `planner`, `coverage`) is pure and needs no ranks. Execution (`transport`, `executor`,
`files`) needs torch. This package imports neither Megatron nor vLLM.
"""
