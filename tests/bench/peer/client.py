#!/usr/bin/env python3
"""One cache, its server and its client: runs the workload when told to, and times it.

    python client.py NAME FD FOLDER BLOCK_BYTES COUNT CALL_BLOCKS

tests/bench/peers starts it and asks over the socket FD, a JSON object a line: {"ask": "open"}, "fill"
(as many turns as it takes to touch all of its memory), "turn", "close". What went wrong is answered
as {"error": text, "wrong": whether bytes were wrong}.
"""
import ctypes
import hashlib
import json
import os
import pathlib
import socket
import sys
import time

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import stores  # noqa: E402

compare = ctypes.CDLL(None).memcmp
compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class WrongBytes(Exception):
    """A block came back as it was not put."""


def randomize(store: stores.Store) -> None:
    """Random bytes at the source, so that no page is shared or merged."""
    ctypes.memmove(store.source, os.urandom(store.count * store.block_bytes),
                   store.count * store.block_bytes)


def stamp(store: stores.Store, keys: list[bytes]) -> None:
    """Blocks that differ from all earlier ones, at both ends."""
    for at, key in enumerate(keys):
        block = store.source + at * store.block_bytes
        ctypes.memmove(block, key, len(key))
        ctypes.memmove(block + store.block_bytes - len(key), key, len(key))


def check(store: stores.Store) -> None:
    """Every byte."""
    for at in range(0, store.count * store.block_bytes, store.block_bytes):
        if compare(store.source + at, store.target + at, store.block_bytes) != 0:
            raise WrongBytes(f"block {at // store.block_bytes} came back with other bytes")


def seconds(work, keys: object) -> float:
    start = time.perf_counter()
    work(keys)
    return time.perf_counter() - start


def turn(store: stores.Store, number: int) -> dict[str, float]:
    """Put new blocks, get them, find them; only that is timed."""
    keys = [hashlib.sha256(f"{number} {at}".encode()).digest() for at in range(store.count)]
    own_keys = store.prepare(keys)
    stamp(store, keys)
    times = {"put": seconds(store.put, own_keys)}
    ctypes.memset(store.target, 0xA5, store.count * store.block_bytes)
    times["get"] = seconds(store.get, own_keys)
    check(store)
    if store.finds:
        store.settle(own_keys)
        start = time.perf_counter()
        found = store.find(own_keys)
        times["find"] = time.perf_counter() - start
        if found != store.count:
            raise RuntimeError(f"found {found} of {store.count} blocks")
    store.forget(own_keys)
    return times


def main() -> None:
    name, fd, folder = sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3])
    store = stores.STORES[name](folder, *map(int, sys.argv[4:7]))
    number = 0
    with socket.socket(fileno=fd) as connection, connection.makefile("rw") as stream:
        for line in stream:
            ask = json.loads(line)["ask"]
            reply: dict = {}
            try:
                if ask == "open":
                    store.open()
                    randomize(store)
                elif ask in ("turn", "fill"):
                    for _ in range(1 if ask == "turn" else store.fill_turns):
                        number += 1
                        reply = turn(store, number)
                else:
                    store.close()
            except Exception as error:  # whatever a foreign client raises is reported, not lost
                reply = {"error": f"{ask}: {error}", "wrong": isinstance(error, WrongBytes)}
            stream.write(json.dumps(reply) + "\n")
            stream.flush()
            if ask == "close":
                break


if __name__ == "__main__":
    main()
