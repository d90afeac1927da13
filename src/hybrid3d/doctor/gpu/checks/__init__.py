"""The checks by subject. Only the process of a check imports its file."""
