"""A run as it goes on: its folder, records, display, live settings, health and recovery. Imports no engine."""
