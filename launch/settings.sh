# shellcheck shell=bash
# Environment variables of every run, sourced by slurm.sh and torchrun.sh. Variables that are set already are kept.
# Requires: ranks_per_node, world_size.

# The interpreter with hybrid3d: that of the repository's environment, if `make setup` has created one.
if [[ -z ${PYTHON:-} ]]; then
    PYTHON=python3
    [[ ! -x .venv/bin/python ]] || PYTHON=.venv/bin/python
fi

# The ranks of a node share its cores; without this, each rank would start a thread per core.
cores=$(nproc)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > ranks_per_node ? cores / ranks_per_node : 1))}

# Write NCCL's warnings, with their cause, to the ranks' logs: "unhandled system error" alone does not help.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}

# If a collective hangs, torch's flight recorder writes what each rank was doing to runs/<name>/logs/nccl-rank-<n>.
export TORCH_NCCL_DUMP_ON_TIMEOUT=${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}

# NCCL finds InfiniBand and the interface by itself. If it uses the wrong ones, set NCCL_IB_HCA (mlx5_0,mlx5_1,...) and
# NCCL_SOCKET_IFNAME (eth0): gloo, which does not search, then uses the same interface.
if [[ ${NCCL_SOCKET_IFNAME:-} =~ ^=?([[:alnum:]._-]+)$ ]]; then
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-${BASH_REMATCH[1]}}
fi

# Not set on purpose:
# CUDA_DEVICE_MAX_CONNECTIONS    hybrid3d chooses it by the recipe (src/hybrid3d/cli/starting.py)
# NCCL_PROTO, NCCL_ALGO          NCCL chooses by size and topology; a fixed choice is slower for some messages
# NCCL_CUMEM_ENABLE, NCCL_NVLS_ENABLE   neither Megatron-Core 0.16 nor vLLM 0.32 needs a value; NVLS takes GPU memory
#                                for each communicator: set NCCL_NVLS_ENABLE=0 if memory is scarce
# TORCH_NCCL_ASYNC_ERROR_HANDLING   torch's default ends a rank that has lost a peer, as intended
# PYTORCH_CUDA_ALLOC_CONF        expandable segments are incompatible with the memory pool of vLLM's sleep mode

# A rank keeps sockets to every other rank, so raise the soft limit on open files to the hard limit.
ulimit -S -n "$(ulimit -H -n)"
