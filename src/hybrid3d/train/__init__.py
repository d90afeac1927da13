"""The training side: everything that touches Megatron-Core."""

import warnings

# At import Megatron-Core warns a dozen times of optional packages that it does without.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
