"""One engine, never restarted, while its daemon is missing, killed, stopped and comes back."""
import os
import signal
import threading
import time

import pytest

from harness import expect, prompts
from harness.daemon import Daemon
from harness.engine import Engine, Kvist, Options


@pytest.fixture(scope="module")
def daemon():
    daemon = Daemon(arena_mib=512)
    yield daemon
    daemon.close()


@pytest.fixture(scope="module")
def engine(daemon, tiny, logs):
    """Starts while there is no daemon."""
    with Engine("engine", logs, Options(model=tiny, kvist=Kvist(daemon.socket))) as engine:
        yield engine.wait_started()


@pytest.fixture(scope="module")
def plain(tiny, logs):
    """An engine without kvist, for what is slow on this machine anyway."""
    with Engine("plain", logs, Options(model=tiny)) as engine:
        yield engine.wait_started()


def test_daemon_that_starts_after_the_engine(engine, daemon, references):
    prompt = prompts.tokens(41_000, 3000)
    reference = references.outputs([prompt])
    results = engine.generate([prompt])
    expect.right(results, reference, "no daemon")
    expect.no_hits(results)
    daemon.start()
    expect.hits_again(engine, prompt, reference[0])
    expect.at_rest(daemon, engines=1)


def test_daemon_killed_between_requests(engine, daemon, references):
    prompt = prompts.tokens(42_000, 3000)
    reference = references.outputs([prompt])
    expect.hits_again(engine, prompt, reference[0])
    daemon.kill()
    for _ in range(3):
        engine.reset()
        expect.right(engine.generate([prompt]), reference, "the daemon is dead")
    daemon.start()
    expect.hits_again(engine, prompt, reference[0])
    expect.at_rest(daemon, engines=1)


def test_daemon_killed_again_and_again_under_load(engine, daemon, references):
    """A thread kills and starts the daemon while the engine computes, stores and loads."""
    some = prompts.chat(salt=43, system_tokens=2000, question_count=6)
    reference = references.outputs(some)
    stopping = threading.Event()
    failures = []

    def torment() -> None:
        try:
            while not stopping.wait(0.4):
                daemon.kill()
                if stopping.wait(0.2):
                    break
                daemon.start()
        except AssertionError as error:
            failures.append(error)

    thread = threading.Thread(target=torment)
    thread.start()
    try:
        end = time.monotonic() + 20
        while time.monotonic() < end:
            engine.reset()
            expect.right(engine.generate(some, serial=False), reference, "under kills")
    finally:
        stopping.set()
        thread.join()
    assert not failures, failures[0]
    if not daemon.alive():
        daemon.start()
    expect.hits_again(engine, some[0], reference[0])
    expect.at_rest(daemon, engines=1)


def test_daemon_stopped(engine, daemon, plain, references):
    """SIGSTOP: what is stored still hits, what is not is computed, and nothing waits."""
    known = prompts.tokens(44_000, 4000)
    reference = references.outputs([known])
    expect.hits_again(engine, known, reference[0])
    fresh = [prompts.tokens(44_100 + i, 1000) for i in range(8)]
    fresh_reference = references.outputs(fresh)
    plain_slowest = max(r.ttft for r in plain.generate(fresh))
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        engine.reset()
        results = engine.generate([known])
        expect.right(results, reference, "stopped")
        expect.hits(results, [known])
        results = engine.generate(fresh)
        expect.right(results, fresh_reference, "stopped")
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    slowest = max(r.ttft for r in results)
    assert slowest < 2 * plain_slowest + 0.25, f"{slowest:.3f} s, plain {plain_slowest:.3f} s"
    expect.hits_again(engine, fresh[0], fresh_reference[0])
    expect.at_rest(daemon, engines=1)


def test_orderly_stop_and_start(engine, daemon, references):
    prompt = prompts.tokens(45_000, 2000)
    reference = references.outputs([prompt])
    expect.hits_again(engine, prompt, reference[0])
    assert daemon.stop() == 0
    engine.reset()
    expect.right(engine.generate([prompt]), reference, "the daemon has ended")
    daemon.start()
    expect.hits_again(engine, prompt, reference[0])
    expect.at_rest(daemon, engines=1)
