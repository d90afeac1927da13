"""The training side: everything that touches Megatron-Core."""
