"""An engine without a model: a real manager and real workers on a real daemon, driven as vLLM's
connector drives them."""

import secrets
import time
from collections.abc import Sequence

import kvist
import torch
from conftest import eventually
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LookupResult,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)

from kvist.vllm.config import Settings
from kvist.vllm.engine import Engine, Group
from kvist.vllm.manager import KvistManager
from kvist.vllm.transfer import KvistWorkerMetadata, Report
from kvist.vllm.worker import KvistWorker

BLOCK_COUNT = 64


def keys_of(count: int, group: int = 0) -> list[OffloadKey]:
    return [make_offload_key(secrets.token_bytes(32), group) for _ in range(count)]


class Rig:
    def __init__(
        self,
        socket: str,
        ranks: int = 1,
        per_chunk: int = 1,
        replicated: bool = False,
        pages: Sequence[int] = (4096, 8192),
        settings: Settings | None = None,
        groups: Sequence[Group] = (Group(0, False, [("group", b"0")]),),
        model: bytes = b"rig",
        session: bytes | None = None,
        connect: bool = True,
    ) -> None:
        self.per_chunk = per_chunk
        self.pages = pages
        self.session = session or secrets.token_bytes(16)
        self.engines = [
            Engine(
                settings=settings or Settings(socket=socket),
                session_id=self.session,
                name="rig",
                rank=rank,
                rank_count=ranks,
                replicated=replicated,
                blocks_per_chunk=per_chunk,
                part_bytes=sum(pages) * per_chunk,
                groups=list(groups),
                vllm_config=None,
                offloading_config=None,
                _fields=[("model", model)],
            )
            for rank in range(ranks)
        ]
        self.caches = [self._caches(len(groups)) for _ in range(ranks)]
        self.workers = [
            KvistWorker(engine, caches)
            for engine, caches in zip(self.engines, self.caches, strict=True)
        ]
        self.manager = KvistManager(self.engines[0])
        self.next_job = 0
        self.next_request = 0
        if connect:
            self.connect()

    def connect(self, limit_s: float = 10.0) -> None:
        for worker in self.workers:
            worker.connect(limit_s)
        self.manager.wait(limit_s)
        assert self.manager._client.connected

    def _caches(self, group_count: int) -> CanonicalKVCaches:
        tensors = [
            CanonicalKVCacheTensor(
                torch.randint(-128, 127, (BLOCK_COUNT, page), dtype=torch.int8), page
            )
            for page in self.pages
        ]
        refs = [CanonicalKVCacheRef(i, page) for i, page in enumerate(self.pages)]
        return CanonicalKVCaches(tensors, [list(refs) for _ in range(group_count)])

    def tensor(self, rank: int, index: int) -> torch.Tensor:
        return self.caches[rank].tensors[index].tensor

    def close(self) -> None:
        self.manager.shutdown()
        for worker in self.workers:
            worker.shutdown()

    # --- What vLLM's scheduler does ---------------------------------------------------------------

    def request(self, keys: Sequence[OffloadKey], ordered: bool = True) -> ReqContext:
        self.next_request += 1
        context = ReqContext(req_id=f"r{self.next_request}")
        if ordered:
            for i, key in enumerate(keys):
                context.set_offload_key_position(key, (i + 1) * 16)
        self.manager.on_new_request(context)
        return context

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def find(self, context: ReqContext, keys: Sequence[OffloadKey]) -> int | None:
        """As _maximal_prefix_lookup: hits, or None when vLLM is to ask again."""
        hits, again = 0, False
        for key in keys:
            result = self.manager.lookup(key, context)
            if result is LookupResult.MISS:
                break
            hits += result is LookupResult.HIT
            again |= result is LookupResult.RETRY
        return None if again else hits

    def find_in_the_end(
        self, context: ReqContext, keys: Sequence[OffloadKey], limit_s: float = 10.0
    ) -> int:
        deadline = time.monotonic() + limit_s
        while True:
            hits = self.find(context, keys)
            if hits is not None:
                return hits
            self.step()
            time.sleep(0.001)
            assert time.monotonic() < deadline, "lookups are deferred for ever"

    def run(self, jobs: dict[int, int] | None = None) -> dict[int, Report]:
        """Let the workers end everything; their reports, aggregated as vLLM does."""
        deadline = time.monotonic() + 10
        total: KvistWorkerMetadata | None = None
        while True:
            for worker in self.workers:
                results = worker.get_finished()
                meta = KvistWorkerMetadata(
                    completed_jobs={r.job_id: 1 for r in results}, reports=worker.take_reports()
                )
                total = meta if total is None else total.aggregate(meta)
            if not any(worker._jobs for worker in self.workers):
                assert total is not None
                self.completed = total.completed_jobs
                return total.reports
            assert time.monotonic() < deadline, "a job is never reported"

    def gpu_spec(self, blocks: Sequence[int], first: int = 0) -> GPULoadStoreSpec:
        return GPULoadStoreSpec(list(blocks), group_sizes=[len(blocks)], block_indices=[first])

    def submit_store(self, output: PrepareStoreOutput, blocks: Sequence[int]) -> None:
        self.next_job += 1
        for worker in self.workers:
            assert worker.submit_store(self.next_job, self.gpu_spec(blocks), output.store_spec)

    def store(
        self, context: ReqContext, keys: Sequence[OffloadKey], blocks: Sequence[int]
    ) -> list[OffloadKey]:
        """Offer keys whose blocks lie in `blocks`; returns those that were taken."""
        output = self.manager.prepare_store(keys, context)
        assert output is not None
        if not output.keys_to_store:
            return []
        source = []
        for key in output.keys_to_store:
            at = list(keys).index(key) * self.per_chunk
            source += blocks[at : at + self.per_chunk]
        self.submit_store(output, source)
        self.manager.on_reports(self.run())
        self.manager.complete_store(set(output.keys_to_store), context)
        return output.keys_to_store

    def store_all(self, keys: Sequence[OffloadKey], blocks: Sequence[int]) -> None:
        """Store and wait until all are published."""
        context = self.request(keys)
        pool = self.manager._pools[0]
        packed = kvist.pack_keys(list(keys), 4)

        def stored() -> bool:
            self.store(context, keys, blocks)
            return kvist.MISS not in pool.probe(packed)

        eventually(stored, "all blocks are published")
        self.manager.on_request_finished(context)

    def load(
        self, context: ReqContext, keys: Sequence[OffloadKey], blocks: Sequence[int], skip: int = 0
    ) -> set[str]:
        """Load into blocks; the requests whose load failed, as the ranks say."""
        spec = self.manager.prepare_load(keys, context)
        self.next_job += 1
        for worker in self.workers:
            assert worker.submit_load(self.next_job, spec, self.gpu_spec(blocks, skip))
        self.manager.on_reports(self.run())
        failed = set().union(*(worker.take_failed_requests() for worker in self.workers))
        self.manager.bar(failed)
        self.manager.complete_load(set(keys), context)
        return failed
