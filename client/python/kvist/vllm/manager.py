"""The scheduler's side: lookups and leases, loads, stores.

Every call here is on the scheduler's thread. Nothing waits for the daemon, and nothing raises into
vLLM: an unexpected error is logged once and becomes a miss, a failed load or a skipped store.

    lookup ──► leased ──prepare_load──► in a load ──complete_load──► released
                  └── on_schedule_end, on_request_finished: released
    prepare_store ──► taken ──complete_store──► committed, or given back where a rank failed
    reset_cache: both kinds of transfer become orphans, which end when all ranks have reported
"""

import functools
import itertools
import os
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)

import kvist
from kvist.vllm.config import logger
from kvist.vllm.engine import Engine
from kvist.vllm.metrics import Counts
from kvist.vllm.requests import GROUP_BYTES, Chain, Held, Request, release, runs
from kvist.vllm.transfer import KvistSpec, Part, Report

NO_SLOT = b"\xff\xff\xff\xff"
# Blocks on their way are asked about at most this often, however often vLLM steps.
POLL_INTERVAL_S = 0.001
# A request for blocks that finds no room in DRAM is dropped; room comes, so it is made again.
ASK_INTERVAL_S = 0.1
GAUGE_INTERVAL_S = 1.0
REOPEN_INTERVAL_S = 1.0
OPEN_WARN_S = 5.0
# Of the time that a request waits for NVMe: the share after which it gives up when nothing more
# comes. What does not fit into DRAM beside what is leased never comes.
STALL_SHARE = 0.25
# After a promotion that never came: how long NVMe hits are misses, doubling up to the last.
PAUSE_FIRST_S = 5.0
PAUSE_LAST_S = 60.0
# How long a block that failed verification is a miss, unless it is seen to be gone before.
CORRUPT_S = 10.0
CORRUPT_KEYS_MAX = 4096


def guarded(default: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """An unexpected error in a manager call is logged once, counted, and answered by default."""

    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: "KvistManager", *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception:
                self.unexpected(method.__name__)
                return default(self, *args, **kwargs)

        return call

    return wrap


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


@dataclass
class TakenPart:
    """Taken slots of one group in a store, with what commit needs."""

    pool: kvist.Pool
    takes: kvist.Takes
    keys: list[bytes]  # kvist's
    parents: list[bytes | None]


@dataclass
class Transfer:
    """A load or store in flight."""

    number: int
    req_id: str
    keys: list[OffloadKey]
    ranks_left: int
    leases: list[Held]
    parts: list[TakenPart]
    failed: frozenset[int] = frozenset()
    orphan: bool = False

    @property
    def is_store(self) -> bool:
        return bool(self.parts)


class KvistManager(OffloadingManager):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._group_count = len(engine.groups)
        self._positions = {group.group_id: i for i, group in enumerate(engine.groups)}
        self._counts = Counts()
        self._client = engine.client(kvist.SCHEDULER)
        self.generation = b""
        self._pools: list[kvist.Pool] = engine.open_pools(self._client, self.generation)
        self._old_pools: list[kvist.Pool] = []
        self._requests: dict[str, Request] = {}
        self._active: dict[str, Request] = {}  # with leases, or a step's verdicts
        self._transfers: dict[int, Transfer] = {}
        self._loads: dict[str, Transfer] = {}  # by request: it has one at a time
        self._storing: dict[OffloadKey, Transfer] = {}
        self._next_transfer = 1
        self._corrupt: dict[bytes, float] = {}  # kvist's keys, and until when they are misses
        self._step = 0
        self._connected: bool | None = None
        self._open = False  # the daemon has opened all pools of this generation
        self._open_since_s = 0.0  # connected and waiting for that; 0: not waiting
        self._gauges_s = 0.0
        self._reopen_s = 0.0
        self._pause_until_s = 0.0
        self._pause_s = PAUSE_FIRST_S
        self._unexpected: set[str] = set()

    # --- Finding ------------------------------------------------------------------------------

    @guarded(lambda *_a, **_k: LookupResult.MISS)
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        request = self._requests.get(req_context.req_id)
        if request is None:
            request = self._request(req_context)
        if key in request.held:
            return LookupResult.HIT
        if request.barred or not self._pools:
            return LookupResult.MISS
        group = self._group_of(key)
        chain = request.chains[group]
        index = chain.index.get(key)
        if index is None:
            self._learn(chain, group, key, req_context)
            index = chain.index[key]
        if chain.is_miss(index):
            return LookupResult.MISS
        self._active[request.req_id] = request
        if index in chain.pending:
            self._poll(request)
        else:
            self._find(request, group, index)
        if key in request.held:
            return LookupResult.HIT
        return LookupResult.RETRY if index in chain.pending else LookupResult.MISS

    def _group_of(self, key: OffloadKey) -> int:
        return self._positions[int.from_bytes(key[-GROUP_BYTES:], "big")]

    def _request(self, req_context: ReqContext) -> Request:
        request = Request(req_context.req_id, self._group_count)
        self._requests[req_context.req_id] = request
        return request

    def _learn(self, chain: Chain, group: int, key: OffloadKey, req_context: ReqContext) -> None:
        """Get the chain's keys: vLLM has them in order, where this version shows them."""
        positions = getattr(req_context, "_offload_key_positions", None)
        if not isinstance(positions, dict) or key not in positions:
            chain.extend([*chain.keys, key])
        elif self._group_count == 1:
            chain.extend(list(positions))
        else:
            suffix = key[-GROUP_BYTES:]
            chain.extend([k for k in positions if k.endswith(suffix)])

    def _find(self, request: Request, group: int, index: int) -> None:
        """Lease the run that begins here; what is on NVMe is asked for."""
        chain = request.chains[group]
        pool = self._pools[group]
        if self._engine.groups[group].sparse:
            self._lease(request, chain, pool, index, index + 1)
            return
        at = index
        count = len(chain.keys)
        asked: list[int] = []
        while at < count:
            made, why = self._lease(request, chain, pool, at, count)
            at += made
            if why == kvist.READY:
                break
            if why == kvist.MISS or not self._may_wait(request):
                chain.step_miss = at
                break
            asked.append(at)
            at += 1
        if asked:
            self._ask(request, chain, pool, asked)

    def _lease(
        self, request: Request, chain: Chain, pool: kvist.Pool, start: int, stop: int
    ) -> tuple[int, int]:
        """Lease the leading run of [start, stop): how many, and why it ended."""
        batch, why = pool.acquire(chain.packed, start, stop)
        made = len(batch)
        if self._corrupt:
            now = time.monotonic()
            for i in range(made):
                if self._corrupt.get(chain.key(start + i), 0.0) > now:
                    batch.release(i)
                    made, why = i, kvist.MISS
                    break
        found = chain.keys[start : start + made]
        request.held.update(zip(found, zip(itertools.repeat(batch), range(made)), strict=True))
        request.touched.update(found)  # a lease counts as a use
        return made, why

    def _may_wait(self, request: Request) -> bool:
        now = time.monotonic()
        return (
            self._client.connected
            and now >= self._pause_until_s
            and (request.deadline_s == 0.0 or now < request.deadline_s)
        )

    def _ask(self, request: Request, chain: Chain, pool: kvist.Pool, asked: list[int]) -> None:
        keys = b"".join(chain.key(i) for i in asked)
        if not pool.prefetch(keys):
            chain.give_up(asked[0])
            return
        chain.pending.update(asked)
        now = time.monotonic()
        request.asked_s = request.polled_s = now
        request.polled_step = self._step
        if request.deadline_s == 0.0:
            request.deadline_s = now + self._engine.settings.promote_timeout_s
            request.stalled_s = request.deadline_s

    def _poll(self, request: Request) -> None:
        """See which of the blocks on their way have come; give up when it is time."""
        now = time.monotonic()
        if request.polled_step == self._step or now - request.polled_s < POLL_INTERVAL_S:
            return
        request.polled_s, request.polled_step = now, self._step
        came = len(request.promoted)
        ask = now - request.asked_s >= ASK_INTERVAL_S
        if ask:
            request.asked_s = now
        for group, chain in enumerate(request.chains):
            if chain.pending:
                self._poll_chain(request, chain, self._pools[group], ask)
        if len(request.promoted) > came:
            stall_s = STALL_SHARE * self._engine.settings.promote_timeout_s
            request.stalled_s = min(request.deadline_s, now + stall_s)
        if request.waiting and (now >= request.stalled_s or not self._client.connected):
            self._stop_waiting(request, now)

    def _poll_chain(
        self, request: Request, chain: Chain, pool: kvist.Pool, ask: bool
    ) -> None:
        pending = sorted(chain.pending)
        places = pool.probe(b"".join(chain.key(i) for i in pending))
        for index, place in zip(pending, places, strict=True):
            if place == kvist.READY:
                made, _ = self._lease(request, chain, pool, index, index + 1)
                if made:
                    chain.pending.discard(index)
                    request.promoted.add(chain.keys[index])
                    self._pause_s = PAUSE_FIRST_S
            elif place == kvist.MISS:
                chain.give_up(index)
                break
        if ask:
            left = [i for i, place in zip(pending, places, strict=True) if place == kvist.NVME]
            pool.prefetch(b"".join(chain.key(i) for i in left if i in chain.pending))

    def _stop_waiting(self, request: Request, now: float) -> None:
        """The rest is a miss, for this request for good. A daemon that brought nothing is given
        time before others wait for it."""
        for chain in request.chains:
            if chain.pending:
                chain.give_up(min(chain.pending))
        self._counts.add("promote_timeouts")
        if not request.promoted:
            self._pause_until_s = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, PAUSE_LAST_S)

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> Any:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        request = self._requests.get(req_context.req_id)
        if request is not None and key in request.promoted:
            return CacheHitSource.DISK
        return CacheHitSource.HOST

    # --- Loading ------------------------------------------------------------------------------

    def _failing_load(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> LoadStoreSpec:
        """A load that every rank reports as failed."""
        counts = [0] * self._group_count
        for key in keys:
            counts[self._group_of(key)] += 1
        return KvistSpec(
            transfer=0,
            generation=self.generation,
            req_id=req_context.req_id,
            parts=[Part(i, 0, NO_SLOT * n, b"", b"") for i, n in enumerate(counts) if n],
        )

    @guarded(_failing_load)
    def prepare_load(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> LoadStoreSpec:
        request = self._requests[req_context.req_id]
        ordered: list[list[OffloadKey]] = [[] for _ in range(self._group_count)]
        for key in keys:
            ordered[self._group_of(key)].append(key)
        leases: list[Held] = []
        parts = [
            self._load_part(request, group, group_keys, leases)
            for group, group_keys in enumerate(ordered)
            if group_keys
        ]
        transfer = self._begin(req_context.req_id, [k for group in ordered for k in group])
        transfer.leases = leases
        self._loads[req_context.req_id] = transfer
        return KvistSpec(transfer.number, self.generation, req_context.req_id, parts)

    def _load_part(
        self, request: Request, group: int, keys: list[OffloadKey], leases: list[Held]
    ) -> Part:
        found = [request.held.pop(key, None) for key in keys]
        slots: list[bytes] = []
        instance = 0
        missing = 0
        if None in found:
            # Not leased: the ranks report it, and the request is recomputed.
            missing = len(keys)
            slots.append(NO_SLOT * missing)
        else:
            leases += found
            for batch, start, stop in runs(found):
                instance = instance or batch.instance
                if batch.instance != instance:
                    slots.append(NO_SLOT * (stop - start))
                    missing += stop - start
                else:
                    slots.append(batch.slots[start * 4 : stop * 4])
        self._counts.add("hit_blocks", len(keys) - missing)
        self._counts.add("promoted_blocks", len(request.promoted.intersection(keys)))
        verify = kvist.pack_keys(keys, GROUP_BYTES) if self._engine.settings.verify else b""
        return Part(group, instance, b"".join(slots), b"", verify)

    def _begin(self, req_id: str, keys: list[OffloadKey]) -> Transfer:
        number = self._next_transfer
        self._next_transfer += 1
        transfer = Transfer(number, req_id, keys, self._engine.rank_count, [], [])
        self._transfers[number] = transfer
        return transfer

    @guarded(_nothing)
    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        transfer = self._loads.pop(req_context.req_id, None)
        if transfer is not None:
            self._finish(transfer)

    # --- Storing ------------------------------------------------------------------------------

    def _no_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput:
        # An empty list, not None: these chunks are not offered again in every step.
        return PrepareStoreOutput(
            keys_to_store=[],
            store_spec=KvistSpec(0, self.generation, req_context.req_id, []),
            evicted_keys=[],
        )

    @guarded(_no_store)
    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput:
        if not self._pools:
            return self._no_store(keys, req_context)
        request = self._requests.get(req_context.req_id)
        if request is None:
            request = self._request(req_context)
        ordered: list[list[OffloadKey]] = [[] for _ in range(self._group_count)]
        for key in keys:
            ordered[self._group_of(key)].append(key)
        taken: list[tuple[int, list[OffloadKey], TakenPart]] = []
        for group, group_keys in enumerate(ordered):
            if group_keys:
                found = self._take(request, group, group_keys, req_context)
                if found is not None:
                    taken.append((group, *found))
        if not taken:
            return self._no_store(keys, req_context)
        stored = [key for _, chosen, _ in taken for key in chosen]
        transfer = self._begin(req_context.req_id, stored)
        transfer.parts = [part for _, _, part in taken]
        self._storing.update((key, transfer) for key in stored)
        parts = [
            Part(group, part.takes.instance, part.takes.slots, part.takes.tobytes(), b"")
            for group, _, part in taken
        ]
        return PrepareStoreOutput(
            keys_to_store=stored,
            store_spec=KvistSpec(transfer.number, self.generation, req_context.req_id, parts),
            evicted_keys=[],
        )

    def _take(
        self, request: Request, group: int, keys: list[OffloadKey], req_context: ReqContext
    ) -> tuple[list[OffloadKey], TakenPart] | None:
        """Slots for those of a group's keys that are nowhere yet, first blocks first."""
        pool = self._pools[group]
        packed = kvist.pack_keys(keys, GROUP_BYTES)
        places = pool.probe(packed)
        self._touch(request, pool, keys, packed, places)
        want = [
            i
            for i, key in enumerate(keys)
            if places[i] == kvist.MISS and key not in self._storing
        ]
        if not want:
            return None
        takes = pool.take(len(want))
        self._counts.add("skipped_store_blocks", len(want) - len(takes))
        if len(takes) == 0:
            return None
        want = want[: len(takes)]
        for i in want if self._corrupt else ():
            self._corrupt.pop(packed[i * kvist.KEY_BYTES : (i + 1) * kvist.KEY_BYTES], None)
        before = self._predecessors(request, group, keys, req_context)
        part = TakenPart(
            pool=pool,
            takes=takes,
            keys=[packed[i * kvist.KEY_BYTES : (i + 1) * kvist.KEY_BYTES] for i in want],
            parents=[before[i] for i in want],
        )
        return [keys[i] for i in want], part

    def _touch(
        self,
        request: Request,
        pool: kvist.Pool,
        keys: list[OffloadKey],
        packed: bytes,
        places: bytes,
    ) -> None:
        """Count a use of the blocks that are there already, once a request."""
        fresh = [
            i
            for i, key in enumerate(keys)
            if places[i] != kvist.MISS and key not in request.touched
        ]
        if fresh:
            request.touched.update(keys[i] for i in fresh)
            size = kvist.KEY_BYTES
            pool.touch(b"".join(packed[i * size : (i + 1) * size] for i in fresh))

    @guarded(_nothing)
    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Called by vLLM 0.30; later versions offer the keys to prepare_store instead."""
        request = self._requests.get(req_context.req_id)
        for group, pool in enumerate(self._pools):
            own = [key for key in keys if self._group_of(key) == group]
            if request is not None and own:
                packed = kvist.pack_keys(own, GROUP_BYTES)
                self._touch(request, pool, own, packed, bytes([kvist.READY]) * len(own))

    def _predecessors(
        self, request: Request, group: int, keys: list[OffloadKey], req_context: ReqContext
    ) -> list[bytes | None]:
        """The key before each in the request's chain; hints, where they are known."""
        chain = request.chains[group]
        if keys[-1] not in chain.index:
            positions = getattr(req_context, "_offload_key_positions", None)
            if isinstance(positions, dict) and keys[-1] in positions:
                self._learn(chain, group, keys[-1], req_context)
        found: list[bytes | None] = []
        for i, key in enumerate(keys):
            at = chain.index.get(key)
            if at:
                found.append(chain.key(at - 1))
            elif at is None and i > 0:
                found.append(kvist.pack_keys([keys[i - 1]], GROUP_BYTES))
            else:
                found.append(None)
        return found

    @guarded(_nothing)
    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        transfer = next((self._storing[key] for key in keys if key in self._storing), None)
        if transfer is None:
            return
        if not success:
            transfer.failed = frozenset(range(len(transfer.keys)))
        self._finish(transfer)

    # --- Ends of transfers --------------------------------------------------------------------

    @guarded(_nothing)
    def on_reports(self, reports: dict[int, Report]) -> None:
        """What ranks reported; comes before vLLM's complete_* calls for the same transfers."""
        for number, report in reports.items():
            transfer = self._transfers.get(number)
            if transfer is None:
                continue
            transfer.ranks_left -= report.ranks
            transfer.failed |= report.failed
            if report.corrupt:
                self._note_corrupt(transfer, report.corrupt)
            if transfer.orphan and transfer.ranks_left <= 0:
                self._finish(transfer)

    def bar(self, req_ids: Iterable[str]) -> None:
        """These requests' loads have failed: answer them MISS from now on."""
        for req_id in req_ids:
            request = self._requests.get(req_id)
            if request is not None:
                request.barred = True
                request.drop()

    def _note_corrupt(self, transfer: Transfer, indices: frozenset[int]) -> None:
        self._counts.add("corrupt_blocks", len(indices))
        if len(self._corrupt) >= CORRUPT_KEYS_MAX:
            self._corrupt.clear()
        until_s = time.monotonic() + CORRUPT_S
        for i in indices:
            if i < len(transfer.keys):
                self._corrupt[kvist.pack_keys([transfer.keys[i]], GROUP_BYTES)] = until_s

    def _finish(self, transfer: Transfer) -> None:
        self._transfers.pop(transfer.number, None)
        if transfer.is_store:
            for key in transfer.keys:
                if self._storing.get(key) is transfer:
                    del self._storing[key]
            self._finish_store(transfer)
            return
        release(transfer.leases)
        transfer.leases = []
        if transfer.failed:
            self._counts.add("failed_loads")
            if not transfer.orphan:
                self.bar([transfer.req_id])
        else:
            self._counts.add("loaded_blocks", len(transfer.keys))

    def _finish_store(self, transfer: Transfer) -> None:
        """Commit the runs that all ranks have filled; give the others back. What was stored under
        the weights of before a reset is never committed."""
        base = 0
        for part in transfer.parts:
            count = len(part.keys)
            ok = [base + i not in transfer.failed and not transfer.orphan for i in range(count)]
            start = 0
            while start < count:
                stop = start + 1
                while (
                    stop < count
                    and ok[stop] == ok[start]
                    and (not ok[start] or part.parents[stop] == part.keys[stop - 1])
                ):
                    stop += 1
                self._end_takes(part, start, stop, ok[start])
                start = stop
            base += count

    def _end_takes(self, part: TakenPart, start: int, stop: int, ok: bool) -> None:
        if not ok:
            part.takes.untake(start, stop)
            self._counts.add("failed_store_blocks", stop - start)
            return
        keys = b"".join(part.keys[start:stop])
        if part.takes.commit(
            keys, part.parents[start], self._engine.block_bytes, start, stop
        ):
            self._counts.add("stored_blocks", stop - start)
        else:
            self._counts.add("skipped_store_blocks", stop - start)

    # --- Life of requests, steps, pools -------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    @guarded(_nothing)
    def on_request_finished(self, req_context: ReqContext) -> None:
        request = self._requests.pop(req_context.req_id, None)
        self._active.pop(req_context.req_id, None)
        if request is not None:
            request.drop()

    @guarded(_nothing)
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Drop the leases that no load has taken. A request that waits for blocks from NVMe keeps
        its own until its deadline: they are what it waits for."""
        self._step += 1
        if self._active:
            self._end_step(time.monotonic())
        connected = self._client.connected
        if connected != self._connected:
            self._log_connection(connected)
        if self._old_pools or not self._pools:
            self._tidy_pools()
        if not self._open and connected:
            self._check_open(time.monotonic())

    def _end_step(self, now: float) -> None:
        for req_id, request in list(self._active.items()):
            for chain in request.chains:
                chain.step_miss = None
            if request.waiting and now < request.deadline_s + 1.0:
                continue
            if request.waiting:
                self._stop_waiting(request, now)
            request.drop()
            del self._active[req_id]

    @guarded(_nothing)
    def reset_cache(self) -> None:
        """Move this engine, and it alone, to pools of a fresh weights generation."""
        for transfer in list(self._transfers.values()):
            transfer.orphan = True
            if transfer.ranks_left <= 0:
                self._finish(transfer)
        self._loads.clear()
        self._storing.clear()
        self._active.clear()
        for request in self._requests.values():
            request.restart()
        self._corrupt.clear()
        self._old_pools += self._pools
        self._pools = []
        self.generation = os.urandom(16)
        self._open, self._open_since_s = False, 0.0
        logger.info("kvist: cache reset: this engine goes on in a pool of its own")
        self._reopen_s = 0.0
        self._tidy_pools()

    def _tidy_pools(self) -> None:
        """Close pools of earlier generations when their last transfer has ended, and open those of
        this one as soon as there is room for them."""
        left = []
        for pool in self._old_pools:
            if pool.held:
                left.append(pool)
            else:
                pool.close()
        self._old_pools = left
        now = time.monotonic()
        if not self._pools and now >= self._reopen_s:
            self._reopen_s = now + REOPEN_INTERVAL_S
            try:
                self._pools = self._engine.open_pools(self._client, self.generation)
            except kvist.Error as error:
                if error.status != "BUSY":
                    raise

    # --- Telling people -----------------------------------------------------------------------

    def _log_connection(self, connected: bool) -> None:
        first = self._connected is None
        self._connected = connected
        self._open, self._open_since_s = False, 0.0
        error = self._client.last_error()
        if connected:
            logger.info("kvist: connected to the daemon")
        elif first:
            logger.warning(
                "kvist: the daemon is not there (%s): running without the cache until it is",
                error[1] if error else "no answer yet",
            )
        else:
            logger.warning(
                "kvist: the daemon is away (%s): mapped blocks serve hits for %g s, stores are "
                "skipped",
                error[1] if error else "connection closed",
                self._engine.settings.detach_grace_s,
            )

    def _check_open(self, now: float) -> None:
        """Say so when the daemon is there and has not opened the pools."""
        self._open = bool(self._pools) and all(any(pool.id) for pool in self._pools)
        if self._open:
            return
        if self._open_since_s == 0.0:
            self._open_since_s = now
        elif now - self._open_since_s > OPEN_WARN_S:
            self._open = True  # told; after the next reconnect or reset it is looked at again
            error = self._client.last_error()
            logger.warning(
                "kvist: the daemon has not opened this engine's pool (%s): running without the "
                "cache until it has",
                error[1] if error else "no answer",
            )

    def unexpected(self, where: str) -> None:
        self._counts.add("errors")
        if where not in self._unexpected:
            self._unexpected.add(where)
            logger.exception("kvist: unexpected error in %s (told once)", where)

    @guarded(_nothing)
    def get_stats(self) -> Any:
        now = time.monotonic()
        gauges = None
        if now - self._gauges_s >= GAUGE_INTERVAL_S:
            self._gauges_s = now
            stats = self._client.stats()
            gauges = {
                "connected": int(self._client.connected),
                "leases_held": stats["leases_held"],
                "takes_held": stats["takes_held"],
            }
        return self._counts.take(gauges)

    def wait(self, timeout_s: float) -> None:
        """Give the daemon a moment to be there before the first request."""
        deadline = time.monotonic() + timeout_s
        try:
            self._client.wait(timeout_s)
            for pool in self._pools:
                pool.wait(max(0.0, deadline - time.monotonic()))
        except kvist.Error:
            pass
        self._log_connection(self._client.connected)

    @guarded(_nothing)
    def shutdown(self) -> None:
        for request in self._requests.values():
            request.drop()
        self._requests.clear()
        self._client.close()
