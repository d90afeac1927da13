"""Moves what a plan says: memory, transport, staging, and the verification of every bit."""
