"""Detects ranks that died, stopped or wait for each other, and says where each of them is."""
