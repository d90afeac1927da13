"""Records of steps, and the comparison of a step with its repetition."""
