"""A prefix that one engine has computed is a hit in the next, and changes no output."""
import pytest

from harness import expect, prompts
from harness.daemon import Daemon
from harness.engine import Engine, Kvist, Options


@pytest.fixture(scope="module")
def daemon():
    with Daemon(arena_mib=768) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def twenty():
    return prompts.twenty()


@pytest.fixture(scope="module")
def filled(daemon, tiny, twenty, references, logs):
    """kvist holds the twenty prompts of an engine that has ended. Its outputs were right."""
    with Engine("first", logs, Options(model=tiny, kvist=Kvist(daemon.socket))) as engine:
        results = engine.generate(twenty)
        expect.right(results, references.outputs(twenty), "cold engine")
        expect.stored_once(daemon, twenty)
        engine.quit()
    expect.at_rest(daemon, engines=0)


@pytest.fixture(scope="module")
def second(filled, daemon, tiny, logs):
    with Engine("second", logs, Options(model=tiny, kvist=Kvist(daemon.socket))) as engine:
        yield engine.wait_started()


def test_second_engine_gets_hits(second, daemon, twenty, references):
    reference = references.outputs(twenty)
    for prompt, right in zip(twenty, reference):
        second.reset()
        results = second.generate([prompt])
        expect.right(results, [right], "hits, one at a time")
        expect.hits(results, [prompt])
    expect.stored_once(daemon, twenty)
    expect.at_rest(daemon, engines=1)


def test_second_engine_gets_hits_for_all_at_once(second, daemon, twenty, references):
    second.reset()
    results = second.generate(twenty, serial=False)
    expect.right(results, references.outputs(twenty), "hits, all at once")
    expect.hits(results, twenty)
    expect.at_rest(daemon, engines=1)


def test_prefix_of_a_stored_prompt_hits_up_to_where_it_diverges(second, references):
    stem = prompts.twenty()[0]
    shares = (128, 200, 640, 1000, 2047, 4096)
    forks = [prompts.family(9000 + shared, stem, shared, shared + 300) for shared in shares]
    for fork, shared, right in zip(forks, shares, references.outputs(forks)):
        second.reset()
        results = second.generate([fork])
        expect.right(results, [right], f"diverges after {shared} tokens")
        assert results[0].cached == shared // 128 * 128


def test_reset_of_the_external_cache_forgets_for_this_engine_alone(
    second, daemon, tiny, twenty, references, logs
):
    few = twenty[5:9]
    reference = references.outputs(few)
    assert second.reset(external=True)
    results = [second.generate([p])[0] for p in few]
    expect.right(results, reference, "after the reset")
    assert results[0].cached == 0
    with Engine("third", logs, Options(model=tiny, kvist=Kvist(daemon.socket))) as third:
        for prompt, right in zip(few, reference):
            third.reset()
            results = third.generate([prompt])
            expect.right(results, [right], "an engine that was not reset")
            expect.hits(results, [prompt])
        third.quit()
    expect.hits_again(second, few[0], reference[0])
    expect.at_rest(daemon, engines=1)


def test_sleep_and_wake_up(second, daemon, twenty, references):
    """Sleep clears the caches; the CPU platform keeps its weights where they are."""
    few = twenty[5:9]
    second.command("sleep", level=1)
    second.command("wake_up")
    results = [second.generate([p])[0] for p in few]
    expect.right(results, references.outputs(few), "after sleep")
    expect.hits_again(second, few[0], references.outputs(few)[0])
    expect.at_rest(daemon, engines=1)
