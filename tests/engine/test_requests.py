"""Requests that end early, are preempted, or are computed in pieces."""
import pytest

from harness import expect, prompts
from harness.daemon import Daemon
from harness.engine import Engine, Kvist, Options

# 12,800 tokens, while 16 requests of 938 run: some are preempted. And one of 8,000 fits.
GPU_BLOCKS = 100


@pytest.fixture(scope="module")
def daemon():
    with Daemon(arena_mib=512) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def engine(daemon, tiny, logs):
    options = Options(
        model=tiny,
        kvist=Kvist(daemon.socket),
        max_num_batched_tokens=512,
        max_model_len=8192,
        more={"num_gpu_blocks_override": GPU_BLOCKS},
    )
    with Engine("small", logs, options) as engine:
        yield engine.wait_started()


def test_chunked_prefill(engine, daemon, references):
    """8,000 tokens in steps of 512: stores happen between the steps of one prompt."""
    long = prompts.twenty(salt=2)[0:1]
    reference = references.outputs(long)
    expect.right(engine.generate(long), reference, "cold")
    engine.reset()
    results = engine.generate(long)
    expect.right(results, reference, "hits")
    expect.hits(results, long)
    expect.at_rest(daemon, engines=1)


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 6, 12])
def test_abort_while_computing(engine, daemon, references, steps):
    """Aborted before the first step, within the prefill, between prefill and decode, in decode."""
    prompt = prompts.tokens(31_000 + steps, 2000)
    engine.abort(prompt, steps=steps)
    expect.at_rest(daemon, engines=1)
    reference = references.outputs([prompt])
    for what in ("after the abort", "and again"):
        engine.reset()
        expect.right(engine.generate([prompt]), reference, what)
    expect.at_rest(daemon, engines=1)


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_abort_while_loading(engine, daemon, references, steps):
    """The same, of a request whose prompt is a hit: after lookup, allocation, during the load."""
    prompt = prompts.tokens(32_000, 4000)
    reference = references.outputs([prompt])
    expect.hits_again(engine, prompt, reference[0])
    engine.reset()
    engine.abort(prompt, steps=steps)
    expect.at_rest(daemon, engines=1)
    engine.reset()
    results = engine.generate([prompt])
    expect.right(results, reference, "after the abort")
    expect.hits(results, [prompt])
    expect.at_rest(daemon, engines=1)


def test_preemption(engine, daemon, references):
    """More requests than blocks: some are thrown out, and start again, with hits."""
    many = prompts.chat(salt=3, system_tokens=0, question_count=16, question_tokens=890)
    reference = references.outputs(many, max_tokens=48)
    before = engine.metrics()["vllm:num_preemptions"]
    for what in ("cold", "with hits"):
        engine.reset()
        expect.right(engine.generate(many, max_tokens=48, serial=False), reference, what)
    assert engine.metrics()["vllm:num_preemptions"] > before, "nothing was preempted"
    expect.at_rest(daemon, engines=1)


def test_reset_while_requests_run(engine, daemon, references):
    """reset_prefix_cache with its requests running: they are preempted, and come out right."""
    many = prompts.chat(salt=4, system_tokens=1000, question_count=4)
    reference = references.outputs(many)
    results = engine.command(
        "generate_with_reset", prompts=many, max_tokens=16, steps=4, external=True
    )["results"]
    assert [r["tokens"] for r in results] == reference
    engine.reset()
    expect.right(engine.generate(many), reference, "after the reset")
    expect.at_rest(daemon, engines=1)
