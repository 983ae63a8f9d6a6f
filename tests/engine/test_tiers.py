"""1 GiB of working set through 64 MiB of memory, with NVMe and without."""
import pytest

from harness import expect, paths, prompts
from harness.daemon import Daemon
from harness.engine import Engine, Kvist, Options
from harness.references import References

# The model wide in float32 has 2 MiB a block: 32 of them fit, 8 are a prompt, 512 are all.
PROMPTS = 64
BLOCKS = 8
PROMPT_TOKENS = 128 * BLOCKS + 4


@pytest.fixture(scope="module")
def many():
    return [prompts.tokens(71_000 + i, PROMPT_TOKENS) for i in range(PROMPTS)]


def one_pass(engine, many, reference, what):
    results = []
    for prompt in many:
        engine.reset()
        results += engine.generate([prompt], max_tokens=4)
    expect.right(results, reference, what)
    return results


def test_working_set_beyond_memory(logs, many):
    wide = paths.model("wide")
    with References(wide, logs) as references:
        reference = references.outputs(many, max_tokens=4)
        first = references.outputs(many[:1])
    daemon = Daemon(arena_mib=64, nvme_mib=1536)
    options = Options(model=wide, kvist=Kvist(daemon.socket))
    try:
        daemon.start()
        with Engine("engine", logs, options) as engine:
            one_pass(engine, many, reference, "cold")
            assert daemon.metric(daemon.SPILLS) > 0
            results = one_pass(engine, many, reference, "with NVMe")
            share = sum(r.cached for r in results) / (PROMPTS * PROMPT_TOKENS)
            promotes = daemon.metric(daemon.PROMOTES)
            print(f"hits {share:.2f} of all tokens, {promotes:.0f} blocks from NVMe")
            assert share >= 0.5
            assert promotes >= 0.5 * PROMPTS * BLOCKS
            expect.at_rest(daemon, engines=1)

            daemon.stop()
            daemon.write_config(arena_mib=64, nvme_mib=0, settings={})
            daemon.start()
            expect.hits_again(engine, many[0], first[0])
            for what in ("without NVMe", "without NVMe, again"):
                one_pass(engine, many, reference, what)
            assert daemon.metric("kvist_evictions_total") > 0
            expect.at_rest(daemon, engines=1)
            engine.quit()
        expect.at_rest(daemon, engines=0)
    finally:
        daemon.close()
