"""Two models of one shape, one after the other at one path, share nothing."""
import shutil

from harness import expect, paths, prompts
from harness.daemon import Daemon
from harness.engine import Engine, Kvist, Options
from harness.references import References


def test_other_weights_at_the_same_path(tiny, references, logs, tmp_path):
    asked = [prompts.tokens(85_000 + i, 1500) for i in range(4)]
    place = tmp_path / "model"
    other = paths.model("tiny-other")
    with References(other, logs) as other_references:
        other_reference = other_references.outputs(asked)
    reference = references.outputs(asked)
    assert reference != other_reference
    with Daemon(arena_mib=256) as daemon:
        shutil.copytree(tiny, place)
        options = Options(model=str(place), kvist=Kvist(daemon.socket))
        with Engine("weights-1", logs, options) as engine:
            expect.right(engine.generate(asked), reference, "the first weights")
            expect.hits_again(engine, asked[0], reference[0])
            engine.quit()
        shutil.rmtree(place)
        shutil.copytree(other, place)
        with Engine("weights-2", logs, options) as engine:
            for prompt, right in zip(asked, other_reference):
                engine.wait_started().reset()
                results = engine.generate([prompt])
                expect.no_hits(results)
                expect.right(results, [right], "the second weights")
            expect.hits_again(engine, asked[0], other_reference[0])
            engine.quit()
        assert daemon.metric("kvist_pools") == 2
        expect.at_rest(daemon, engines=0)
