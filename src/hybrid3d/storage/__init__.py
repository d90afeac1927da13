"""Handles files: reading users' files, checkpoint manifests, disk space and file systems."""
