"""The caches that tests/bench/peers measures, each with its server and one Python client.

All are asked for the same: `count` blocks lie side by side at the address `source`; put() stores them,
get() copies them to the address `target`, find() says how many are there. Each is used as its own
documentation does, with its default settings, and with what costs it least: keys in the form that it
takes are made before the clock starts, buffers lie where it wants them.
"""
import array
import ctypes
import mmap
import os
import pathlib
import socket
import struct
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tests/engine"))

from harness.daemon import Daemon  # noqa: E402
from harness.process import Child, wait_until  # noqa: E402

MIB = 1 << 20
LIMIT_S = 60.0
CAPACITY = 8  # times the bytes of a turn


def address_of(area: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(area))


def port_open(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


class Store:
    """What all have in common. `call_blocks` blocks go with one call."""

    finds = True
    fill_turns = 2  # until new blocks lie where others have been: freed memory is used again

    def __init__(self, folder: pathlib.Path, block_bytes: int, count: int, call_blocks: int) -> None:
        self.folder = folder
        self.block_bytes = block_bytes
        self.count = count
        self.call_blocks = call_blocks
        self.capacity_mib = CAPACITY * block_bytes * count // MIB
        self.children: list[Child] = []

    def calls(self) -> list[tuple[int, int]]:
        starts = range(0, self.count, self.call_blocks)
        return [(start, min(start + self.call_blocks, self.count)) for start in starts]

    def buffers(self) -> None:
        self.areas = [mmap.mmap(-1, self.count * self.block_bytes) for _ in range(2)]
        self.source, self.target = map(address_of, self.areas)

    def spawn(self, name: str, argv: list[str], **env: str) -> Child:
        child = Child(name, self.folder)
        child.spawn(argv, {**os.environ, **env})
        self.children.append(child)
        return child

    def wait_port(self, child: Child, port: int) -> None:
        wait_until(lambda: port_open(port) or not child.alive(), LIMIT_S, f"{child.name} listens")
        if not child.alive():
            raise child.fail("ended at its start")

    def open(self) -> None:
        """Server, client, buffers."""
        raise NotImplementedError

    def prepare(self, keys: list[bytes]) -> object:
        """Keys as put(), get(), find() and forget() take them."""
        raise NotImplementedError

    def put(self, keys) -> None:
        raise NotImplementedError

    def get(self, keys) -> None:
        raise NotImplementedError

    def settle(self, keys) -> None:
        """Before find(), outside the time."""

    def find(self, keys) -> int:
        raise NotImplementedError

    def forget(self, keys) -> None:
        """Make room, outside the time."""
        raise NotImplementedError

    def close(self) -> None:
        for child in self.children:
            child.end()


class Memcpy(Store):
    """No cache: what copying takes here."""

    finds = False

    def open(self) -> None:
        self.buffers()
        self.area = mmap.mmap(-1, self.count * self.block_bytes)
        self.held = address_of(self.area)

    def prepare(self, keys: list[bytes]) -> None:
        return None

    def copy(self, target: int, source: int) -> None:
        for at in range(0, self.count * self.block_bytes, self.block_bytes):
            ctypes.memmove(target + at, source + at, self.block_bytes)

    def put(self, keys: None) -> None:
        self.copy(self.held, self.source)

    def get(self, keys: None) -> None:
        self.copy(self.target, self.held)

    def forget(self, keys: None) -> None:
        pass


class Kvist(Store):
    """The package as the vLLM plugin uses it: takes, a copy in its thread, marks, a commit; leases, a
    copy, a release. Put lasts until the last block is found. Blocks are evicted all the time. The
    daemon is idle when the pool is opened: it has populated the memory that it keeps for new pools."""

    fill_turns = CAPACITY + 1

    def open(self) -> None:
        import kvist

        self.kvist = kvist
        Daemon.HOMES = str(self.folder)
        self.daemon = Daemon(arena_mib=self.capacity_mib)
        self.daemon.start()
        self.buffers()
        self.wait_idle()
        blocks = (self.count, self.block_bytes, self.block_bytes)
        self.copy = kvist.Copy(
            kvist.HOST, [(self.source, *blocks), (self.target, *blocks)], threads=1
        )
        self.layouts = [kvist.Layout([(tensor, self.block_bytes, 0)], 1) for tensor in (0, 1)]
        self.client = kvist.Client(
            kvist.ENGINE, os.urandom(16), self.daemon.socket, name="peers", copy=self.copy
        )
        self.client.wait(LIMIT_S)
        self.pool = self.client.open_pool([("engine", b"peers")], self.block_bytes)
        self.pool.wait(LIMIT_S)
        self.job = 0

    def wait_idle(self) -> None:
        """Until it has populated no more for a while."""
        spare = -1.0
        while (now := self.daemon.metric("kvist_spare_bytes")) != spare:
            spare = now
            time.sleep(0.5)

    def prepare(self, keys: list[bytes]) -> bytes:
        return self.kvist.pack_keys(keys)

    def transfer(self, direction: int, held, start: int, stop: int) -> None:
        """Copy blocks [start, stop) to or from the slots of takes or leases."""
        tensor = 0 if direction == self.kvist.STORE else 1
        self.job += 1
        if not self.pool.pin(held.instance):
            raise RuntimeError("the arena is gone")
        blocks = array.array("i", range(start, stop))
        done, missing = self.copy.submit(
            self.job, direction, self.pool, held.instance, held.slots, self.layouts[tensor], blocks
        )
        if not done or missing:
            raise RuntimeError("slots are not mapped")
        self.copy.wait(self.job)
        ended = self.copy.poll()
        self.pool.unpin(held.instance)
        if [job[:2] for job in ended] != [(self.job, True)]:
            raise RuntimeError(f"a copy failed: {ended}")

    def take(self, count: int):
        limit = time.monotonic() + LIMIT_S
        while not len(takes := self.pool.take(count)):
            if time.monotonic() > limit:
                raise RuntimeError("there is no slot to put a block in")
            time.sleep(20e-6)
        return takes

    def put(self, keys: bytes) -> None:
        size = self.kvist.KEY_BYTES
        start = 0
        while start < self.count:
            takes = self.take(min(self.call_blocks, self.count - start))
            stop = start + len(takes)
            self.transfer(self.kvist.STORE, takes, start, stop)
            parent = keys[(start - 1) * size : start * size] if start else None
            if self.pool.mark(takes.tobytes()) or not takes.commit(
                keys[start * size : stop * size], parent, self.block_bytes
            ):
                raise RuntimeError("a commit failed")
            start = stop
        limit = time.monotonic() + LIMIT_S
        while self.pool.probe(keys, self.count - 1)[0] != self.kvist.READY:
            if time.monotonic() > limit:
                raise RuntimeError("what was put is not found")

    def lease(self, keys: bytes, start: int, stop: int):
        """All of them: while a pool grows, its blocks are misses until the new index has arrived."""
        limit = time.monotonic() + LIMIT_S
        while True:
            leases, _ = self.pool.acquire(keys, start, stop)
            if len(leases) == stop - start:
                return leases
            if time.monotonic() > limit:
                raise RuntimeError(f"found {len(leases)} of {stop - start} blocks")

    def get(self, keys: bytes) -> None:
        for start, stop in self.calls():
            leases = self.lease(keys, start, stop)
            self.transfer(self.kvist.LOAD, leases, start, stop)
            leases.release()

    def find(self, keys: bytes) -> int:
        leases = self.lease(keys, 0, self.count)
        leases.release()
        return len(leases)

    def forget(self, keys: bytes) -> None:
        pass

    def close(self) -> None:
        self.pool.close()
        self.client.close()
        self.copy.close()
        self.daemon.close()


class Mooncake(Store):
    """Mooncake Store: a master, a client that owns the memory, and one that shares memory with it."""

    MASTER_PORT = 50051
    CLIENT_PORT = 50052

    def open(self) -> None:
        from mooncake.store import MooncakeDistributedStore

        programs = pathlib.Path(sys.prefix) / "bin"
        master = self.spawn("master", [
            str(programs / "mooncake_master"), "--rpc_address=127.0.0.1",
            f"--rpc_port={self.MASTER_PORT}", "--metrics_host=127.0.0.1",
        ])
        self.wait_port(master, self.MASTER_PORT)
        owner = self.spawn("client", [
            str(programs / "mooncake_client"), "--host=127.0.0.1", f"--port={self.CLIENT_PORT}",
            f"--global_segment_size={self.capacity_mib}MB", "--protocol=tcp",
            f"--master_server_address=127.0.0.1:{self.MASTER_PORT}", "--metadata_server=P2PHANDSHAKE",
        ])
        self.wait_port(owner, self.CLIENT_PORT)
        self.store = MooncakeDistributedStore()
        size = self.count * self.block_bytes
        server = f"127.0.0.1:{self.CLIENT_PORT}"
        wait_until(
            lambda: self.store.setup_dummy(2 * size + 64 * MIB, 16 * MIB, server) == 0,
            LIMIT_S, "the client is connected",
        )
        self.source, self.target = (self.store.alloc_from_mem_pool(size) for _ in range(2))
        for area in (self.source, self.target):
            if not area or self.store.register_buffer(area, size) != 0:
                raise RuntimeError("no memory is shared")

    def prepare(self, keys: list[bytes]) -> list[str]:
        return [key.hex() for key in keys]

    def places(self, area: int, start: int, stop: int) -> tuple[list[int], list[int]]:
        size = self.block_bytes
        return [area + at * size for at in range(start, stop)], [size] * (stop - start)

    def put(self, keys: list[str]) -> None:
        for start, stop in self.calls():
            done = self.store.batch_put_from(keys[start:stop], *self.places(self.source, start, stop))
            if any(done):
                raise RuntimeError(f"put says {set(done)}")

    def get(self, keys: list[str]) -> None:
        for start, stop in self.calls():
            done = self.store.batch_get_into(keys[start:stop], *self.places(self.target, start, stop))
            if set(done) != {self.block_bytes}:
                raise RuntimeError(f"get says {set(done)}")

    def find(self, keys: list[str]) -> int:
        return self.store.batch_is_exist(keys).count(1)

    def forget(self, keys: list[str]) -> None:
        self.store.batch_remove(keys, True)

    def close(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
        super().close()


class Lmcache(Store):
    """LMCache's server with its memory shared, blocks moved by the engine. A call is a prompt of its
    own, of 16 tokens a block, and the tensors are one layer whose blocks are contiguous: other
    shapes are slower."""

    PORT = 5555
    TOKENS = 16
    MODEL = "peers"

    def open(self) -> None:
        os.environ.update(LMCACHE_LOG_LEVEL="WARNING", LMCACHE_TRACK_USAGE="false", HF_HUB_OFFLINE="1")
        gib = str(self.capacity_mib / 1024)
        server = self.spawn("server", [
            str(pathlib.Path(sys.prefix) / "bin/lmcache"), "server", "--host", "127.0.0.1",
            "--port", str(self.PORT), "--http-port", str(self.PORT + 1),
            "--chunk-size", str(self.TOKENS), "--eviction-policy", "LRU", "--l1-size-gb", gib,
            "--supported-transfer-mode", "engine_driven", "--shm-name", "peers", "--no-l1-use-lazy",
        ])
        import torch
        import zmq
        from lmcache.utils import EngineType
        from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
        from lmcache.v1.multiprocess.group_view import EngineGroupInfo
        from lmcache.v1.multiprocess.transfer_context import create_transfer_context
        from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

        self.key_type = IPCCacheServerKey
        self.wait_port(server, self.PORT)
        self.context = zmq.Context()
        self.context.setsockopt(zmq.LINGER, 0)
        self.server = RequestClientFactory.create(f"tcp://127.0.0.1:{self.PORT}", context=self.context)
        self.server.get_chunk_size().result(timeout=LIMIT_S)
        shape = (2 * self.count, self.TOKENS, self.block_bytes // self.TOKENS // 2)
        self.tensors = {"layer.0": torch.zeros(shape, dtype=torch.float16)}
        self.source = self.tensors["layer.0"].data_ptr()
        self.target = self.source + self.count * self.block_bytes
        self.transfers = create_transfer_context(
            self.tensors, mode="engine_driven", instance_id=1, req_client=self.server
        )
        self.transfers.register(
            self.tensors, self.MODEL, 1, 1, LIMIT_S, layout_hints={"kv_layout": "NHD"},
            engine_group_infos=[EngineGroupInfo(
                engine_group_id=0, layer_indices=(0,), tokens_per_block=self.TOKENS
            )],
            engine_type=EngineType.VLLM,
        )

    def prompt(self, first: int, blocks: int) -> tuple[int, ...]:
        return (first, *range(blocks * self.TOKENS - 1))

    def prepare(self, keys: list[bytes]) -> list[tuple[int, ...]]:
        """The prompts of the calls, and one of all blocks to be found at once."""
        first = [struct.unpack("<I", key[:4])[0] >> 1 for key in keys]
        prompts = [self.prompt(first[start], stop - start) for start, stop in self.calls()]
        return [*prompts, self.prompt(first[-1], self.count)]

    def key(self, prompt: tuple[int, ...], request: str, worker: int | None):
        return self.key_type(
            model_name=self.MODEL, world_size=1, num_kv_readers=1, worker_id=worker,
            token_ids=prompt, start=0, end=len(prompt), request_id=request,
        )

    def request(self, kind: str, prompt: tuple[int, ...]) -> str:
        return f"{kind}-{prompt[0]}-{len(prompt)}"

    def store(self, prompt: tuple[int, ...], start: int, stop: int) -> None:
        request = self.request("put", prompt)
        done = self.transfers.submit_store(
            request, self.key(prompt, request, 0), self.tensors, [list(range(start, stop))],
            self.transfers.create_recorded_event(), 1,
        )
        if not done.result(timeout=LIMIT_S):
            raise RuntimeError("a store failed")
        self.server.end_session(request).result(timeout=LIMIT_S)

    def lookup(self, request: str, prompt: tuple[int, ...]) -> int:
        self.server.lookup(self.key(prompt, request, None), 1).result(timeout=LIMIT_S)
        while (found := self.server.query_prefetch_status(request).result(timeout=LIMIT_S)) is None:
            pass
        return found

    def put(self, keys: list[tuple[int, ...]]) -> None:
        for prompt, (start, stop) in zip(keys, self.calls()):
            self.store(prompt, start, stop)

    def get(self, keys: list[tuple[int, ...]]) -> None:
        for prompt, (start, stop) in zip(keys, self.calls()):
            request = self.request("get", prompt)
            if self.lookup(request, prompt) != stop - start:
                raise RuntimeError("not all blocks were found")
            blocks = list(range(self.count + start, self.count + stop))
            done = self.transfers.submit_retrieve(
                request, self.key(prompt, request, 0), self.tensors, [blocks],
                self.transfers.create_recorded_event(), 1, skip_first_n_tokens=0,
            )
            if not done.result(timeout=LIMIT_S):
                raise RuntimeError("a retrieval failed")
            self.server.end_session(request).result(timeout=LIMIT_S)

    def settle(self, keys: list[tuple[int, ...]]) -> None:
        self.store(keys[-1], 0, self.count)

    def find(self, keys: list[tuple[int, ...]]) -> int:
        request = self.request("find", keys[-1])
        found = self.lookup(request, keys[-1])
        self.server.end_session(request).result(timeout=LIMIT_S)
        return found

    def forget(self, keys: list[tuple[int, ...]]) -> None:
        self.server.clear(True).result(timeout=LIMIT_S)

    def close(self) -> None:
        if hasattr(self, "transfers"):
            self.transfers.unregister().result(timeout=LIMIT_S)
            self.transfers.close()
            self.server.close()
            self.context.term()
        super().close()


class Redis(Store):
    """Redis over a Unix socket, a pipeline a call. What it answers is bytes, which have to be copied."""

    def open(self) -> None:
        import redis

        unpacked = pathlib.Path(sys.prefix) / "root/usr"
        program = unpacked / "bin/redis-server"
        path = self.folder / "redis.sock"
        server = self.spawn("redis", [
            str(program) if program.exists() else "redis-server", "--port", "0",
            "--unixsocket", str(path), "--save", "", "--appendonly", "no", "--dir", str(self.folder),
            "--maxmemory", f"{self.capacity_mib}mb", "--maxmemory-policy", "allkeys-lru",
        ], LD_LIBRARY_PATH=str(unpacked / "lib" / f"{os.uname().machine}-linux-gnu"))
        wait_until(lambda: path.exists() or not server.alive(), LIMIT_S, "redis-server listens")
        if not server.alive():
            raise server.fail("ended at its start")
        self.client = redis.Redis(unix_socket_path=str(path))
        self.client.ping()
        self.buffers()
        self.view = memoryview(self.areas[0])

    def prepare(self, keys: list[bytes]) -> list[bytes]:
        return keys

    def put(self, keys: list[bytes]) -> None:
        size = self.block_bytes
        for start, stop in self.calls():
            with self.client.pipeline(transaction=False) as pipe:
                for at in range(start, stop):
                    pipe.set(keys[at], self.view[at * size : (at + 1) * size])
                pipe.execute()

    def get(self, keys: list[bytes]) -> None:
        for start, stop in self.calls():
            for at, block in enumerate(self.client.mget(keys[start:stop]), start):
                if block is None:
                    raise RuntimeError("a block is not there")
                ctypes.memmove(self.target + at * self.block_bytes, block, self.block_bytes)

    def find(self, keys: list[bytes]) -> int:
        return self.client.exists(*keys)

    def forget(self, keys: list[bytes]) -> None:
        self.client.delete(*keys)

    def close(self) -> None:
        if hasattr(self, "client"):
            self.client.close()
        super().close()


STORES = {one.__name__.lower(): one for one in (Kvist, Memcpy, Mooncake, Lmcache, Redis)}
