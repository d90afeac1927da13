"""Training: the only package that imports Megatron-Core."""

import logging
import warnings

# On import Megatron-Core warns a dozen times about missing optional packages.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
# Megatron-Core imports this module, which warns on a machine with a CUDA toolkit but no GPU.
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
