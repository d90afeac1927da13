"""What hybrid3d uses of Megatron-Core and vLLM, compared with their sources; imports neither (`docs/certify.md`)."""
