"""The audit of what runs on CUDA: the CUDA builds of the dependencies, queried and run on a machine without a GPU."""
