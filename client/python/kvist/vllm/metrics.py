"""Metrics of the plugin: the one list that definitions and statistics are made from.

A metric that get_stats() reports and build_metric_definitions() did not declare kills the server,
so both come from the tables below.
"""

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
)

PREFIX = "vllm:kvist_"

COUNTERS = {
    "hit_blocks": "Blocks found in kvist that a request was given.",
    "promoted_blocks": "Blocks of these that were brought from NVMe for it.",
    "loaded_blocks": "Blocks copied from kvist into the engine.",
    "stored_blocks": "Blocks copied into kvist and committed.",
    "skipped_store_blocks": "Blocks not stored: no free slot was granted, or the daemon was away.",
    "failed_store_blocks": "Blocks taken for storing and given back: a copy or a mark failed.",
    "failed_loads": "Loads that failed; their requests were recomputed.",
    "corrupt_blocks": "Blocks that failed verification when they were loaded.",
    "promote_timeouts": "Requests that gave up waiting for blocks from NVMe.",
    "errors": "Unexpected errors in the plugin; each is logged once.",
}

GAUGES = {
    "connected": "1 while the scheduler is connected to the daemon.",
    "leases_held": "Blocks leased by this engine now.",
    "takes_held": "Slots being filled by this engine now.",
}


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """What build_metric_definitions() returns."""
    found: dict[str, OffloadingMetricMetadata] = {}
    for name, text in COUNTERS.items():
        found[PREFIX + name] = OffloadingCounterMetadata(documentation=text)
    for name, text in GAUGES.items():
        found[PREFIX + name] = OffloadingGaugeMetadata(documentation=text)
    return found


class Counts:
    """Counters since the last take(). One thread."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(COUNTERS, 0)

    def add(self, name: str, count: int = 1) -> None:
        self._counts[name] += count

    def take(self, gauges: dict[str, int] | None) -> OffloadingConnectorStats | None:
        """Statistics for vLLM, or None when there is nothing to say."""
        changed = {name: count for name, count in self._counts.items() if count}
        if not changed and not gauges:
            return None
        stats = OffloadingConnectorStats()
        for name, count in changed.items():
            stats.increase_counter(PREFIX + name, count)
            self._counts[name] = 0
        for name, value in (gauges or {}).items():
            stats.set_gauge(PREFIX + name, value)
        return stats
