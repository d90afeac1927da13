"""State of a run: its folder, records, display, live settings, health and recovery. Imports no engine."""
