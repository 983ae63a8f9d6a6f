"""vLLM's OpenAI server, with many clients at once."""
import os
import signal
import time

import pytest

from harness import expect, prompts
from harness.daemon import Daemon
from harness.engine import Kvist, Options
from harness.server import Load, Server, wrong_answers

STOPPED_S = 60.0


@pytest.fixture(scope="module")
def daemon():
    with Daemon(arena_mib=768) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def questions():
    return prompts.chat(salt=91, system_tokens=3000, question_count=12)


def options(tiny, daemon, cpus):
    kvist = Kvist(daemon.socket) if daemon is not None else None
    return Options(model=tiny, kvist=kvist, cpus=cpus)


@pytest.fixture(scope="module")
def servers(daemon, tiny, logs):
    """Two servers with kvist, a core each."""
    with (
        Server("a", logs, options(tiny, daemon, "0")) as a,
        Server("b", logs, options(tiny, daemon, "1")) as b,
    ):
        yield a.wait_started(), b.wait_started()


def all_right(load: Load, reference, what: str) -> None:
    wrong = wrong_answers(load.answers, reference)
    assert not wrong, f"{what}: {len(wrong)} of {load.count()} answers\n" + "\n".join(wrong[:10])


def at(ordered: list[float], share: float) -> float:
    return ordered[int(share * (len(ordered) - 1))]


def test_two_servers_under_load(servers, daemon, questions, references):
    a, b = servers
    reference = references.outputs(questions)
    with Load(a, questions, clients=2) as at_a, Load(b, questions, clients=2) as at_b:
        at_a.wait_more(2 * len(questions))
        at_b.wait_more(2 * len(questions))
    all_right(at_a, reference, "server a")
    all_right(at_b, reference, "server b")
    expect.stored_once(daemon, questions)
    for server in servers:
        assert server.reset()
        answer = server.ask(questions[0])
        assert answer.tokens == reference[0]
        assert answer.cached >= 0.9 * expect.full_block_tokens(questions[0])
    expect.at_rest(daemon, engines=2)


def test_clients_that_leave(servers, daemon, references):
    """Disconnect at once, while the prompt is computed, and after some tokens."""
    server = servers[0]
    for number, leave_after in enumerate((0, 0, 1, 2, 8)):
        prompt = prompts.tokens(92_000 + number, 6000)
        server.ask(prompt, max_tokens=64, leave_after=leave_after)
    asked = [prompts.tokens(92_000 + number, 6000) for number in range(5)]
    for prompt, right in zip(asked, references.outputs(asked)):
        answer = server.ask(prompt)
        assert answer.error is None and answer.tokens == right
    expect.at_rest(daemon, engines=2)


def test_daemon_killed_and_started_again(servers, daemon, questions, references):
    a, b = servers
    reference = references.outputs(questions)
    with Load(a, questions, clients=2) as at_a, Load(b, questions, clients=2) as at_b:
        at_a.wait_more(6)
        daemon.kill()
        at_a.wait_more(12)
        at_b.wait_more(12)
        daemon.start()
        at_a.wait_more(12)
        at_b.wait_more(12)
    all_right(at_a, reference, "server a")
    all_right(at_b, reference, "server b")
    for server in servers:
        deadline = time.monotonic() + 60
        cached = 0
        while cached < 0.9 * expect.full_block_tokens(questions[0]):
            assert time.monotonic() < deadline, "no hits after the daemon came back"
            assert server.reset()
            answer = server.ask(questions[0])
            assert answer.tokens == reference[0]
            cached = answer.cached
        assert server.health() == 200
    expect.at_rest(daemon, engines=2)


@pytest.fixture(scope="module")
def plain(servers, tiny, logs):
    """A server without kvist in the place of server b."""
    servers[1].end()
    with Server("plain", logs, options(tiny, None, "1")) as server:
        yield server.wait_started()


def test_daemon_stopped_for_a_minute(servers, plain, daemon, references):
    """Beside a server without kvist under the same load: requests take no longer, none waits."""
    server = servers[0]
    # Questions with a prefix that both know, and with one of their own.
    asked = prompts.chat(salt=93, system_tokens=1000, question_count=10) + [
        prompts.tokens(93_000 + i, 1200) for i in range(10)
    ]
    reference = references.outputs(asked)
    with Load(server, asked, clients=2) as with_kvist, Load(plain, asked, clients=2) as without:
        with_kvist.wait_more(20)
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            since = time.monotonic()
            while time.monotonic() - since < STOPPED_S:
                with_kvist.wait_more(10)
                # Empty both local caches, so that lookups, loads and stores go on.
                server.reset()
                plain.reset()
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
    all_right(with_kvist, reference, "stopped daemon")
    all_right(without, reference, "no daemon")
    # A server without kvist has requests of seconds too, after a reset: what kvist adds shows in
    # the many, and a request that waited for the daemon would have waited for its SIGCONT.
    walls = {
        load.server.name: sorted(a.wall for _, asked_at, a in load.answers if asked_at >= since)
        for load in (with_kvist, without)
    }
    for name, all_walls in walls.items():
        print(f"{name}: {len(all_walls)} requests, median {at(all_walls, 0.5):.2f} s,"
              f" 90 % {at(all_walls, 0.9):.2f} s, slowest {all_walls[-1]:.2f} s")
    for share in (0.5, 0.9):
        assert at(walls["a"], share) < 1.5 * at(walls["plain"], share) + 0.5
    assert walls["a"][-1] < STOPPED_S / 2
    expect.at_rest(daemon, engines=1)


def test_sigterm_under_load(servers, plain, daemon, questions, references):
    """The engine ends at once; kvist has everything back.

    The API server itself may live on: vLLM 0.32 waits for answers that its dead core owes.
    """
    server = servers[0]
    reference = references.outputs(questions)
    with Load(server, questions, clients=2) as load:
        load.wait_more(6)
        server.signal(signal.SIGTERM)
        expect.at_rest(daemon, engines=0, limit_s=30)
        server.signal_all(signal.SIGKILL)
    complete = [answer for answer in load.answers if answer[2].error is None]
    assert len(complete) >= 6
    assert not wrong_answers(complete, reference)


def test_sigkill_under_load(plain, daemon, questions, references, tiny, logs):
    reference = references.outputs(questions)
    with Server("killed", logs, options(tiny, daemon, "0")) as server:
        server.wait_started()
        with Load(server, questions, clients=2) as load:
            load.wait_more(6)
            server.signal_all(signal.SIGKILL)
            server.wait_end(30)
        complete = [answer for answer in load.answers if answer[2].error is None]
        assert len(complete) >= 6
        assert not wrong_answers(complete, reference)
    expect.at_rest(daemon, engines=0, limit_s=30)
