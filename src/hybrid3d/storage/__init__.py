"""Files: those that a user gave, what a checkpoint consists of, disks and mounts."""
