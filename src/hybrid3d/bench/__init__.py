"""`hybrid3d bench`: times the sync, the method of other trainers, and plain sends of the same bytes."""
