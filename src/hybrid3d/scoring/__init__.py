"""Implements rewards, environments, and the processes they run in. Imports neither engine nor torch."""
