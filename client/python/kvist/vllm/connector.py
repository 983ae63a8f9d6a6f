"""OffloadingConnector: vLLM's own, with a way to fail.

vLLM's connector takes every load and store for successful and dies otherwise. This one turns a
failed load into a recomputation of its request, and a failed store into blocks that are not
published. The class is named like its base, because `--kv-offloading-backend native` sets the
connector's name and leaves the module path to the user.
"""

from typing import Any

import vllm
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
    OffloadingConnector as VllmOffloadingConnector,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput

from kvist.vllm.config import check_version
from kvist.vllm.engine import constructing
from kvist.vllm.transfer import KvistConnectorMetadata, KvistWorkerMetadata


class OffloadingConnector(VllmOffloadingConnector):
    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        check_version(vllm.__version__)
        # Read by the scheduler after this. The default would fail the request.
        vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
        with constructing(vllm_config, kv_cache_config) as construction:
            super().__init__(vllm_config, role, kv_cache_config)
        self._spec: Any = construction.spec

    # --- Scheduler ----------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        base = super().build_connector_meta(scheduler_output)
        assert isinstance(base, OffloadingConnectorMetadata)
        return KvistConnectorMetadata.extend(base, self._spec.manager.generation)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, KvistWorkerMetadata):
            self._spec.manager.on_reports(meta.reports)
        self._spec.manager.bar(connector_output.failed_recving or ())
        super().update_connector_output(connector_output)

    # --- Ranks --------------------------------------------------------------------------------

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, KvistConnectorMetadata) and self._spec.worker:
            self._spec.worker.use_generation(connector_metadata.generation)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        # They are among the received ones too, so that vLLM lets go of their blocks.
        results.failed_recving |= self._spec.worker.take_failed_requests()
        return results

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        base = super().build_connector_worker_meta()
        reports = self._spec.worker.take_reports() if self._spec.worker else {}
        if base is None and not reports:
            return None
        return KvistWorkerMetadata.extend(base or OffloadingWorkerMetadata(), reports)
