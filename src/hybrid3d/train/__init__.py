"""The training side: everything that touches Megatron-Core."""

import logging
import warnings

# At import Megatron-Core warns a dozen times of optional packages that it does without.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
# Megatron-Core imports it, and it warns on a machine with a CUDA toolkit and no GPU.
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
