# shellcheck shell=bash
# Settings of every start, sourced by slurm.sh and torchrun.sh. What is set already, is kept.
# Wants: ranks_per_node, world_size.

# The interpreter that has hybrid3d: the repository's own environment, where `make setup` has made one.
if [[ -z ${PYTHON:-} ]]; then
    PYTHON=python3
    [[ ! -x .venv/bin/python ]] || PYTHON=.venv/bin/python
fi

# The ranks of a node share its cores; without this each would start a thread for every one of them.
cores=$(nproc)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > ranks_per_node ? cores / ranks_per_node : 1))}

# One hardware queue: kernels run in the order in which they are launched. Megatron overlaps its tensor-parallel
# communication with computation by launching the communication first, and an own queue for each stream undoes that.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}

# NCCL's warnings, with their cause, go to the ranks' logs: "unhandled system error" alone helps nobody.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}

# A collective that hangs leaves what each rank was doing (torch's flight recorder) as runs/<name>/logs/nccl-rank-<n>.
export TORCH_NCCL_DUMP_ON_TIMEOUT=${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}

# NCCL finds InfiniBand and the interface by itself. Where it takes the wrong ones, set NCCL_IB_HCA (mlx5_0,mlx5_1,...)
# and NCCL_SOCKET_IFNAME (eth0): gloo, which has no such search, then takes the same interface.
if [[ ${NCCL_SOCKET_IFNAME:-} =~ ^=?([[:alnum:]._-]+)$ ]]; then
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-${BASH_REMATCH[1]}}
fi

# Left alone on purpose:
# NCCL_PROTO, NCCL_ALGO          NCCL chooses by size and topology; a fixed choice is slower for some of our messages
# NCCL_CUMEM_ENABLE, NCCL_NVLS_ENABLE   neither Megatron-Core 0.16 nor vLLM 0.32 asks for a value; NVLS takes GPU memory
#                                for each communicator: NCCL_NVLS_ENABLE=0 where that is scarce
# TORCH_NCCL_ASYNC_ERROR_HANDLING   torch's default ends a rank whose peer is gone, which is what is wanted
# PYTORCH_CUDA_ALLOC_CONF        expandable segments do not go with the memory pool of vLLM's sleep mode

# A rank keeps sockets to every other: the soft limit on open files may be raised to the hard one.
ulimit -S -n "$(ulimit -H -n)"
