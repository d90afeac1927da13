"""From a command to ranks that run: checks, the launcher, the rendezvous, and what each rank does."""
