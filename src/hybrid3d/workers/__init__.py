"""The roles on different ranks: some train, the others generate.

Every rank makes all calls of the loop. Ranks of the role that a call is for do the work, and the others receive what
they need of its result.
"""
