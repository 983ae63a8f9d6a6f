"""Tensor parallelism: two workers, each with its part of every block."""
from harness import expect, prompts
from harness.daemon import Daemon
from harness.engine import Engine, Kvist, Options


def test_two_ranks(tiny, references, logs):
    asked = prompts.chat(salt=81, system_tokens=400, question_count=3)
    reference = references.outputs(asked)
    with Daemon(arena_mib=256) as daemon:
        options = Options(
            model=tiny, kvist=Kvist(daemon.socket), tensor_parallel=2, cpus="0|1",
            multiprocessing=True,
        )
        for name in ("first", "second"):
            with Engine(f"ranks-{name}", logs, options) as engine:
                results = engine.generate(asked)
                expect.right(results, reference, name)
                if name == "second":
                    expect.hits(results[:1], asked[:1])
                    expect.hits_again(engine, asked[0], reference[0])
                expect.stored_once(daemon, asked)
                expect.at_rest(daemon, engines=1)
                engine.quit()
            expect.at_rest(daemon, engines=0)
