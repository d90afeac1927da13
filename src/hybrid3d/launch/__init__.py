"""Launching a command's ranks: preflight checks, the launcher, the rendezvous, and the task of each rank."""
