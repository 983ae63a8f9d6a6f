"""The C binding against a real daemon: what it returns, what it refuses, that it never crashes."""

import ctypes
import gc
import secrets
import threading
import time

import kvist
import pytest
from conftest import BLOCK_BYTES, Daemon, eventually

FIELDS = [("model", b"binding"), ("layout", b"1")]


def keys_of(count: int) -> bytes:
    return secrets.token_bytes(count * kvist.KEY_BYTES)


@pytest.fixture
def pool(daemon: Daemon, session: bytes) -> kvist.Pool:
    client = kvist.Client(kvist.ENGINE, session, daemon.socket, name="binding")
    client.wait(10)
    pool = client.open_pool(FIELDS, BLOCK_BYTES)
    pool.wait(10)
    return pool


def fill(pool: kvist.Pool, takes: kvist.Takes, first: int = 0) -> None:
    """Write a pattern of each slot's own and mark it."""
    assert pool.pin(takes.instance)
    slots = memoryview(takes.slots).cast("I")
    for i, slot in enumerate(slots):
        address = pool.slot_address(takes.instance, slot)
        assert address
        ctypes.memset(address, (first + i) % 256, pool.slot_bytes)
    assert pool.mark(takes.tobytes()) == 0
    pool.unpin(takes.instance)


def store(pool: kvist.Pool, keys: bytes) -> None:
    count = len(keys) // kvist.KEY_BYTES
    done = 0
    while done < count:
        takes = eventually(lambda: pool.take(count - done) or None, "slots are granted")
        assert isinstance(takes, kvist.Takes)
        if len(takes) == 0:
            continue
        fill(pool, takes, done)
        run = keys[done * 32 : (done + len(takes)) * 32]
        parent = keys[(done - 1) * 32 : done * 32] if done else None
        assert takes.commit(run, parent, BLOCK_BYTES)
        done += len(takes)
    eventually(lambda: set(pool.probe(keys)) == {kvist.READY}, "all blocks are published")


def test_store_and_load(pool: kvist.Pool) -> None:
    keys = keys_of(20)
    assert set(pool.probe(keys)) == {kvist.MISS}
    store(pool, keys)
    leases, why = pool.acquire(keys)
    assert (len(leases), why) == (20, kvist.READY)
    assert leases.held == 20 and pool.held == 20
    assert pool.pin(leases.instance)
    for i, slot in enumerate(memoryview(leases.slots).cast("I")):
        address = pool.slot_address(leases.instance, slot)
        assert address
        assert ctypes.string_at(address, BLOCK_BYTES) == bytes([i]) * BLOCK_BYTES
    pool.unpin(leases.instance)
    leases.release(0, 5)
    leases.release(3, 7)
    assert leases.held == 13
    leases.release()
    assert leases.held == 0 and pool.held == 0


def test_acquire_stops_at_the_first_miss(pool: kvist.Pool) -> None:
    keys = keys_of(10)
    store(pool, keys[: 6 * 32])
    leases, why = pool.acquire(keys)
    assert (len(leases), why) == (6, kvist.MISS)
    inner, why = pool.acquire(keys, 2, 4)
    assert (len(inner), why) == (2, kvist.READY)
    assert inner.slots == leases.slots[8:16]


def test_dropped_leases_are_released(pool: kvist.Pool) -> None:
    keys = keys_of(4)
    store(pool, keys)
    leases, _ = pool.acquire(keys)
    leases.release(1, 2)
    assert pool.held == 3
    del leases
    gc.collect()
    assert pool.held == 0


def test_unmarked_blocks_are_not_published(pool: kvist.Pool) -> None:
    keys = keys_of(2)
    takes = eventually(lambda: pool.take(2) or None, "slots are granted")
    assert isinstance(takes, kvist.Takes) and len(takes) == 2
    assert pool.mark(takes.tobytes()[: kvist.TAKE_BYTES]) == 0
    assert takes.commit(keys, None, BLOCK_BYTES)
    eventually(lambda: pool.probe(keys)[0] == kvist.READY, "the marked block is published")
    assert pool.probe(keys)[1] == kvist.MISS


def test_takes_are_given_back_once(pool: kvist.Pool) -> None:
    takes = eventually(lambda: pool.take(3) or None, "slots are granted")
    assert isinstance(takes, kvist.Takes) and len(takes) == 3
    takes.untake(0, 1)
    with pytest.raises(ValueError):
        takes.untake(0, 1)
    with pytest.raises(ValueError):
        takes.commit(keys_of(3), None, BLOCK_BYTES)
    assert pool.held == 2
    with pytest.raises(kvist.Error) as caught:
        pool.close()
    assert caught.value.status == "BUSY"
    takes.untake(1)
    pool.close()
    with pytest.raises(ValueError):
        pool.take(1)


def test_nothing_is_unmapped_under_a_copy(daemon: Daemon, pool: kvist.Pool) -> None:
    """While an arena is pinned a copy may run in it: closing is refused."""
    client = kvist.Client(kvist.ENGINE, secrets.token_bytes(16), daemon.socket)
    client.wait(10)
    other = client.open_pool(FIELDS, BLOCK_BYTES)
    other.wait(10)
    assert other.pin(other.instance)
    for close in (other.close, client.close):
        with pytest.raises(kvist.Error) as caught:
            close()
        assert caught.value.status == "BUSY"
    other.unpin(other.instance)
    with pytest.raises(ValueError):
        other.unpin(other.instance)
    other.close()
    client.close()
    assert pool.pin(pool.instance)  # and dropping all references is harmless


def test_key_forms(pool: kvist.Pool) -> None:
    short, exact, long = b"k" * 16, b"x" * 32, b"y" * 36
    packed = kvist.pack_keys([short, exact])
    assert packed == short + bytes(16) + exact
    assert kvist.pack_keys([long], 4) == b"y" * 32
    assert kvist.pack_keys([long]) != b"y" * 32
    assert pool.probe([short, exact, long]) == bytes([kvist.MISS] * 3)
    assert pool.probe(b"") == b"" and pool.probe([]) == b""


@pytest.mark.parametrize(
    "call",
    [
        lambda p: p.probe(b"x" * 31),
        lambda p: p.probe("x"),
        lambda p: p.probe([b""]),
        lambda p: p.probe([1]),
        lambda p: p.probe(),
        lambda p: p.probe(b"x" * 64, 3),
        lambda p: p.probe(b"x" * 64, 2, 1),
        lambda p: p.probe(b"x" * 64, -1),
        lambda p: p.acquire(b"x" * 64, 0, 1 << 70),
        lambda p: p.take(-1),
        lambda p: p.take("1"),
        lambda p: p.mark(b"x"),
        lambda p: p.mark(None),
        lambda p: p.pin(-1),
        lambda p: p.pin(),
        lambda p: p.slot_address(1),
        lambda p: p.verify(b"x" * 32, b"", 1, 1),
        lambda p: p.verify(b"x" * 32, b"1234", 1, 1 << 60),
        lambda p: p.wait(-1),
        lambda p: p.wait(float("nan")),
        lambda p: kvist.pack_keys([b"x"], 1),
        lambda p: kvist.pack_keys(b"x"),
        lambda p: kvist.Pool(),
        lambda p: kvist.Leases(),
        lambda p: kvist.Client(99, b"x" * 16),
        lambda p: kvist.Client(kvist.ENGINE, b"short"),
        lambda p: kvist.Client(kvist.ENGINE, b"x" * 16, copy=3),
        lambda p: kvist.Copy(9, [(1, 1, 1, 1)]),
        lambda p: kvist.Copy(kvist.HOST, []),
        lambda p: kvist.Copy(kvist.HOST, [(0, 1, 1, 1)]),
        lambda p: kvist.Copy(kvist.HOST, [(4096, 1, 1, 2)]),
        lambda p: kvist.Layout([], 1),
        lambda p: kvist.Layout([(0, 1, 1 << 40)], 1),
        lambda p: kvist.Layout([(0, 1 << 20, 0)], 0),
        lambda p: kvist.Layout([(0, 1, 0, 0)], 1),
    ],
)
def test_bad_arguments_raise(pool: kvist.Pool, call) -> None:
    with pytest.raises((TypeError, ValueError, IndexError, OverflowError)):
        call(pool)


def test_open_pool_refuses_bad_fields(daemon: Daemon, session: bytes) -> None:
    client = kvist.Client(kvist.ENGINE, session, daemon.socket)
    for fields in ([], [("a",)], [("a", "b")], [(1, b"b")], {"a": b"b"}):
        with pytest.raises((TypeError, ValueError)):
            client.open_pool(fields, BLOCK_BYTES)
    with pytest.raises(kvist.Error):
        client.open_pool(FIELDS, 1 << 50)


def test_closed_client_leaves_shells(pool: kvist.Pool, daemon: Daemon, session: bytes) -> None:
    client = kvist.Client(kvist.ENGINE, secrets.token_bytes(16), daemon.socket)
    client.wait(10)
    other = client.open_pool(FIELDS, BLOCK_BYTES)
    other.wait(10)
    keys = keys_of(2)
    store(other, keys)
    leases, _ = other.acquire(keys)
    takes = other.take(1)
    client.close()
    client.close()
    leases.release()
    for call in (
        lambda: other.probe(keys),
        lambda: other.id,
        lambda: takes.untake(),
        lambda: client.stats(),
        lambda: client.open_pool(FIELDS, BLOCK_BYTES),
    ):
        with pytest.raises(ValueError):
            call()
    assert not client.connected


def test_without_a_daemon(tmp_path, session: bytes) -> None:
    client = kvist.Client(kvist.ENGINE, session, str(tmp_path / "no.sock"))
    pool = client.open_pool(FIELDS, BLOCK_BYTES)
    start = time.monotonic()
    keys = keys_of(512)
    assert set(pool.probe(keys)) == {kvist.MISS}
    leases, why = pool.acquire(keys)
    assert (len(leases), why) == (0, kvist.MISS)
    assert len(pool.take(10)) == 0
    assert pool.prefetch(keys) is False
    pool.touch(keys)
    assert time.monotonic() - start < 0.05
    with pytest.raises(kvist.Error) as caught:
        client.wait(0.05)
    assert caught.value.status == "TIMED_OUT"
    assert client.last_error() is not None


def test_batch_calls_are_quick(pool: kvist.Pool) -> None:
    keys = keys_of(512)
    store(pool, keys)
    batch, single = [], []
    for _ in range(30):
        start = time.perf_counter()
        leases, _ = pool.acquire(keys)
        leases.release()
        batch.append(time.perf_counter() - start)
        assert len(leases) == 512
        start = time.perf_counter()
        for i in range(512):
            one, _ = pool.acquire(keys, i, i + 1)
            one.release()
        single.append(time.perf_counter() - start)
    batch.sort()
    single.sort()
    print(f"512 keys: batch {batch[15] * 1e6:.0f} us, one by one {single[15] * 1e6:.0f} us")
    # Loose: the machine is shared. The figures to hold are 200 and 800 us.
    assert batch[3] < 400e-6 and single[3] < 1600e-6


def test_verify(pool: kvist.Pool) -> None:
    keys = keys_of(3)
    store(pool, keys)
    leases, _ = pool.acquire(keys)
    assert pool.pin(leases.instance)
    checked = lambda: pool.verify(keys, leases.slots, leases.instance, BLOCK_BYTES)  # noqa: E731
    eventually(lambda: set(checked()) == {0}, "checksums are taken")
    slot = memoryview(leases.slots).cast("I")[1]
    address = pool.slot_address(leases.instance, slot)
    assert address
    ctypes.memset(address + 1000, 0xFF, 1)
    assert list(checked()) == [0, 13, 0]
    pool.unpin(leases.instance)


def test_threads_share_a_pool(pool: kvist.Pool) -> None:
    keys = keys_of(200)
    store(pool, keys)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(200):
                leases, why = pool.acquire(keys)
                assert len(leases) == 200 and why == kvist.READY
                leases.release(0, 100)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    gc.collect()
    assert pool.held == 0


def test_copy_round_trip(daemon: Daemon, session: bytes) -> None:
    blocks, page, per_chunk = 32, 4096, 4
    source = (ctypes.c_uint8 * (blocks * page))(*[i // page for i in range(blocks * page)])
    target = (ctypes.c_uint8 * (blocks * page))()
    tensors = [
        (ctypes.addressof(source), blocks, page, page),
        (ctypes.addressof(target), blocks, page, page),
    ]
    copy = kvist.Copy(kvist.HOST, tensors, threads=2)
    client = kvist.Client(kvist.ENGINE, session, daemon.socket, copy=copy)
    client.wait(10)
    pool = client.open_pool(FIELDS, per_chunk * page)
    pool.wait(10)
    takes = eventually(lambda: pool.take(2) or None, "slots are granted")
    assert isinstance(takes, kvist.Takes) and len(takes) == 2
    assert pool.pin(takes.instance)
    ids = (ctypes.c_int32 * 8)(3, 9, 1, 30, 2, 4, 6, 8)
    layouts = [kvist.Layout([(t, page, 0)], per_chunk) for t in (0, 1)]
    submitted, absent = copy.submit(
        7, kvist.STORE, pool, takes.instance, takes.slots, layouts[0], ids
    )
    assert submitted and absent == []
    copy.wait(7)
    ((job, ok, byte_count, _),) = copy.poll()
    assert (job, ok, byte_count) == (7, True, 8 * page)
    # Load all but the first 3 blocks of the first chunk, into other blocks.
    there = (ctypes.c_int32 * 5)(10, 11, 12, 13, 14)
    copy.submit(8, kvist.LOAD, pool, takes.instance, takes.slots, layouts[1], there, 3)
    copy.wait(8)
    assert [row[:2] for row in copy.poll()] == [(8, True)]
    wanted = [30, 2, 4, 6, 8]
    assert [target[(10 + i) * page] for i in range(5)] == wanted
    assert sum(target) == sum(wanted) * page
    # Slots that are not mapped here are left out and named.
    absent_slot = b"\xff\xff\xff\xff"
    few = (ctypes.c_int32 * 4)(1, 2, 3, 4)
    submitted, absent = copy.submit(
        9, kvist.LOAD, pool, takes.instance, absent_slot, layouts[1], few
    )
    assert not submitted and absent == [0]
    for bad in (
        (1, 5, pool, takes.instance, takes.slots, layouts[0], ids),
        (1, kvist.LOAD, pool, takes.instance, takes.slots, layouts[0], few),
        (1, kvist.LOAD, pool, takes.instance, takes.slots[:3], layouts[0], ids),
        (1, kvist.LOAD, pool, takes.instance, takes.slots, layouts[0], ids, 4),
        (1, kvist.LOAD, pool, takes.instance, takes.slots, layouts[0], ids, -1),
        (1, kvist.LOAD, client, takes.instance, takes.slots, layouts[0], ids),
        (1, kvist.LOAD, pool, takes.instance, takes.slots, layouts[0], 17),
    ):
        with pytest.raises((TypeError, ValueError)):
            copy.submit(*bad)
    outside = (ctypes.c_int32 * 8)(3, 9, 1, 30, 2, 4, 6, blocks)
    negative = (ctypes.c_int32 * 8)(3, 9, 1, 30, 2, 4, 6, -1)
    for bad_ids in (outside, negative):
        with pytest.raises(kvist.Error) as caught:
            copy.submit(1, kvist.LOAD, pool, takes.instance, takes.slots, layouts[0], bad_ids)
        assert caught.value.status == "INVALID"
    with pytest.raises(kvist.Error):
        copy.close()
    pool.unpin(takes.instance)
    takes.untake()
    client.close()
    copy.close()
    with pytest.raises(ValueError):
        copy.poll()
