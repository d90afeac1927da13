"""The roles on different ranks: some train, the others generate or compute rewards for them."""
