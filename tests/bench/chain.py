#!/usr/bin/env python3
"""Probe, lease and release of a chain of 512 keys from Python, in a batch and key by key.

    PYTHONPATH=build/site python chain.py SOCKET SALT COUNT RUNS SECONDS

The pool and its COUNT keys are those that `bench_rows fill` made with the same salt and blocks of
4 KiB. Prints lines as bench_rows does, microseconds a chain.
"""
import os
import random
import statistics
import struct
import sys
import time

import kvist

CHAIN = 512
MASK = (1 << 64) - 1


def key(number: int, salt: int) -> bytes:
    """The same as kvist_bench_key()."""
    return struct.pack(
        "<4Q",
        (number ^ salt) * 0x9E3779B97F4A7C15 & MASK,
        (number + salt) * 0xBF58476D1CE4E5B9 & MASK,
        number,
        salt,
    )


def batch(pool: kvist.Pool, keys: list[bytes]) -> float:
    packed = kvist.pack_keys(keys)
    start = time.perf_counter()
    pool.probe(packed)
    leases, _ = pool.acquire(packed)
    leases.release()
    elapsed = time.perf_counter() - start
    if len(leases) != CHAIN:
        raise SystemExit("a chain was not whole")
    return elapsed


def one_by_one(pool: kvist.Pool, keys: list[bytes]) -> float:
    start = time.perf_counter()
    for one in keys:
        pool.probe(one)
        leases, _ = pool.acquire(one)
        leases.release()
    return time.perf_counter() - start


def wait_mapped(pool: kvist.Pool, salt: int, count: int) -> None:
    """Segments are mapped in the background: until then what lies in them is a miss."""
    end = time.monotonic() + 20.0
    for first in range(1, count - CHAIN, CHAIN):
        packed = kvist.pack_keys([key(first + i, salt) for i in range(CHAIN)])
        found = 0
        while found < CHAIN:
            leases, _ = pool.acquire(packed)
            leases.release()
            found = len(leases)
            if found < CHAIN:
                if time.monotonic() > end:
                    raise SystemExit(f"only {found} keys of a chain are found")
                time.sleep(0.01)


def main() -> None:
    socket, salt, count, runs, seconds = sys.argv[1], *map(int, sys.argv[2:5]), float(sys.argv[5])
    client = kvist.Client(kvist.ENGINE, os.urandom(16), socket, name="bench")
    client.wait(10.0)
    fields = [("engine", b"kvist bench"), ("salt", struct.pack("<Q", salt))]
    pool = client.open_pool(fields, 4096)
    pool.wait(10.0)
    wait_mapped(pool, salt, count)
    for _ in range(runs):
        for name, ask in (("chain_batch", batch), ("chain_keys", one_by_one)):
            times = []
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                first = random.randrange(1, count - CHAIN)
                times.append(ask(pool, [key(first + i, salt) for i in range(CHAIN)]))
            print(f"row={name} figure={1e6 * statistics.median(times):.1f}", flush=True)
    pool.close()
    client.close()


if __name__ == "__main__":
    main()
