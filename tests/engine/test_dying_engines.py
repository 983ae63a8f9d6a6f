"""Engines that are killed, or whose worker does not do what it should."""
import pytest

from harness import expect, prompts
from harness.daemon import Daemon
from harness.engine import Engine, Kvist, Options


@pytest.fixture(scope="module")
def daemon():
    with Daemon(arena_mib=512) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def survivor(daemon, tiny, logs):
    with Engine("survivor", logs, Options(model=tiny, kvist=Kvist(daemon.socket))) as engine:
        yield engine.wait_started()


def check_stored(engine, references, asked) -> None:
    """Whatever kvist holds of the prompts now, their outputs through it are right."""
    for prompt, right in zip(asked, references.outputs(asked)):
        engine.reset()
        expect.right(engine.generate([prompt]), [right], "from what was left behind")


def test_engine_killed_while_it_stores(survivor, daemon, tiny, references, logs):
    asked = [prompts.tokens(51_000 + i, 3000) for i in range(10)]
    references.outputs(asked)
    with Engine("victim", logs, Options(model=tiny, kvist=Kvist(daemon.socket))) as victim:
        victim.wait_started()
        before = daemon.metric(daemon.COMMITS)
        victim.send("generate", prompts=asked, max_tokens=16, serial=True, ignore_eos=True)
        daemon.wait_metric(
            daemon.COMMITS, lambda n: n >= before + 40, 60, "the victim is in the middle of it"
        )
        victim.kill()
    expect.at_rest(daemon, engines=1, limit_s=5)
    check_stored(survivor, references, asked)
    expect.at_rest(daemon, engines=1)


@pytest.mark.parametrize("every", [1, 3])
def test_worker_that_skips_copies(survivor, daemon, tiny, references, logs, every):
    """KVIST_TEST_SKIP_COPY=n: the plugin's worker leaves out every n-th block that it is to copy."""
    asked = [prompts.tokens(52_000 + 100 * every + i, 2000) for i in range(6)]
    reference = references.outputs(asked)
    options = Options(
        model=tiny, kvist=Kvist(daemon.socket), env={"KVIST_TEST_SKIP_COPY": str(every)}
    )
    with Engine(f"skips{every}", logs, options) as engine:
        for what in ("stores", "loads"):
            engine.wait_started().reset()
            expect.right(engine.generate(asked), reference, what)
        engine.quit()
    if every == 1:
        survivor.reset()
        results = survivor.generate(asked)
        expect.no_hits(results)
        expect.right(results, reference, "nothing was stored")
    check_stored(survivor, references, asked)
    expect.at_rest(daemon, engines=1)
