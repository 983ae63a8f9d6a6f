"""What travels between the scheduler and the ranks: transfer specs out, reports back.

A transfer is one load or store. The manager numbers it; each rank reports it once, with the blocks
that failed. vLLM's own job numbers are not used, because vLLM forgets them in reset_cache while the
ranks go on copying.
"""

from dataclasses import dataclass, field, fields
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.v1.kv_offload.base import LoadStoreSpec


class Part(NamedTuple):
    """The blocks of one KV cache group in a transfer, in the order of their GPU blocks."""

    group: int  # position among the engine's groups
    instance: int  # the arena of the slot numbers; 0: nothing can be copied
    slots: bytes  # n native uint32
    takes: bytes  # stores: n*TAKE_BYTES, for the ranks' marks
    keys: bytes  # loads that are to be verified: n*32


@dataclass
class KvistSpec(LoadStoreSpec):
    """Where the blocks of a transfer are in kvist."""

    transfer: int
    generation: bytes  # of the pools that the slots belong to
    req_id: str
    parts: list[Part]

    @property
    def block_count(self) -> int:
        return sum(len(part.slots) for part in self.parts) // 4


class Report(NamedTuple):
    """What ranks say about a transfer that they have ended. Indices count through the parts."""

    ranks: int
    failed: frozenset[int]
    corrupt: frozenset[int]

    def merge(self, other: "Report") -> "Report":
        return Report(
            self.ranks + other.ranks, self.failed | other.failed, self.corrupt | other.corrupt
        )


@dataclass
class KvistConnectorMetadata(OffloadingConnectorMetadata):
    """vLLM's metadata, and which generation of pools to hold mapped."""

    generation: bytes = b""

    @classmethod
    def extend(
        cls, base: OffloadingConnectorMetadata, generation: bytes
    ) -> "KvistConnectorMetadata":
        values = {f.name: getattr(base, f.name) for f in fields(OffloadingConnectorMetadata)}
        return cls(**values, generation=generation)


@dataclass
class KvistWorkerMetadata(OffloadingWorkerMetadata):
    """vLLM's metadata, and reports of transfers that have ended."""

    reports: dict[int, Report] = field(default_factory=dict)

    @classmethod
    def extend(
        cls, base: OffloadingWorkerMetadata, reports: dict[int, Report]
    ) -> "KvistWorkerMetadata":
        values = {f.name: getattr(base, f.name) for f in fields(OffloadingWorkerMetadata)}
        return cls(**values, reports=reports)

    def aggregate(self, other: OffloadingWorkerMetadata) -> "KvistWorkerMetadata":
        reports = dict(self.reports)
        if isinstance(other, KvistWorkerMetadata):
            for transfer, report in other.reports.items():
                mine = reports.get(transfer)
                reports[transfer] = report if mine is None else mine.merge(report)
        return KvistWorkerMetadata.extend(super().aggregate(other), reports)
