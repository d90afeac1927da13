"""Moves boxes of canonical tensors from where they are held to where they are wanted.

Planning (`box`, `layout`, `planner`, `coverage`) is pure and runs anywhere, for any number of ranks. Execution
(`transport`, `executor`, `files`) needs torch. Nothing here knows an engine.
"""
