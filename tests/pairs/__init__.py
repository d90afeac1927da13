"""Proves pairs of engines: `make engines` (`docs/engines.md`)."""
