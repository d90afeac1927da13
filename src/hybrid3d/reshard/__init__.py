"""Moves boxes of canonical tensors from where they are held to where they are wanted.

Planning (`box`, `layout`, `planner`, `bound`) is pure Python and runs anywhere, for any number of ranks. Execution
(`transport`, `executor`, `files`) needs torch. Nothing here knows an engine.
"""
