"""Sends the weights of a checkpoint to a running vLLM server, which goes on generating with them.

VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "hybrid3d"}'
python examples/update_vllm.py CHECKPOINT http://127.0.0.1:8000
"""

import sys

import requests
from transformers import AutoModelForCausalLM
from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient, ModuleSource, WeightTransferTrainerFactory

from hybrid3d.weight_transfer import TrainerInitInfo


def main(checkpoint: str, url: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    workers = requests.get(f"{url}/get_world_size", timeout=60).json()["world_size"]
    engine = WeightTransferTrainerFactory.trainer_init(
        TrainerInitInfo(rank=0, master_address="127.0.0.1", world_size=1 + workers),
        client=HTTPVLLMWeightSyncClient(url),
        source=ModuleSource(model),
    )
    engine.send_weights()
    for worker, report in enumerate(engine.reports):
        print(f"worker {worker} received {report.received_bytes} bytes, lower bound {report.lower_bound}")


if __name__ == "__main__":
    main(*sys.argv[1:])
