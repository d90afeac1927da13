"""The reward for programs: a sandbox, and judges of what a program returns."""
