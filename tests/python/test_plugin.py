"""Manager and worker of the vLLM plugin, on a real daemon: bytes, leases, failures, resets."""

import ctypes
import itertools
import signal
import time
from collections.abc import Callable, Iterator

import kvist
import pytest
import torch
from conftest import MIB, Daemon, eventually
from vllm.v1.kv_offload.base import LookupResult

from kvist.vllm import metrics
from kvist.vllm.config import Settings
from kvist.vllm.engine import Group
from kvist.vllm.transfer import KvistSpec, KvistWorkerMetadata, Report
from rig import BLOCK_COUNT, Rig, keys_of


@pytest.fixture
def make_rig(daemon: Daemon) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(**options) -> Rig:
        rigs.append(Rig(options.pop("socket", daemon.socket), **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


def leases_held(rig: Rig) -> int:
    return rig.manager._client.stats()["leases_held"]


# --- Bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("per_chunk", [1, 4])
@pytest.mark.parametrize("replicated", [False, True])
def test_slot_layout(make_rig, ranks: int, per_chunk: int, replicated: bool) -> None:
    """Rank-major, then tensor, then block; one copy when the ranks' bytes are equal."""
    rig = make_rig(ranks=ranks, per_chunk=per_chunk, replicated=replicated)
    if replicated:
        for index in range(len(rig.pages)):
            for rank in range(1, ranks):
                rig.tensor(rank, index).copy_(rig.tensor(0, index))
    keys = keys_of(3)
    blocks = [(7 * i + 5) % BLOCK_COUNT for i in range(3 * per_chunk)]
    rig.store_all(keys, blocks)
    pool = rig.workers[0]._pools[b""][0]
    leases, why = rig.manager._pools[0].acquire(kvist.pack_keys(keys, 4))
    assert (len(leases), why) == (3, kvist.READY)
    assert pool.pin(leases.instance)
    for chunk, slot in enumerate(memoryview(leases.slots).cast("I")):
        own = blocks[chunk * per_chunk : (chunk + 1) * per_chunk]
        want = b"".join(
            rig.tensor(rank, index)[block].numpy().tobytes()
            for rank in range(1 if replicated else ranks)
            for index in range(len(rig.pages))
            for block in own
        )
        address = pool.slot_address(leases.instance, slot)
        assert address and ctypes.string_at(address, len(want)) == want
    pool.unpin(leases.instance)


@pytest.mark.parametrize("ranks,per_chunk,skip", [(1, 1, 0), (2, 1, 0), (1, 4, 3), (2, 4, 1)])
@pytest.mark.parametrize("replicated", [False, True])
def test_load_restores_blocks(
    make_rig, ranks: int, per_chunk: int, skip: int, replicated: bool
) -> None:
    rig = make_rig(ranks=ranks, per_chunk=per_chunk, replicated=replicated)
    if replicated and ranks > 1:
        for index in range(len(rig.pages)):
            rig.tensor(1, index).copy_(rig.tensor(0, index))
    keys = keys_of(4)
    source = list(range(4 * per_chunk))
    rig.store_all(keys, source)
    saved = [[t.tensor.clone() for t in caches.tensors] for caches in rig.caches]
    target = [BLOCK_COUNT - 1 - i for i in range(4 * per_chunk - skip)]
    context = rig.request(keys)
    assert rig.find(context, keys) == 4
    assert rig.load(context, keys, target, skip) == set()
    for rank, index in itertools.product(range(ranks), range(len(rig.pages))):
        now = rig.tensor(rank, index)
        want = saved[rank][index].clone()
        for at, block in enumerate(target):
            want[block] = saved[rank][index][source[skip + at]]
        assert torch.equal(now, want)
    assert leases_held(rig) == 0


def test_two_groups(make_rig) -> None:
    """A full-attention group and a sliding-window one: a pool each, keys told apart."""
    groups = (Group(0, False, [("group", b"0")]), Group(3, True, [("group", b"3")]))
    rig = make_rig(groups=groups)
    full, window = keys_of(3), keys_of(2, group=3)
    keys = full + window
    context = rig.request(keys)
    assert eventually(lambda: all(len(p.take(1)) for p in rig.manager._pools), "both have slots")
    output = rig.manager.prepare_store(keys, context)
    assert output.keys_to_store == keys
    spec = rig.gpu_spec([0, 1, 2, 8, 9])
    spec.group_sizes, spec.block_indices = [3, 2], [0, 1]
    rig.workers[0].submit_store(1, spec, output.store_spec)
    rig.manager.on_reports(rig.run())
    rig.manager.complete_store(set(keys), context)
    for pool, own in zip(rig.manager._pools, (full, window), strict=True):
        eventually(
            lambda p=pool, o=own: set(p.probe(kvist.pack_keys(o, 4))) == {kvist.READY},
            "the group's blocks are published",
        )
    saved = rig.tensor(0, 0).clone()
    again = rig.request(keys)
    assert rig.find(again, full) == 3
    assert rig.manager.lookup(window[1], again) is LookupResult.HIT
    assert rig.manager.lookup(window[0], again) is LookupResult.HIT
    load = rig.manager.prepare_load(keys, again)
    spec = rig.gpu_spec([20, 21, 22, 30, 31])
    spec.group_sizes, spec.block_indices = [3, 2], [0, 1]
    rig.workers[0].submit_load(2, load, spec)
    rig.manager.on_reports(rig.run())
    rig.manager.complete_load(set(keys), again)
    assert torch.equal(rig.tensor(0, 0)[20:23], saved[0:3])
    assert torch.equal(rig.tensor(0, 0)[30:32], saved[8:10])
    assert leases_held(rig) == 0


def test_source_may_change_once_reported(make_rig) -> None:
    rig = make_rig()
    keys = keys_of(8)
    context = rig.request(keys)
    eventually(lambda: rig.manager._client.stats()["grants_held"] >= 8, "slots are granted")
    output = rig.manager.prepare_store(keys, context)
    saved = rig.tensor(0, 0)[:8].clone()
    rig.submit_store(output, range(8))
    reports = rig.run()
    rig.tensor(0, 0)[:8] = 0
    rig.manager.on_reports(reports)
    rig.manager.complete_store(set(keys), context)
    again = rig.request(keys)
    eventually(lambda: rig.find(again, keys) == 8 or rig.step(), "all are found")
    assert rig.load(again, keys, range(40, 48)) == set()
    assert torch.equal(rig.tensor(0, 0)[40:48], saved)


# --- Finding --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ordered", [True, False])
def test_leases_live_as_long_as_needed(make_rig, ordered: bool) -> None:
    rig = make_rig()
    keys = keys_of(6)
    rig.store_all(keys, range(6))
    context = rig.request(keys, ordered)
    assert rig.find(context, keys) == 6
    assert leases_held(rig) == 6
    rig.step()
    assert leases_held(rig) == 0  # no load took them
    assert rig.find(context, keys) == 6
    rig.manager.on_request_finished(context)
    assert leases_held(rig) == 0  # aborted after lookup
    context = rig.request(keys, ordered)
    assert rig.find(context, keys) == 6
    spec = rig.manager.prepare_load(keys[:4], context)
    rig.step()
    assert leases_held(rig) == 4
    rig.manager.on_request_finished(context)
    assert leases_held(rig) == 4  # a copy may run
    rig.workers[0].submit_load(99, spec, rig.gpu_spec(range(4)))
    rig.manager.on_reports(rig.run())
    rig.manager.complete_load(set(keys[:4]), context)
    assert leases_held(rig) == 0


def test_a_batch_is_one_call(make_rig) -> None:
    rig = make_rig()
    keys = keys_of(40)
    rig.store_all(keys, range(40))
    context = rig.request(keys)
    before = rig.manager._client.stats()["hits"]
    assert rig.manager.lookup(keys[0], context) is LookupResult.HIT
    assert rig.manager._client.stats()["hits"] - before == 40
    assert rig.find(context, keys) == 40
    assert rig.manager._client.stats()["hits"] - before == 40


def test_partly_known_prefix(make_rig) -> None:
    rig = make_rig()
    keys = keys_of(8)
    rig.store_all(keys[:5], range(5))
    context = rig.request(keys)
    assert rig.find(context, keys) == 5
    assert rig.manager.lookup(keys[7], context) is LookupResult.MISS
    rig.step()
    assert rig.find(context, keys[2:]) == 3  # after a local hit of two


def test_unknown_rank_means_no_hit(make_rig, daemon: Daemon) -> None:
    """A rank that has not mapped a block's segment: a miss for all."""
    rig = make_rig()
    keys = keys_of(4)
    rig.store_all(keys, range(4))
    half = Rig(daemon.socket, ranks=1, connect=False, model=b"rig")
    half.workers[0].shutdown()
    half.workers = []
    half.manager.wait(1)
    assert half.manager._client.connected
    context = half.request(keys)
    assert half.find(context, keys) == 0
    half.manager.shutdown()


# --- Storing --------------------------------------------------------------------------------------


def test_known_blocks_are_not_stored_again(make_rig) -> None:
    rig = make_rig()
    keys = keys_of(6)
    rig.store_all(keys[2:4], [2, 3])
    context = rig.request(keys)
    taken = rig.store(context, keys, range(6))
    assert taken == keys[:2] + keys[4:]
    pool = rig.manager._pools[0]
    eventually(
        lambda: set(pool.probe(kvist.pack_keys(keys, 4))) == {kvist.READY}, "all are there"
    )
    assert rig.store(context, keys, range(6)) == []


class TouchSpy:
    """A pool that notes what is touched."""

    def __init__(self, pool: kvist.Pool) -> None:
        self.pool = pool
        self.touched: list[bytes] = []

    def __getattr__(self, name: str):
        return getattr(self.pool, name)

    def touch(self, keys: bytes) -> None:
        self.touched.append(keys)
        self.pool.touch(keys)


def test_a_use_is_counted_once_a_request(make_rig) -> None:
    """By its lease, when kvist had the block; by a touch, when vLLM had it itself."""
    rig = make_rig()
    keys = keys_of(4)
    rig.store_all(keys, [0, 1, 2, 3])
    spy = TouchSpy(rig.manager._pools[0])
    rig.manager._pools[0] = spy
    found, local = rig.request(keys), rig.request(keys)
    assert rig.find(found, keys) == 4
    assert rig.store(found, keys, range(4)) == []
    assert spy.touched == []
    assert rig.store(local, keys, range(4)) == []
    assert rig.store(local, keys, range(4)) == []
    assert spy.touched == [kvist.pack_keys(keys, 4)]


def test_blocks_under_way_are_not_taken_twice(make_rig) -> None:
    rig = make_rig()
    keys = keys_of(4)
    one, two = rig.request(keys), rig.request(keys)
    eventually(lambda: rig.manager._client.stats()["grants_held"] >= 8, "slots are granted")
    first = rig.manager.prepare_store(keys, one)
    assert rig.manager.prepare_store(keys, two).keys_to_store == []
    rig.submit_store(first, range(4))
    rig.manager.on_reports(rig.run())
    rig.manager.complete_store(set(keys), one, success=False)
    assert rig.manager._client.stats()["takes_held"] == 0
    assert rig.manager.prepare_store(keys, two).keys_to_store == keys


def test_a_rank_that_skips_its_copy_publishes_nothing(make_rig, monkeypatch) -> None:
    monkeypatch.setenv("KVIST_TEST_SKIP_COPY", "3")
    rig = make_rig(ranks=2)
    monkeypatch.delenv("KVIST_TEST_SKIP_COPY")
    rig.workers[1]._skip_copy = 0
    keys = keys_of(9)
    context = rig.request(keys)
    eventually(lambda: rig.manager._client.stats()["grants_held"] >= 9, "slots are granted")
    assert rig.store(context, keys, range(9)) == keys
    pool = rig.manager._pools[0]
    packed = kvist.pack_keys(keys, 4)
    eventually(lambda: pool.probe(packed)[7] == kvist.READY, "the last good block is published")
    assert [i for i, place in enumerate(pool.probe(packed)) if place == kvist.MISS] == [2, 5, 8]


def test_failed_blocks_of_one_rank_are_given_back(make_rig) -> None:
    rig = make_rig(ranks=2)
    keys = keys_of(5)
    context = rig.request(keys)
    eventually(lambda: rig.manager._client.stats()["grants_held"] >= 5, "slots are granted")
    output = rig.manager.prepare_store(keys, context)
    rig.submit_store(output, range(5))
    reports = rig.run()
    number = output.store_spec.transfer
    assert reports[number] == Report(2, frozenset(), frozenset())
    # The ranks end in different steps.
    rig.manager.on_reports({number: Report(1, frozenset({1, 4}), frozenset())})
    rig.manager.on_reports({number: Report(1, frozenset(), frozenset())})
    rig.manager.complete_store(set(keys), context)
    pool, packed = rig.manager._pools[0], kvist.pack_keys(keys, 4)
    want = [kvist.READY, kvist.MISS, kvist.READY, kvist.READY, kvist.MISS]
    eventually(lambda: list(pool.probe(packed)) == want, "the good ones are published")
    assert rig.manager._client.stats()["takes_held"] == 0


def test_short_grants_take_the_first_blocks(make_rig) -> None:
    rig = make_rig()
    keys = keys_of(5000)
    context = rig.request(keys)
    output = rig.manager.prepare_store(keys, context)
    count = len(output.keys_to_store)
    assert 0 < count < 5000 and output.keys_to_store == keys[:count]
    assert output.store_spec.block_count == count


# --- Failures -------------------------------------------------------------------------------------


def test_failed_load_is_recomputed_and_not_tried_again(make_rig) -> None:
    rig = make_rig(ranks=2)
    keys = keys_of(4)
    rig.store_all(keys, range(4))
    context = rig.request(keys)
    assert rig.find(context, keys) == 4
    spec = rig.manager.prepare_load(keys, context)
    broken = KvistSpec(
        spec.transfer, spec.generation, spec.req_id,
        [spec.parts[0]._replace(instance=spec.parts[0].instance + 1)],
    )
    before = rig.tensor(0, 0).clone()
    rig.workers[0].submit_load(1, broken, rig.gpu_spec(range(4)))
    rig.workers[1].submit_load(1, spec, rig.gpu_spec(range(4)))
    reports = rig.run()
    assert rig.completed == {1: 2}  # both ranks, and to vLLM as done
    assert rig.workers[0].take_failed_requests() == {context.req_id}
    assert rig.workers[1].take_failed_requests() == set()
    assert torch.equal(rig.tensor(0, 0), before)
    rig.manager.on_reports(reports)
    rig.manager.complete_load(set(keys), context)
    assert leases_held(rig) == 0
    assert rig.find(context, keys) == 0
    assert rig.find(rig.request(keys), keys) == 4


def test_unexpected_errors_do_not_reach_vllm(make_rig) -> None:
    rig = make_rig()
    keys = keys_of(3)
    rig.store_all(keys, range(3))
    context = rig.request(keys)
    assert rig.find(context, keys) == 3
    unknown = keys_of(1, group=9)
    assert rig.manager.lookup(unknown[0], context) is LookupResult.MISS
    assert rig.manager.prepare_store(unknown, context).keys_to_store == []
    rig.manager._client.close()
    spec = rig.manager.prepare_load(keys, context)
    rig.workers[0].submit_load(5, spec, rig.gpu_spec(range(3)))
    rig.run()
    assert rig.manager.lookup(keys[0], rig.request(keys)) is LookupResult.MISS
    assert rig.manager.prepare_store(keys_of(2), context).keys_to_store == []
    rig.step()
    rig.manager.get_stats()
    assert rig.manager._counts.take(None).reduce()["vllm:kvist_errors"] > 0


def test_load_of_what_was_never_found_fails_cleanly(make_rig) -> None:
    rig = make_rig()
    keys = keys_of(2)
    context = rig.request(keys)
    assert rig.manager.lookup(keys[0], context) is LookupResult.MISS
    assert rig.load(context, keys, [0, 1]) == {context.req_id}


def test_malformed_jobs_are_reported_as_failed(make_rig) -> None:
    rig = make_rig()
    keys = keys_of(4)
    rig.store_all(keys, range(4))
    for blocks in ([0, 1, 2], [0, 1, 2, BLOCK_COUNT], [0, 1, 2, -1]):
        context = rig.request(keys)
        assert rig.find(context, keys) == 4
        assert rig.load(context, keys, blocks) == {context.req_id}
        assert leases_held(rig) == 0


def test_wait_ends_jobs_and_knows_no_others(make_rig) -> None:
    rig = make_rig()
    keys = keys_of(30)
    context = rig.request(keys)
    eventually(lambda: rig.manager._client.stats()["grants_held"] >= 30, "slots are granted")
    output = rig.manager.prepare_store(keys, context)
    rig.submit_store(output, range(30))
    rig.workers[0].wait({rig.next_job, 12345})
    (result,) = rig.workers[0].get_finished()
    assert result.success and result.transfer_size == 30 * sum(rig.pages)


def test_verify_finds_a_flipped_byte(daemon: Daemon, make_rig, monkeypatch) -> None:
    rig = make_rig(settings=Settings(socket=daemon.socket, verify=True))
    other = make_rig()
    keys = keys_of(4)
    rig.store_all(keys, range(4))
    eventually(lambda: other.find(other.request(keys), keys) == 4, "another engine finds them")
    pool = rig.workers[0]._pools[b""][0]
    leases, _ = rig.manager._pools[0].acquire(kvist.pack_keys(keys, 4))
    assert pool.pin(leases.instance)
    check = lambda: pool.verify(  # noqa: E731
        kvist.pack_keys(keys, 4), leases.slots, leases.instance, rig.engines[0].block_bytes
    )
    eventually(lambda: set(check()) == {0}, "checksums are taken")
    context = rig.request(keys)
    assert rig.find(context, keys) == 4
    assert rig.load(context, keys, range(10, 14)) == set()
    address = pool.slot_address(leases.instance, memoryview(leases.slots).cast("I")[2])
    assert address
    daemon.signal(signal.SIGSTOP)  # which leaves the block where it is
    ctypes.memset(address + 77, 1 + ctypes.string_at(address + 77, 1)[0] & 0xFF, 1)
    pool.unpin(leases.instance)
    leases.release()
    before = rig.tensor(0, 0).clone()
    context = rig.request(keys)
    assert rig.find(context, keys) == 4
    assert rig.load(context, keys, range(20, 24)) == {context.req_id}
    assert torch.equal(rig.tensor(0, 0), before)
    # From now on it is a miss from that block on, for everyone in this engine; not for ever.
    assert rig.find(rig.request(keys), keys) == 2
    monkeypatch.setattr(time, "monotonic", lambda now=time.monotonic: now() + 11)
    assert rig.find(rig.request(keys), keys) == 4
    monkeypatch.undo()
    # It hears of it, looks for itself, and then it is a miss for every engine, until stored anew.
    daemon.signal(signal.SIGCONT)
    eventually(lambda: other.find(other.request(keys), keys) == 2, "the block is dropped")
    rig.store_all(keys, range(4))
    eventually(lambda: other.find(other.request(keys), keys) == 4, "the block is there again")
    counts = rig.manager.get_stats().reduce()
    assert counts["vllm:kvist_corrupt_blocks"] == 1 and counts["vllm:kvist_failed_loads"] == 1


# --- Reset ----------------------------------------------------------------------------------------


def test_reset_moves_the_engine_alone(make_rig, daemon: Daemon) -> None:
    rig = make_rig()
    other = make_rig()
    keys = keys_of(4)
    rig.store_all(keys, range(4))
    assert other.find(other.request(keys), keys) == 4
    rig.manager.reset_cache()
    rig.workers[0].use_generation(rig.manager.generation)
    rig.connect()
    assert rig.find(rig.request(keys), keys) == 0
    rig.store_all(keys, range(10, 14))
    context = rig.request(keys)
    assert rig.find(context, keys) == 4
    assert rig.load(context, keys, range(20, 24)) == set()
    assert torch.equal(rig.tensor(0, 0)[20:24], rig.tensor(0, 0)[10:14])
    assert other.find(other.request(keys), keys) == 4
    rig.step()
    assert rig.manager._old_pools == [] and len(rig.workers[0]._pools) == 1


def test_reset_with_jobs_in_flight(make_rig) -> None:
    """Slots and leases come back when all ranks have reported; nothing of before is published."""
    rig = make_rig(ranks=2)
    keys, fresh = keys_of(4), keys_of(3)
    rig.store_all(keys, range(4))
    loading, storing, waiting = rig.request(keys), rig.request(fresh), rig.request(keys)
    assert rig.find(loading, keys) == 4
    load = rig.manager.prepare_load(keys, loading)
    assert rig.find(waiting, keys) == 4
    store = rig.manager.prepare_store(fresh, storing)
    assert store.keys_to_store == fresh
    rig.manager.reset_cache()
    assert leases_held(rig) == 4 and rig.manager._client.stats()["takes_held"] == 3
    old = rig.manager._old_pools[0]
    # The workers get them late, after they were told of the new generation.
    for worker in rig.workers:
        worker.submit_load(1, load, rig.gpu_spec(range(10, 14)))
        worker.submit_store(2, rig.gpu_spec(range(3)), store.store_spec)
    for worker in rig.workers:
        worker.use_generation(rig.manager.generation)
    reports = rig.run()
    assert {report.ranks for report in reports.values()} == {2}
    halves = {n: r._replace(ranks=1) for n, r in reports.items()}
    rig.manager.on_reports(halves)
    assert leases_held(rig) == 4
    rig.manager.on_reports(halves)
    assert leases_held(rig) == 0 and rig.manager._client.stats()["takes_held"] == 0
    time.sleep(0.2)
    assert set(old.probe(kvist.pack_keys(fresh, 4))) == {kvist.MISS}
    rig.step()
    assert rig.manager._old_pools == []
    for worker in rig.workers:
        worker.use_generation(rig.manager.generation)
        assert len(worker._pools) == 1
        # A job of a generation that is gone fails; it is not lost.
        worker.submit_store(3, rig.gpu_spec(range(3)), store.store_spec)
    assert all(len(r.failed) == 3 for r in rig.run().values())
    rig.connect()
    rig.store_all(fresh, range(3))


def test_many_resets(make_rig) -> None:
    rig = make_rig()
    keys = keys_of(2)
    for _ in range(20):
        rig.manager.reset_cache()
        rig.workers[0].use_generation(rig.manager.generation)
        rig.step()
    rig.connect()
    rig.store_all(keys, range(2))
    assert rig.find(rig.request(keys), keys) == 2


# --- The daemon away, stopped, slow ---------------------------------------------------------------


def test_engine_before_daemon(start_daemon, tmp_path) -> None:
    daemon = start_daemon("--arena", str(64 * MIB))
    daemon.kill()
    rig = Rig(daemon.socket, connect=False)
    keys = keys_of(3)
    context = rig.request(keys)
    assert rig.find(context, keys) == 0
    output = rig.manager.prepare_store(keys, context)
    assert output.keys_to_store == [] and output.evicted_keys == []
    rig.step()
    daemon.start()
    rig.connect(15)
    rig.store_all(keys, range(3))
    assert rig.find(rig.request(keys), keys) == 3
    rig.close()


def test_daemon_killed_and_back(make_rig, daemon: Daemon) -> None:
    rig = make_rig()
    keys = keys_of(4)
    rig.store_all(keys, range(4))
    daemon.kill()
    eventually(lambda: not rig.manager._client.connected, "the client notices")
    context = rig.request(keys)
    assert rig.find(context, keys) == 4  # mapped blocks go on serving hits
    saved = rig.tensor(0, 0)[:4].clone()
    assert rig.load(context, keys, range(20, 24)) == set()
    assert torch.equal(rig.tensor(0, 0)[20:24], saved)
    fresh = keys_of(2)
    rig.store(rig.request(fresh), fresh, [0, 1])
    daemon.start()
    eventually(lambda: rig.manager._client.connected, "it connects again")
    rig.connect()
    more = keys_of(4)
    rig.store_all(more, range(4))
    context = rig.request(more)
    assert rig.find(context, more) == 4
    assert rig.load(context, more, range(30, 34)) == set()
    assert torch.equal(rig.tensor(0, 0)[30:34], saved)


def test_stopped_daemon_costs_no_time(make_rig, daemon: Daemon) -> None:
    rig = make_rig()
    keys = keys_of(20)
    rig.store_all(keys, range(20))
    daemon.signal(signal.SIGSTOP)
    worst = 0.0
    for _ in range(200):
        fresh = keys_of(20)
        context, new = rig.request(keys), rig.request(fresh)
        start = time.perf_counter()
        assert rig.find(context, keys) == 20
        assert rig.find(new, fresh) == 0
        output = rig.manager.prepare_store(fresh, new)
        rig.manager.complete_store(set(output.keys_to_store), new)
        rig.step()
        rig.manager.on_request_finished(context)
        rig.manager.on_request_finished(new)
        worst = max(worst, time.perf_counter() - start)
    daemon.signal(signal.SIGCONT)
    print(f"worst step {worst * 1e3:.2f} ms")
    assert worst < 0.1


@pytest.fixture
def nvme(start_daemon, tmp_path) -> Daemon:
    return start_daemon(
        "--arena", str(16 * MIB), "--nvme", str(tmp_path / "nvme"), "--nvme-bytes", str(512 * MIB)
    )


def spill(rig: Rig, count: int) -> list[list[bytes]]:
    """Store more than DRAM holds; the chains, oldest first."""
    chains = []
    for _ in range(count):
        chains.append(keys_of(8))
        rig.store_all(chains[-1], range(8))
    return chains


def test_nvme_hits(nvme: Daemon) -> None:
    rig = Rig(nvme.socket, pages=(65536, 65536), settings=Settings(nvme.socket))
    chains = spill(rig, 40)  # 40 MiB
    saved = rig.tensor(0, 0)[:8].clone()
    pool = rig.manager._pools[0]
    packed = kvist.pack_keys(chains[0], 4)
    eventually(lambda: kvist.NVME in pool.probe(packed), "the oldest chain is on NVMe")
    context = rig.request(chains[0])
    assert rig.find(context, chains[0]) is None
    assert rig.find_in_the_end(context, chains[0]) == 8
    assert rig.load(context, chains[0], range(20, 28)) == set()
    assert torch.equal(rig.tensor(0, 0)[20:28], saved)
    assert leases_held(rig) == 0
    counts = rig.manager.get_stats().reduce()
    assert counts["vllm:kvist_promoted_blocks"] > 0
    rig.close()


def test_waiting_for_nvme_ends(nvme: Daemon) -> None:
    """A stopped daemon: RETRY until the timeout, then a miss, and it stays one."""
    settings = Settings(nvme.socket, promote_timeout_s=0.3)
    rig = Rig(nvme.socket, pages=(65536, 65536), settings=settings)
    chains = spill(rig, 40)
    pool = rig.manager._pools[0]
    for chain in chains[:2]:
        packed = kvist.pack_keys(chain, 4)
        eventually(lambda p=packed: set(pool.probe(p)) == {kvist.NVME}, "the chain is on NVMe")
    nvme.signal(signal.SIGSTOP)
    context = rig.request(chains[0])
    start = time.monotonic()
    assert rig.find_in_the_end(context, chains[0]) == 0
    assert 0.2 < time.monotonic() - start < 1.0
    assert rig.find(context, chains[0]) == 0
    rig.step()
    assert rig.find(context, chains[0]) == 0
    # The next request does not wait for a daemon that brought nothing.
    assert rig.find(rig.request(chains[1]), chains[1]) == 0
    nvme.signal(signal.SIGCONT)
    packed = kvist.pack_keys(chains[0], 4)
    eventually(lambda: pool.probe(packed)[0] == kvist.READY, "what was asked for comes late")
    assert rig.find(context, chains[0]) == 0  # it would be another plan for a running request
    assert rig.find(rig.request(chains[0]), chains[0]) > 0
    rig.close()


def test_finished_requests_wait_for_nothing(nvme: Daemon) -> None:
    rig = Rig(nvme.socket, pages=(65536, 65536), settings=Settings(nvme.socket))
    chains = spill(rig, 40)
    packed = kvist.pack_keys(chains[0], 4)
    eventually(lambda: kvist.NVME in rig.manager._pools[0].probe(packed), "it is on NVMe")
    context = rig.request(chains[0])
    assert rig.find(context, chains[0]) is None
    rig.manager.on_request_finished(context)
    assert leases_held(rig) == 0 and not rig.manager._requests and not rig.manager._active
    rig.close()


# --- Metrics and messages -------------------------------------------------------------------------


def test_metrics_are_declared(make_rig) -> None:
    rig = make_rig()
    for name in metrics.COUNTERS:
        rig.manager._counts.add(name)
    stats = rig.manager.get_stats()
    declared = metrics.definitions()
    assert set(stats.data["data"]) == set(declared)
    assert rig.manager.get_stats() is None


def test_reports_of_ranks_are_joined() -> None:
    one = KvistWorkerMetadata({1: 1}, reports={7: Report(1, frozenset({1}), frozenset())})
    two = KvistWorkerMetadata({1: 1, 2: 1}, reports={7: Report(1, frozenset({3}), frozenset({3})),
                                                     8: Report(1, frozenset(), frozenset())})
    both = one.aggregate(two)
    assert both.completed_jobs == {1: 2, 2: 1}
    assert both.reports[7] == Report(2, frozenset({1, 3}), frozenset({3}))
    assert both.reports[8].ranks == 1
