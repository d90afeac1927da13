"""Reads and checks the models and data of a run, and prepares the export of checkpoints."""
