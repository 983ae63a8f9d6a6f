"""A daemon that is killed under real engines, whose memory the service manager keeps. No NVMe."""
import threading

import pytest

from harness import expect, prompts
from harness.daemon import KeptDaemon
from harness.engine import Engine, Kvist, Options


@pytest.fixture(scope="module")
def daemon():
    daemon = KeptDaemon(arena_mib=512)
    daemon.start()
    yield daemon
    daemon.close()


@pytest.fixture(scope="module")
def options(daemon, tiny):
    return Options(model=tiny, kvist=Kvist(daemon.socket))


@pytest.fixture(scope="module")
def engine(options, logs):
    with Engine("engine", logs, options) as engine:
        yield engine.wait_started()


def test_an_engine_that_comes_later_hits_what_was_there(engine, options, daemon, references, logs):
    some = prompts.chat(salt=91, system_tokens=2000, question_count=6)
    reference = references.outputs(some)
    expect.right(engine.generate(some), reference, "cold")
    blocks = expect.stored_once(daemon, some)
    daemon.kill()
    assert daemon.adopted()[-1] == blocks == daemon.metric(daemon.BLOCKS)
    with Engine("later", logs, options) as later:
        results = later.wait_started().generate(some)
        expect.right(results, reference, "after the restart, an engine that never computed them")
        expect.hits(results, some)
    engine.reset()
    results = engine.generate(some)
    expect.right(results, reference, "after the restart, the engine that did")
    expect.hits(results, some)
    expect.at_rest(daemon, engines=1)


def test_killed_again_and_again_under_load(engine, daemon, references):
    """The engine computes, stores and loads meanwhile, and in the end all of it is there."""
    some = prompts.chat(salt=92, system_tokens=2000, question_count=6)
    reference = references.outputs(some)
    kept = daemon.metric(daemon.BLOCKS)
    stopping = threading.Event()
    failures: list[AssertionError] = []

    def torment() -> None:
        try:
            while not stopping.wait(0.3):
                daemon.kill()
        except AssertionError as error:
            failures.append(error)

    thread = threading.Thread(target=torment)
    thread.start()
    try:
        for _ in range(8):
            engine.reset()
            expect.right(engine.generate(some), reference, "kvistd is killed")
    finally:
        stopping.set()
        thread.join()
    assert not failures, failures[0]
    adopted = daemon.adopted()
    print(f"{len(adopted)} kills, {adopted[-1]} blocks kept")
    assert len(adopted) >= 5
    assert min(adopted) >= kept
    # Nothing was stored while it was away: what is missing now is stored again.
    for prompt, tokens in zip(some, reference):
        expect.hits_again(engine, prompt, tokens)
    expect.at_rest(daemon, engines=1)
