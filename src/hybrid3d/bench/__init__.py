"""`hybrid3d bench`: times the sync, a gather on every rank, and plain sends of the same bytes."""
