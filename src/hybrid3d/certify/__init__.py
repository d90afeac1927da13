"""Certification: whether this pair of engines carries a model's weights bit for bit (`docs/certify.md`)."""
