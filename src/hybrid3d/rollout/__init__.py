"""The rollout side: everything that touches vLLM."""
