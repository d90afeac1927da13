"""The report of one run, or of two side by side: a page made from what the runs' folders hold. Imports no torch."""
