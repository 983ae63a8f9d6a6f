"""What the tests expect of engines and daemons, said once."""
from .daemon import Daemon
from .engine import BLOCK_TOKENS, Engine, Result
from .process import wait_until

SETTLE_LIMIT_S = 20.0


def right(results: list[Result], reference: list[list[int]], what: str = "") -> None:
    """Every output is the reference's, token by token."""
    wrong = [
        f"prompt {i}: {result.tokens} instead of {tokens}"
        for i, (result, tokens) in enumerate(zip(results, reference, strict=True))
        if result.tokens != tokens
    ]
    assert not wrong, f"{what}: {len(wrong)} of {len(results)} outputs are wrong\n" + "\n".join(wrong)


def full_block_tokens(prompt: list[int]) -> int:
    return len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS


def hits(results: list[Result], prompts: list[list[int]], share: float = 0.9) -> None:
    """At least that share of every prompt's full blocks were hits."""
    short = [
        f"prompt {i} of {len(prompt)} tokens: {result.cached} hit"
        for i, (result, prompt) in enumerate(zip(results, prompts, strict=True))
        if result.cached < share * full_block_tokens(prompt)
    ]
    assert not short, f"{len(short)} of {len(results)} prompts had too few hits\n" + "\n".join(short)


def no_hits(results: list[Result]) -> None:
    assert [r.cached for r in results] == [0] * len(results)


def distinct_blocks(prompts: list[list[int]]) -> int:
    """Full blocks of the prompts, each prefix once."""
    return len(
        {
            hash(tuple(prompt[:end]))
            for prompt in prompts
            for end in range(BLOCK_TOKENS, len(prompt) + 1, BLOCK_TOKENS)
        }
    )


def stored_once(
    daemon: Daemon, prompts: list[list[int]], share: float = 0.95, limit_s: float = SETTLE_LIMIT_S
) -> int:
    """The daemon holds the prompts' blocks, each of them once. Returns how many.

    A few may be missing: an engine that has no free slot left does not wait for one.
    """
    most = distinct_blocks(prompts)
    least = int(share * most)
    what = f"{least} to {most} blocks stored"
    blocks = daemon.wait_metric(daemon.BLOCKS, lambda n: n >= least, limit_s, what)
    assert blocks <= most, f"{blocks} blocks stored, expected: {what}"
    return int(blocks)


def at_rest(daemon: Daemon, engines: int, limit_s: float = SETTLE_LIMIT_S) -> None:
    """Nothing is leased; what engines hold in grants is only theirs that live."""
    daemon.wait_metric(daemon.SESSIONS, lambda n: n == engines, limit_s, f"{engines} sessions")
    daemon.wait_metric(daemon.LEASED, lambda n: n == 0, limit_s, "no lease left")
    if engines == 0:
        daemon.wait_metric(daemon.GRANTED, lambda n: n == 0, limit_s, "no grant left")


def hits_again(
    engine: Engine, prompt: list[int], reference: list[int], limit_s: float = 60.0
) -> None:
    """Asking again and again comes to hits from kvist, and is right all the time."""

    def hit() -> bool:
        engine.reset()
        results = engine.generate([prompt])
        right(results, [reference], "while waiting for hits")
        return results[0].cached >= 0.9 * full_block_tokens(prompt)

    wait_until(hit, limit_s, "the engine gets hits from kvist again")
