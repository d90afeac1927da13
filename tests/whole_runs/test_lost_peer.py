"""Which error of a rank is that of a lost peer, and which is its own: only the latter is reported as the cause."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from hybrid3d.launch.rank import _is_lost_peer

# As ProcessGroupNCCL and gloo of torch 2.13 write them
LOST = [
    RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711"),
    dist.DistNetworkError("The client socket has failed to connect to any network address of (node-1, 29500)."),
    dist.DistStoreError("wait timeout after 600000ms, keys: /default/1"),
    dist.DistBackendError(
        "NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited or there was a network error, NCCL version 2\n"
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely."
    ),
    dist.DistBackendError("NCCL communicator was aborted on rank 3."),
    RuntimeError("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=8, OpType=ALLREDUCE) ran for 600 s"),
]
OWN = [
    dist.DistBackendError(
        "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error, NCCL version 2.28\n"
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
    ),
    dist.DistBackendError(
        "NCCL communicator was aborted on rank 1. Original reason for failure was: NCCL error: unhandled cuda error, "
        "NCCL version 2.28\nLast error:\nCuda failure 2 'out of memory'"
    ),
    dist.DistBackendError("ncclInvalidUsage: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 17000"),
    dist.DistBackendError("ncclSystemError: Error while creating shared memory segment: No space left on device"),
    ValueError("NCCL_SOCKET_IFNAME names no interface"),
]


@pytest.mark.parametrize("error", LOST, ids=range(len(LOST)))
def test_error_of_a_lost_peer_is_recognized(error: BaseException) -> None:
    assert _is_lost_peer(error)


@pytest.mark.parametrize("error", OWN, ids=range(len(OWN)))
def test_error_of_its_own_is_no_lost_peer(error: BaseException) -> None:
    assert not _is_lost_peer(error)
