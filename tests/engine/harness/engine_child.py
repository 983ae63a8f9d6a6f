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


class Child:
    def __init__(self, options: dict) -> None:
        from vllm import LLM

        self.llm = LLM(**options)
        self.engine = self.llm.llm_engine
        # Only an engine without a process of its own has to be stepped until it is idle.
        self.core = getattr(self.engine.engine_core, "engine_core", None)
        self.request_count = 0

    def params(self, max_tokens: int):
        from vllm import SamplingParams

        return SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )

    def add(self, tokens: list[int], max_tokens: int) -> str:
        self.request_count += 1
        name = f"r{self.request_count}"
        self.engine.add_request(name, {"prompt_token_ids": tokens}, self.params(max_tokens))
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

    def generate(self, prompts: list[list[int]], max_tokens: int, serial: bool) -> dict:
        start = time.perf_counter()
        groups = [[p] for p in prompts] if serial else [prompts]
        results = []
        for group in groups:
            running: dict[str, dict] = {}
            order = []
            for tokens in group:
                name = self.add(tokens, max_tokens)
                order.append(name)
                running[name] = {
                    "start": time.perf_counter(), "ttft": None, "tokens": [], "cached": 0,
                    "finished": False,
                }
            while self.engine.has_unfinished_requests():
                self.step(running)
            results += [running[name] for name in order]
        wall_s = time.perf_counter() - start
        self.until_idle()
        for result in results:
            del result["start"]
        return {"results": results, "wall_s": wall_s}

    def abort(self, tokens: list[int], max_tokens: int, steps: int) -> dict:
        """Add a request, step the engine, abort the request, let the engine go idle."""
        name = self.add(tokens, max_tokens)
        running = {name: {"start": 0.0, "ttft": None, "tokens": [], "cached": 0, "finished": False}}
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
