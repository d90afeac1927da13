"""Copies the weights of a model that is sharded over four ranks into one that lies on a mesh of 2 x 2.

The first shards the rows of every weight over all ranks, as FSDP does. The second is split by tensor parallelism within
each half of the ranks: the columns of one weight, the rows of the next. Each rank receives what it lacks and no more.

    torchrun --nproc-per-node 4 examples/reshard_two_meshes.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from hybrid3d.reshard import Resharder, checksum, lower_bound, tensor_sink, tensor_source


def make_model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(1000, 256), nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))


def shard_rows(model: nn.Module, mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """Return the parameters as FSDP has them."""
    return {name: distribute_tensor(p.data, mesh, [Shard(0)]) for name, p in model.named_parameters()}


def split(model: nn.Module, mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """Return the parameters under tensor parallelism, the same in each replica."""
    dims = {"0.weight": Shard(1), "1.weight": Shard(0), "1.bias": Shard(0), "3.weight": Shard(1)}
    return {
        name: distribute_tensor(p.data, mesh, [Replicate(), dims.get(name, Replicate())])
        for name, p in model.named_parameters()
    }


def main() -> None:
    dist.init_process_group("gloo")
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None, "just created"
    four = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    two_by_two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "tp"))

    trained = shard_rows(make_model(seed=0), four)
    served = split(make_model(seed=1), two_by_two)
    source, sink = tensor_source(trained), tensor_sink(served)
    resharder = Resharder(source, sink, group)
    for version in (1, 2):
        for weight in trained.values():
            weight.to_local().add_(0.5)
        report = resharder.run(version)
        bound = lower_bound({rank: source.holdings}, {rank: sink.demand})[rank]
        print(f"version {version}, rank {rank}: received {report.received_bytes} bytes, lower bound {bound}")

        expected = make_model(seed=0)
        for parameter in expected.parameters():
            for _ in range(version):
                parameter.data.add_(0.5)
        for name, weight in split(expected, two_by_two).items():
            here, there = served[name].to_local(), weight.to_local()
            assert torch.equal(here, there), f"{name} differs"
            assert checksum(here) == checksum(there)
    print(f"rank {rank}: bit for bit equal")
    dist.barrier()  # those that are late may still receive from this rank
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
