"""What a group of ranks does: train, generate, or both; and the sync of weights between the two."""
