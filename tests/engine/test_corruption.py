"""Bits that flip in stored blocks: verification finds them; without it, wrong KV shows."""
import pytest

from harness import corrupt, expect, prompts
from harness.daemon import Daemon
from harness.engine import BLOCK_TOKENS, Engine, Kvist, Options

# The tiny model in float32: 4 layers, keys and values, 4 heads of 32, 4 bytes each.
SLOT_BYTES = BLOCK_TOKENS * 4 * 2 * 4 * 32 * 4


@pytest.fixture(scope="module")
def asked():
    return [prompts.tokens(61_000 + i, 2000) for i in range(4)]


@pytest.fixture()
def daemon():
    with Daemon(arena_mib=256, nvme_mib=256) as daemon:
        yield daemon


def fill(daemon, engine, asked, reference) -> int:
    expect.right(engine.generate(asked), reference, "cold")
    blocks = expect.stored_once(daemon, asked)
    daemon.wait_metric(daemon.CHECKSUMS, lambda n: n >= blocks, 30, "all checksums are taken")
    return blocks


def ask_one_by_one(engine, asked):
    results = []
    for prompt in asked:
        engine.reset()
        results += engine.generate([prompt])
    return results


def test_flipped_in_memory(daemon, tiny, references, logs, asked):
    reference = references.outputs(asked)
    options = Options(model=tiny, kvist=Kvist(daemon.socket, verify="never"))
    with Engine("trusting", logs, options) as engine:
        blocks = fill(daemon, engine, asked, reference)
        assert corrupt.flip_in_memory(daemon.pid, SLOT_BYTES) >= blocks
        results = ask_one_by_one(engine, asked)
        # The negative control: the flip is of a kind that this test sees.
        expect.hits(results, asked)
        assert all(r.tokens != right for r, right in zip(results, reference))
        engine.quit()
    options = Options(model=tiny, kvist=Kvist(daemon.socket, verify="always"))
    with Engine("verifying", logs, options) as engine:
        results = ask_one_by_one(engine, asked)
        expect.right(results, reference, "verified")
        assert engine.metrics()["vllm:kvist_corrupt_blocks"] > 0
        expect.right(ask_one_by_one(engine, asked), reference, "verified again")
        # kvistd was told of each, found the flips itself, counted and dropped the blocks.
        daemon.wait_metric(daemon.CONFIRMED, lambda n: n >= blocks, 30, "flips that kvistd confirms")
        assert daemon.metric(daemon.MISMATCHES) == daemon.metric(daemon.CONFIRMED)
        for prompt, right in zip(asked, reference):
            expect.hits_again(engine, prompt, right)
        engine.quit()
    expect.at_rest(daemon, engines=0)


def test_flipped_on_disk(daemon, tiny, references, logs, asked):
    reference = references.outputs(asked)
    options = Options(model=tiny, kvist=Kvist(daemon.socket, verify="never"))
    with Engine("engine", logs, options) as engine:
        fill(daemon, engine, asked, reference)
        assert daemon.stop() == 0
        assert corrupt.flip_on_disk(daemon.nvme / "extents", SLOT_BYTES // 2) > 0
        daemon.start()
        daemon.wait_metric("kvist_nvme_loading", lambda n: n == 0, 30, "the index is read back")
        assert daemon.metric("kvist_nvme_blocks") > 0
        expect.right(ask_one_by_one(engine, asked), reference, "after flips on disk")
        daemon.wait_metric(
            daemon.CORRUPT_ON_DISK, lambda n: n > 0, 10, "the flips were found and counted"
        )
        expect.hits_again(engine, asked[0], reference[0])
        engine.quit()
    expect.at_rest(daemon, engines=0)
