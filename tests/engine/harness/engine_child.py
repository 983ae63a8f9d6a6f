"""One vLLM engine in a process of its own, driven by JSON lines.

Started by harness.engine.Engine as `python engine_child.py REPLY_FD OPTIONS`. Reads one command a
line from stdin, answers one line on REPLY_FD: {"ok": true, ...} or {"ok": false, "error": "..."}.
stdout and stderr are vLLM's own and go to a log file.

The requests are driven step by step, not by LLM.generate, so that a test can stop at any step, and
so that the time to the first token is taken where a caller sees it.
"""
import json
import os
import sys
import time
import traceback

IDLE_LIMIT_S = 60.0


class Clock:
    """Adds up the time that callers spend in an object's public methods."""

    def __init__(self, target: object) -> None:
        self.target = target
        self.total_s = 0.0  # on the wall
        self.cpu_s = 0.0
        self.depth = 0
        self.names = [
            name
            for name in dir(target)
            if not name.startswith("_") and callable(getattr(target, name))
        ]
        for name in self.names:
            setattr(target, name, self.wrap(getattr(target, name)))

    def wrap(self, method):
        def call(*args, **kwargs):
            if self.depth:
                return method(*args, **kwargs)
            self.depth = 1
            start, cpu = time.perf_counter(), time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                self.total_s += time.perf_counter() - start
                self.cpu_s += time.thread_time() - cpu
                self.depth = 0

        return call

    def remove(self) -> None:
        for name in self.names:
            delattr(self.target, name)


class Child:
    def __init__(self, options: dict) -> None:
        from vllm import LLM

        self.llm = LLM(**options)
        self.engine = self.llm.llm_engine
        # Only an engine without a process of its own has to be stepped until it is idle.
        self.core = getattr(self.engine.engine_core, "engine_core", None)
        self.request_count = 0

    def add(self, tokens: list[int], max_tokens: int, ignore_eos: bool = True) -> str:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=ignore_eos, detokenize=False
        )
        self.request_count += 1
        name = f"r{self.request_count}"
        self.engine.add_request(name, {"prompt_token_ids": tokens}, params)
        return name

    def step(self, running: dict[str, dict]) -> None:
        for output in self.engine.step():
            state = running.get(output.request_id)
            if state is None:
                continue
            tokens = list(output.outputs[0].token_ids)
            if tokens and state["ttft"] is None:
                state["ttft"] = time.perf_counter() - state["start"]
            state["tokens"] = tokens
            if output.num_cached_tokens is not None:
                state["cached"] = output.num_cached_tokens
            state["finished"] = output.finished

    def until_idle(self) -> None:
        """Step an in-process engine until its last store has been reported."""
        if self.core is None:
            return
        limit = time.monotonic() + IDLE_LIMIT_S
        while self.core.scheduler.has_requests():
            self.engine.step()
            if time.monotonic() > limit:
                raise RuntimeError("the engine never idles: a store or load was not reported")

    def start(self, prompts: list[list[int]], max_tokens: int, ignore_eos: bool) -> dict[str, dict]:
        running = {}
        for tokens in prompts:
            start = time.perf_counter()
            name = self.add(tokens, max_tokens, ignore_eos)
            running[name] = {
                "start": start, "ttft": None, "tokens": [], "cached": 0, "finished": False
            }
        return running

    def finish(self, running: dict[str, dict]) -> list[dict]:
        """Step until all are done; their results in the order in which they were started."""
        while self.engine.has_unfinished_requests():
            self.step(running)
        for state in running.values():
            del state["start"]
        return list(running.values())

    def generate(
        self, prompts: list[list[int]], max_tokens: int, serial: bool, ignore_eos: bool
    ) -> dict:
        start = time.perf_counter()
        results = []
        for group in [[p] for p in prompts] if serial else [prompts]:
            results += self.finish(self.start(group, max_tokens, ignore_eos))
        wall_s = time.perf_counter() - start
        self.until_idle()
        return {"results": results, "wall_s": wall_s}

    def generate_with_reset(
        self, prompts: list[list[int]], max_tokens: int, steps: int, external: bool
    ) -> dict:
        """Reset the prefix cache, running requests included, after so many steps."""
        running = self.start(prompts, max_tokens, True)
        for _ in range(steps):
            self.step(running)
        done = self.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=external)
        results = self.finish(running)
        self.until_idle()
        return {"results": results, "done": bool(done)}

    def abort(self, tokens: list[int], max_tokens: int, steps: int) -> dict:
        """Add a request, step the engine, abort the request, let the engine go idle."""
        running = self.start([tokens], max_tokens, True)
        name = next(iter(running))
        for _ in range(steps):
            if not self.engine.has_unfinished_requests():
                break
            self.step(running)
        finished = running[name]["finished"]
        self.engine.abort_request([name])
        self.until_idle()
        return {"finished": finished, "token_count": len(running[name]["tokens"])}

    def reset(self, external: bool, running: bool) -> dict:
        done = self.llm.reset_prefix_cache(
            reset_running_requests=running, reset_connector=external
        )
        self.until_idle()
        return {"done": bool(done)}

    def metrics(self) -> dict:
        values = {}
        for metric in self.llm.get_metrics():
            value = getattr(metric, "value", None)
            if value is not None:
                values[metric.name] = values.get(metric.name, 0) + value
        return {"metrics": values}

    def clocked(self, prompts: list[list[int]], max_tokens: int) -> dict:
        """Run prompts one after the other, vLLM's own cache emptied before each. How many seconds
        each spent in calls of the plugin's manager, all of which are on the scheduler's thread."""
        clock = Clock(self.core.scheduler.connector.connector_scheduler.manager)
        seconds = []
        cpu_seconds = []
        cached = []
        for tokens in prompts:
            self.llm.reset_prefix_cache()
            clock.total_s = clock.cpu_s = 0.0
            result = self.finish(self.start([tokens], max_tokens, True))[0]
            self.until_idle()
            seconds.append(clock.total_s)
            cpu_seconds.append(clock.cpu_s)
            cached.append(result["cached"])
        clock.remove()
        return {"seconds": seconds, "cpu_seconds": cpu_seconds, "cached": cached}

    def sleep(self, level: int) -> dict:
        self.llm.sleep(level=level)
        return {}

    def wake_up(self) -> dict:
        self.llm.wake_up()
        return {}


def main() -> None:
    reply_fd = int(sys.argv[1])
    os.set_inheritable(reply_fd, False)
    replies = os.fdopen(reply_fd, "w", buffering=1)

    def reply(message: dict) -> None:
        replies.write(json.dumps(message) + "\n")

    try:
        child = Child(json.loads(sys.argv[2]))
    except BaseException as error:  # noqa: B036 - whatever it was, the parent has to know
        traceback.print_exc()
        reply({"ok": False, "error": repr(error)})
        raise
    reply({"ok": True, "pid": os.getpid()})
    for line in sys.stdin:
        command = json.loads(line)
        op = command.pop("op")
        if op == "quit":
            break
        try:
            reply({"ok": True, **getattr(child, op)(**command)})
        except Exception as error:  # the parent decides what a failed command means
            traceback.print_exc()
            reply({"ok": False, "error": repr(error)})
    reply({"ok": True})


if __name__ == "__main__":
    main()
