"""Samples from prompts: over all replicas, in one turn or several. Imports no engine."""
