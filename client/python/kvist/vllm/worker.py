"""A rank's side: copies between the engine's KV tensors and slots.

Role        builds layouts, submits copies, sets fill marks when they have ended, reports
Invariant   every submitted job is reported once, and never while its copy may still run
Threads     all calls on the worker's main thread; copies run elsewhere, checksums in one thread
"""

import hashlib
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

import kvist
from kvist.vllm.config import Refusal, logger
from kvist.vllm.engine import Engine
from kvist.vllm.transfer import KvistSpec, Part, Report

# status.h: what Pool.verify() says of a slot.
VERIFY_CORRUPT = 13
VERIFY_STALE = 14

# Test switch: this rank skips the copy and the mark of every n-th block that it stores, and says
# that all went well.
SKIP_COPY_VARIABLE = "KVIST_TEST_SKIP_COPY"


@dataclass
class Piece:
    """A run of a part's slots that is one copy job."""

    part: int
    start: int
    stop: int


@dataclass
class Job:
    """One load or store of vLLM's on this rank."""

    number: int
    spec: KvistSpec
    gpu: GPULoadStoreSpec
    is_store: bool
    stream: int
    started_s: float
    pools: list[kvist.Pool] = field(default_factory=list)  # one a part
    pinned: list[tuple[kvist.Pool, int]] = field(default_factory=list)
    bases: list[int] = field(default_factory=list)  # first index of each part's blocks
    copies: dict[int, Piece] = field(default_factory=dict)  # under way, by copy job
    failed: set[int] = field(default_factory=set)
    corrupt: set[int] = field(default_factory=set)
    unmarked: set[int] = field(default_factory=set)  # the test switch's
    bytes: int = 0
    verifying: "Future[None] | None" = None

    def fail(self, part: int | None = None) -> None:
        """All of it, or all of a part."""
        count = self.spec.block_count
        if part is None:
            self.failed.update(range(count))
        else:
            base = self.bases[part]
            self.failed.update(range(base, base + len(self.spec.parts[part].slots) // 4))


def _runs(count: int, left_out: set[int], longest: int) -> Iterator[tuple[int, int]]:
    """The runs of [0, count) without some, none longer than longest."""
    start = 0
    while start < count:
        if start in left_out:
            start += 1
            continue
        stop = start + 1
        while stop < count and stop - start < longest and stop not in left_out:
            stop += 1
        yield start, stop
        start = stop


class KvistWorker(OffloadingWorker):
    def __init__(self, engine: Engine, kv_caches: CanonicalKVCaches) -> None:
        self._engine = engine
        self._kv_caches = kv_caches  # keeps the tensors alive
        self._refs = [self._group_refs(kv_caches, g) for g in range(len(engine.groups))]
        self._layouts = [kvist.Layout(refs, engine.blocks_per_chunk) for refs in self._refs]
        self._check_layouts()
        self._device = kv_caches.tensors[0].tensor.device
        self._copy = self._make_copy(kv_caches)
        self._client = engine.client(kvist.WORKER, self._copy)
        self._shape = self._shape_digest()
        self._generation = b""
        self._pools: dict[bytes, list[kvist.Pool]] = {
            b"": engine.open_pools(self._client, b"", self._shape)
        }
        self._jobs: dict[int, Job] = {}
        self._copies: dict[int, Job] = {}  # by copy job
        self._next_copy = 1
        self._ended: list[Job] = []
        self._reports: dict[int, Report] = {}
        self._failed_requests: set[str] = set()
        self._verifier: ThreadPoolExecutor | None = None
        self._skip_copy = int(os.environ.get(SKIP_COPY_VARIABLE) or 0)
        self._stored = 0
        self._told: set[str] = set()

    # --- Layout -------------------------------------------------------------------------------

    def _group_refs(self, kv_caches: CanonicalKVCaches, group: int) -> list[tuple[int, int, int]]:
        """(tensor, bytes of a block, offset in the slot): rank, then tensor, then block."""
        sizes: dict[int, int] = {}
        for ref in kv_caches.group_data_refs[group]:
            sizes[ref.tensor_idx] = max(sizes.get(ref.tensor_idx, 0), ref.page_size_bytes)
        refs = []
        offset = self._engine.part_offset
        for tensor, page_bytes in sizes.items():
            refs.append((tensor, page_bytes, offset))
            offset += page_bytes * self._engine.blocks_per_chunk
        return refs

    def _check_layouts(self) -> None:
        engine = self._engine
        for group, layout in zip(engine.groups, self._layouts, strict=True):
            if layout.slot_bytes > engine.part_offset + engine.part_bytes:
                raise Refusal(
                    f"kvist: KV cache group {group.group_id} of rank {engine.rank} has "
                    f"{layout.slot_bytes - engine.part_offset} bytes a chunk where its part of a "
                    f"slot has {engine.part_bytes}. This model cannot be used with kvist yet."
                )

    def _shape_digest(self) -> bytes:
        """What must be equal in all sessions of a pool: the slot's inner order."""
        offset = self._engine.part_offset
        inner = [[(size, at - offset) for _, size, at in refs] for refs in self._refs]
        text = repr((inner, self._engine.blocks_per_chunk, self._engine.part_bytes))
        return hashlib.sha256(text.encode()).digest()

    def _make_copy(self, kv_caches: CanonicalKVCaches) -> kvist.Copy:
        tensors = []
        for cache in kv_caches.tensors:
            tensor = cache.tensor
            stride = tensor.stride(0) * tensor.element_size()
            tensors.append(
                (tensor.data_ptr(), tensor.shape[0], stride, min(cache.page_size_bytes, stride))
            )
        if self._device.type == "cpu":
            return kvist.Copy(kvist.HOST, tensors, threads=self._engine.settings.copy_threads)
        if self._device.type != "cuda" or torch.version.hip:
            raise Refusal(
                f"kvist: the KV cache is on a {self._device.type} device; CPU and CUDA are known."
            )
        index = self._device.index or 0
        for kind in (kvist.DIRECT, kvist.STAGED):
            if kvist.copy_available(kind, index):
                return kvist.Copy(kind, tensors, device=index)
        raise Refusal(
            "kvist: this build of kvist cannot copy to CUDA devices. Build the wheel where the "
            "CUDA toolkit is installed."
        )

    # --- Pools --------------------------------------------------------------------------------

    def use_generation(self, generation: bytes) -> None:
        """Hold the pools of this generation; those of earlier ones until their jobs have ended."""
        self._generation = generation
        if generation not in self._pools:
            try:
                self._pools[generation] = self._engine.open_pools(
                    self._client, generation, self._shape
                )
            except kvist.Error as error:
                self._tell("pools", "kvist: rank %d: %s", self._engine.rank, error)
        if len(self._pools) > 1:
            self._tidy_pools()

    def _tidy_pools(self) -> None:
        busy = {job.spec.generation for job in self._jobs.values()}
        for generation in list(self._pools):
            if generation != self._generation and generation not in busy:
                for pool in self._pools.pop(generation):
                    pool.close()

    # --- Submitting ---------------------------------------------------------------------------

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        self._begin(job_id, dst_spec, src_spec, is_store=True)
        return True

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        self._begin(job_id, src_spec, dst_spec, is_store=False)
        return True

    def _begin(
        self, number: int, spec: LoadStoreSpec, gpu: GPULoadStoreSpec, is_store: bool
    ) -> None:
        assert isinstance(spec, KvistSpec)
        job = Job(number, spec, gpu, is_store, self._stream(), time.monotonic())
        self._jobs[number] = job
        try:
            if self._prepare(job):
                if not is_store and self._engine.settings.verify:
                    job.verifying = self._pool_of_threads().submit(self._verify, job)
                else:
                    self._submit(job)
        except Exception as error:
            # Whatever it was: what runs is waited for, the job fails, the engine goes on.
            self._tell("submit", "kvist: rank %d: a copy failed: %s", self._engine.rank, error)
            job.fail()
        if not job.copies and job.verifying is None:
            self._ended.append(job)

    def _stream(self) -> int:
        if self._device.type == "cpu":
            return 0
        return torch.cuda.current_stream(self._device).cuda_stream

    def _prepare(self, job: Job) -> bool:
        """Find and pin what the job copies; False: nothing of it can be copied."""
        base = 0
        for part in job.spec.parts:
            job.bases.append(base)
            base += len(part.slots) // 4
        pools = self._pools.get(job.spec.generation)
        if pools is None:
            job.fail()
            return False
        for i, part in enumerate(job.spec.parts):
            pool = pools[part.group]
            job.pools.append(pool)
            if part.instance and pool.pin(part.instance):
                job.pinned.append((pool, part.instance))
            else:
                job.fail(i)
        # A load with a failed block is recomputed as a whole; a store is worth every block.
        return len(job.failed) < base if job.is_store else not job.failed

    def _verify(self, job: Job) -> None:
        """In the verifier's thread: compare slots with the checksums taken after their commit."""
        for i, part in enumerate(job.spec.parts):
            results = job.pools[i].verify(
                part.keys, part.slots, part.instance, self._engine.block_bytes
            )
            for at, status in enumerate(results):
                if status in (VERIFY_CORRUPT, VERIFY_STALE):
                    job.failed.add(job.bases[i] + at)
                if status == VERIFY_CORRUPT:
                    job.corrupt.add(job.bases[i] + at)

    def _submit(self, job: Job) -> None:
        if job.is_store and self._engine.replicated and self._engine.rank > 0:
            return  # rank 0 copies; this rank has nothing to add, and marks
        per_chunk = self._engine.blocks_per_chunk
        first_block = 0
        for i, part in enumerate(job.spec.parts):
            count = len(part.slots) // 4
            block_count = job.gpu.group_sizes[part.group]
            skip = 0 if job.is_store else job.gpu.block_indices[part.group] % per_chunk
            blocks = job.gpu.block_ids[first_block : first_block + block_count]
            first_block += block_count
            if -(-(skip + block_count) // per_chunk) != count:
                raise ValueError(f"{block_count} blocks for {count} slots")
            self._submit_part(job, i, np.ascontiguousarray(blocks, dtype=np.int32), skip)

    def _submit_part(self, job: Job, part: int, blocks: np.ndarray, skip: int) -> None:
        count = len(job.spec.parts[part].slots) // 4
        base = job.bases[part]
        left_out = {i for i in range(count) if base + i in job.failed}
        if job.is_store and self._skip_copy:
            left_out |= self._test_skips(job, base, count)
        ref_count = len(self._refs[job.spec.parts[part].group])
        per_chunk = self._engine.blocks_per_chunk
        longest = max(1, kvist.COPY_RANGES_MAX // (ref_count * per_chunk))
        for start, stop in _runs(count, left_out, longest):
            # Block of chunk c is at c * per_chunk - skip; the first chunk is short by skip.
            first = max(0, start * per_chunk - skip)
            some = blocks[first : stop * per_chunk - skip]
            self._submit_run(job, Piece(part, start, stop), some, skip if start == 0 else 0)

    def _submit_run(self, job: Job, piece: Piece, blocks: np.ndarray, skip: int) -> None:
        part: Part = job.spec.parts[piece.part]
        number = self._next_copy
        self._next_copy += 1
        submitted, absent = self._copy.submit(
            number,
            kvist.STORE if job.is_store else kvist.LOAD,
            job.pools[piece.part],
            part.instance,
            part.slots[piece.start * 4 : piece.stop * 4],
            self._layouts[part.group],
            blocks,
            skip,
            job.stream,
        )
        job.failed.update(job.bases[piece.part] + piece.start + i for i in absent)
        if submitted:
            job.copies[number] = piece
            self._copies[number] = job

    def _test_skips(self, job: Job, base: int, count: int) -> set[int]:
        skipped = set()
        for i in range(count):
            self._stored += 1
            if self._stored % self._skip_copy == 0:
                skipped.add(i)
        job.unmarked.update(base + i for i in skipped)
        return skipped

    # --- Ending -------------------------------------------------------------------------------

    def get_finished(self) -> list[TransferResult]:
        for job in [j for j in self._jobs.values() if j.verifying and j.verifying.done()]:
            self._after_verify(job)
        for number, ok, byte_count, _elapsed_us in self._copy.poll():
            self._after_copy(number, ok, byte_count)
        ended, self._ended = self._ended, []
        return [self._finish(job) for job in ended]

    def _after_verify(self, job: Job) -> None:
        assert job.verifying is not None
        try:
            job.verifying.result()
            job.verifying = None
            if not job.failed:
                job.stream = self._stream()
                self._submit(job)
        except Exception as error:
            job.verifying = None
            self._tell("submit", "kvist: rank %d: a copy failed: %s", self._engine.rank, error)
            job.fail()
        if not job.copies:
            self._ended.append(job)

    def _after_copy(self, number: int, ok: bool, byte_count: int) -> None:
        job = self._copies.pop(number)
        piece = job.copies.pop(number)
        if ok:
            job.bytes += byte_count
        else:
            base = job.bases[piece.part]
            job.failed.update(range(base + piece.start, base + piece.stop))
            self._tell(
                "device", "kvist: rank %d: the device reported a failed copy", self._engine.rank
            )
        if not job.copies:
            self._ended.append(job)

    def _finish(self, job: Job) -> TransferResult:
        if job.is_store:
            self._mark(job)
        for pool, instance in job.pinned:
            pool.unpin(instance)
        del self._jobs[job.number]
        failed = frozenset(job.failed)
        if job.spec.transfer:
            self._reports[job.spec.transfer] = Report(1, failed, frozenset(job.corrupt))
        if failed and not job.is_store:
            self._failed_requests.add(job.spec.req_id)
            self._tell("load", "kvist: a load failed; its request is recomputed (told once)")
        # vLLM's own worker dies of an unsuccessful result: failures go with the reports.
        return TransferResult(
            job_id=job.number,
            success=True,
            transfer_size=job.bytes,
            transfer_time=max(time.monotonic() - job.started_s, 1e-6),
        )

    def _mark(self, job: Job) -> None:
        """This rank's bytes are in the slots: say so, block by block that went well."""
        for i, part in enumerate(job.spec.parts):
            base = job.bases[i]
            left_out = {at - base for at in job.failed | job.unmarked}
            for start, stop in _runs(len(part.slots) // 4, left_out, 1 << 30):
                takes = part.takes[start * kvist.TAKE_BYTES : stop * kvist.TAKE_BYTES]
                if job.pools[i].mark(takes):
                    job.failed.update(range(base + start, base + stop))

    def wait(self, job_ids: set[int]) -> None:
        for number in job_ids:
            job = self._jobs.get(number)
            if job is None:
                continue
            if job.verifying is not None:
                job.verifying.exception()  # waits
                self._after_verify(job)
            for copy in list(job.copies):
                self._copy.wait(copy)

    def take_reports(self) -> dict[int, Report]:
        """Reports since the last call."""
        reports, self._reports = self._reports, {}
        return reports

    def take_failed_requests(self) -> set[str]:
        """Requests whose load has failed on this rank since the last call."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def _pool_of_threads(self) -> ThreadPoolExecutor:
        if self._verifier is None:
            self._verifier = ThreadPoolExecutor(1, thread_name_prefix="kvist-verify")
        return self._verifier

    def _tell(self, what: str, text: str, *values: object) -> None:
        """Log a kind of trouble once."""
        if what not in self._told:
            self._told.add(what)
            logger.warning(text, *values)

    def connect(self, timeout_s: float) -> None:
        """Give the daemon a moment to be there before the first request."""
        deadline = time.monotonic() + timeout_s
        try:
            self._client.wait(timeout_s)
            for pool in self._pools[self._generation]:
                pool.wait(max(0.0, deadline - time.monotonic()))
        except kvist.Error:
            pass  # the manager tells people; a rank only maps later

    def shutdown(self) -> None:
        if self._verifier is not None:
            self._verifier.shutdown(wait=True)
        for number in list(self._copies):
            self._copy.wait(number)
        self.get_finished()  # unpins, so that the mappings may go
        self._client.close()
        self._copy.close()
