"""Rollout: the only package that imports vLLM."""
