"""kvist.vllm: vLLM keeps its KV blocks in kvist.

    --kv-offloading-size 8 --kv-transfer-config '{"kv_connector_module_path": "kvist.vllm",
      "kv_connector_extra_config": {"spec_name": "KvistOffloadingSpec",
                                    "spec_module_path": "kvist.vllm"}}'

OffloadingConnector is a subclass of vLLM's own of the same name; KvistOffloadingSpec gives it the
manager (scheduler process) and the worker (each rank). Importing this does no I/O.
"""

from kvist.vllm.connector import OffloadingConnector
from kvist.vllm.spec import KvistOffloadingSpec

__all__ = ["KvistOffloadingSpec", "OffloadingConnector"]
