"""`hybrid3d doctor --gpu`: small checks of what this machine and its packages do, each in a process of its own.

`table.py` lists the checks for a GPU, `runner.py` runs them with time limits, `checks/` has one file for each subject.
The runner imports neither torch nor an engine: what is installed is found out by `machine.py` in another process, and
each check imports what it needs in its own.
"""
