"""The benchmark of the sync: against the way of other trainers, and against the wire."""
