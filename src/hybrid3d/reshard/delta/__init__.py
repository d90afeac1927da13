"""Sends only the elements that have changed."""
