"""vLLM's OpenAI server as a child, and a client that streams and can walk away."""
import dataclasses
import http.client
import json
import pathlib
import socket
import threading
import time

from . import paths
from .engine import START_LIMIT_S, Options
from .process import Child, wait_until

REQUEST_LIMIT_S = 300.0


@dataclasses.dataclass
class Answer:
    """What one request over HTTP came to. `error` is None when it was answered in full."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    cached: int = 0
    ttft: float | None = None
    wall: float = 0.0
    status: int = 0
    error: str | None = None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def flags(args: dict) -> list[str]:
    """Engine arguments as command-line flags."""
    argv = []
    for name, value in args.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            argv.append(flag)
        elif value is False:
            argv.append("--no-" + flag[2:])
        elif isinstance(value, (dict, list)):
            argv += [flag, json.dumps(value)]
        else:
            argv += [flag, str(value)]
    return argv


class Server(Child):
    """python -m vllm.entrypoints.openai.api_server. ask() may be called by many threads."""

    def __init__(
        self, name: str, directory: pathlib.Path, options: Options, prefix: list[str] | None = None
    ) -> None:
        super().__init__(name, directory)
        self.port = free_port()
        options = dataclasses.replace(options, multiprocessing=True)
        argv = [
            *(prefix or []), paths.engine_python(), "-m", "vllm.entrypoints.openai.api_server",
            "--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", "model",
            "--enable-prompt-tokens-details", "--uvicorn-log-level", "warning",
            *flags(options.engine_args()),
        ]
        self.spawn(argv, options.environment())

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_) -> None:
        self.end()

    def health(self) -> int:
        """The HTTP status of /health; 0 when nothing answers."""
        try:
            return self._call("GET", "/health", limit_s=5.0)[0]
        except (OSError, http.client.HTTPException):
            return 0

    def wait_started(self) -> "Server":
        def up() -> bool:
            if not self.alive():
                raise self.fail("the server did not start")
            return self.health() == 200

        wait_until(up, START_LIMIT_S, f"{self.name} answers /health")
        return self

    def _call(self, method: str, path: str, limit_s: float) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=limit_s)
        try:
            connection.request(method, path)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def reset(self, external: bool = False, running: bool = False) -> bool:
        query = f"reset_external={external}&reset_running_requests={running}".lower()
        status, body = self._call("POST", f"/reset_prefix_cache?{query}", limit_s=30.0)
        return status == 200 and json.loads(body)["success"]

    def post(self, path: str, limit_s: float = 60.0) -> int:
        return self._call("POST", path, limit_s)[0]

    def metric(self, name: str) -> float:
        """The sum of a Prometheus metric over its labels; 0 when it is not there."""
        _, body = self._call("GET", "/metrics", limit_s=10.0)
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in body.decode().splitlines()
            if line.split("{")[0].split(" ")[0] == name
        )

    def ask(self, prompt: list[int], max_tokens: int = 16, leave_after: int | None = None) -> Answer:
        """Stream one completion; with leave_after, disconnect after so many tokens (0: at once)."""
        answer = Answer()
        start = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=REQUEST_LIMIT_S)
        body = {
            "model": "model", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0,
            "ignore_eos": True, "stream": True, "return_token_ids": True,
            "stream_options": {"include_usage": True},
        }
        try:
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
            )
            if leave_after != 0:
                self._read(connection, answer, start, leave_after)
        except (OSError, http.client.HTTPException, ValueError) as error:
            answer.error = repr(error)
        finally:
            connection.close()
        answer.wall = time.perf_counter() - start
        return answer

    @staticmethod
    def _read(connection, answer: Answer, start: float, leave_after: int | None) -> None:
        response = connection.getresponse()
        answer.status = response.status
        if response.status != 200:
            answer.error = response.read().decode(errors="replace")
            return
        finished = False
        for line in response:
            if not line.startswith(b"data: "):
                continue
            if line.strip() == b"data: [DONE]":
                break
            event = json.loads(line[6:])
            if "error" in event:
                answer.error = json.dumps(event["error"])
                return
            for choice in event.get("choices", []):
                got = choice.get("token_ids") or []
                if got and answer.ttft is None:
                    answer.ttft = time.perf_counter() - start
                answer.tokens += got
                finished = finished or choice.get("finish_reason") == "length"
                if choice.get("finish_reason") not in (None, "length"):
                    answer.error = f"ended by {choice['finish_reason']}"  # "abort": a shutdown
            details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
            answer.cached = details.get("cached_tokens") or answer.cached
            if leave_after is not None and len(answer.tokens) >= leave_after:
                return
        if not finished and answer.error is None:  # at a shutdown [DONE] comes all the same
            answer.error = "the stream ended early"


class Load:
    """Clients that ask a server again and again, each in a thread, until they are told to stop.

    Every client goes through all the prompts at its own offset, so that they meet in the cache.
    """

    def __init__(
        self, server: Server, prompts: list[list[int]], clients: int, max_tokens: int = 16
    ) -> None:
        self.server = server
        self.prompts = prompts
        self.max_tokens = max_tokens
        self.answers: list[tuple[int, float, Answer]] = []  # (prompt, when it was asked, answer)
        self.stopping = threading.Event()
        self.lock = threading.Condition()
        self.threads = [
            threading.Thread(target=self._run, args=(i * len(prompts) // clients,), daemon=True)
            for i in range(clients)
        ]

    def __enter__(self) -> "Load":
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    def _run(self, offset: int) -> None:
        turn = 0
        while not self.stopping.is_set():
            index = (offset + turn) % len(self.prompts)
            turn += 1
            asked = time.monotonic()
            answer = self.server.ask(self.prompts[index], self.max_tokens)
            with self.lock:
                self.answers.append((index, asked, answer))
                self.lock.notify_all()
            if answer.error is not None and not self.server.alive():
                return

    def count(self) -> int:
        with self.lock:
            return len(self.answers)

    def wait_more(self, more: int, limit_s: float = 300.0) -> None:
        """Until so many more answers have come than now."""
        with self.lock:
            goal = len(self.answers) + more
            if not self.lock.wait_for(lambda: len(self.answers) >= goal, limit_s):
                raise self.server.fail(f"no {more} answers within {limit_s} s")

    def stop(self) -> None:
        self.stopping.set()
        for thread in self.threads:
            thread.join(REQUEST_LIMIT_S)


def wrong_answers(answers: list[tuple[int, float, Answer]], right: list[list[int]]) -> list[str]:
    """One line for each answer that failed or differs from the reference."""
    lines = []
    for index, _, answer in answers:
        if answer.error is not None:
            lines.append(f"prompt {index}: {answer.error[:200]}")
        elif answer.tokens != right[index]:
            lines.append(f"prompt {index}: {answer.tokens} instead of {right[index]}")
    return lines
