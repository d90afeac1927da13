"""The roles of ranks: training, generation, or both, and the sync of weights between them."""
