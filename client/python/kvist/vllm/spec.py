"""KvistOffloadingSpec: what vLLM's offloading connector makes its manager and worker with."""

from typing import Any

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from kvist.vllm import metrics
from kvist.vllm.engine import current_construction, make_engine
from kvist.vllm.manager import KvistManager
from kvist.vllm.worker import KvistWorker

# How long an engine's start waits for a daemon. It is not needed: it makes the first request hit.
CONNECT_TIMEOUT_S = 1.0


class KvistOffloadingSpec(OffloadingSpec):
    """Made in the scheduler's process and in each worker, inside kvist's connector."""

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        return metrics.definitions()

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        construction = current_construction()
        self.engine = make_engine(construction, config)
        # replicated_layout stays False for vLLM: all ranks are asked to store, because all have to
        # mark; KvistWorker knows that only rank 0 copies.
        self.manager: KvistManager | None = None
        self.worker: KvistWorker | None = None
        construction.spec = self

    def get_manager(self) -> OffloadingManager:
        if self.manager is None:
            self.manager = KvistManager(self.engine)
            self.manager.wait(CONNECT_TIMEOUT_S)
        return self.manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self.worker is None:
            self.worker = KvistWorker(self.engine, kv_caches)
            self.worker.connect(CONNECT_TIMEOUT_S)
        return self.worker
