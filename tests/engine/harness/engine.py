"""Real vLLM engines on CPUs: options, and engines that a test drives step by step."""
import dataclasses
import json
import os
import pathlib
import select
import signal
import subprocess

from . import paths
from .process import Child

CHILD = str(pathlib.Path(__file__).with_name("engine_child.py"))
START_LIMIT_S = 300.0
COMMAND_LIMIT_S = 300.0
BLOCK_TOKENS = 128


@dataclasses.dataclass
class Kvist:
    """How an engine is told to use kvist: vLLM's official options and our extra keys."""

    socket: str
    verify: str | None = None
    tenant: str | None = None
    extra: dict = dataclasses.field(default_factory=dict)
    offloading_gib: int = 1

    def engine_args(self) -> dict:
        ours = {"socket": self.socket, **self.extra}
        if self.verify is not None:
            ours["verify"] = self.verify
        if self.tenant is not None:
            ours["tenant"] = self.tenant
        return {
            "kv_offloading_size": self.offloading_gib,
            "kv_transfer_config": {
                "kv_connector_module_path": "kvist.vllm",
                "kv_connector_extra_config": {
                    "spec_name": "KvistOffloadingSpec",
                    "spec_module_path": "kvist.vllm",
                    **ours,
                },
            },
        }


@dataclasses.dataclass
class Options:
    """One engine's settings. float32: see README.md, "Equal outputs"."""

    model: str
    kvist: Kvist | None = None
    prefix_caching: bool = True
    dtype: str = "float32"
    max_model_len: int = 16384
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 4096
    kv_gib: int = 1
    tensor_parallel: int = 1
    cpus: str | None = None
    multiprocessing: bool = False
    more: dict = dataclasses.field(default_factory=dict)
    env: dict = dataclasses.field(default_factory=dict)

    def engine_args(self) -> dict:
        args = {
            "model": self.model,
            "dtype": self.dtype,
            "seed": 0,
            "enforce_eager": True,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "enable_prefix_caching": self.prefix_caching,
            "tensor_parallel_size": self.tensor_parallel,
        }
        if self.kvist is not None:
            args |= self.kvist.engine_args()
        return args | self.more

    def environment(self) -> dict[str, str]:
        env = dict(os.environ)
        env.update(
            VLLM_CPU_KVCACHE_SPACE=str(self.kv_gib),
            VLLM_ENABLE_V1_MULTIPROCESSING="1" if self.multiprocessing else "0",
            VLLM_NO_USAGE_STATS="1",
            VLLM_SERVER_DEV_MODE="1",
            HF_HUB_OFFLINE="1",
            TOKENIZERS_PARALLELISM="false",
            # Threads that spin at barriers cost a busy machine a factor of ten: see README.md.
            OMP_WAIT_POLICY="PASSIVE",
        )
        env.pop("KVIST_SOCKET", None)
        if self.cpus is not None:
            env["VLLM_CPU_OMP_THREADS_BIND"] = self.cpus
        if self.kvist is not None:
            env["PYTHONPATH"] = os.pathsep.join(
                filter(None, [paths.python_site(), env.get("PYTHONPATH")])
            )
        env.update(self.env)
        return env


@dataclasses.dataclass
class Result:
    """One request's outcome."""

    tokens: list[int]
    cached: int
    ttft: float | None
    finished: bool = True


class Engine(Child):
    """An offline vllm.LLM in a fresh process. One caller's thread."""

    def __init__(self, name: str, directory: pathlib.Path, options: Options) -> None:
        super().__init__(name, directory)
        self.options = options
        reply_read, reply_write = os.pipe()
        self.replies = os.fdopen(reply_read)
        args = {**options.engine_args(), "disable_log_stats": False}
        argv = [paths.engine_python(), CHILD, str(reply_write), json.dumps(args)]
        try:
            self.spawn(
                argv, options.environment(), stdin=subprocess.PIPE, pass_fds=[reply_write], text=True
            )
        finally:
            os.close(reply_write)
        self.started = False

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_) -> None:
        self.end()

    def _reply(self, limit_s: float) -> dict:
        ready, _, _ = select.select([self.replies], [], [], limit_s)
        if not ready:
            raise self.fail(f"no answer within {limit_s} s")
        line = self.replies.readline()
        if not line:
            raise self.fail("the engine died")
        reply = json.loads(line)
        if not reply.pop("ok"):
            raise self.fail(f"the engine said {reply['error']}")
        return reply

    def wait_started(self) -> "Engine":
        if not self.started:
            self._reply(START_LIMIT_S)
            self.started = True
        return self

    def send(self, op: str, **arguments) -> None:
        """Give a command without waiting; receive() has its answer."""
        self.wait_started()
        self.process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
        self.process.stdin.flush()

    def receive(self, limit_s: float = COMMAND_LIMIT_S) -> dict:
        return self._reply(limit_s)

    def command(self, op: str, limit_s: float = COMMAND_LIMIT_S, **arguments) -> dict:
        self.send(op, **arguments)
        return self.receive(limit_s)

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int = 16,
        serial: bool = True,
        ignore_eos: bool = True,
    ) -> list[Result]:
        """Run the prompts, one after the other or all at once."""
        reply = self.command(
            "generate", prompts=prompts, max_tokens=max_tokens, serial=serial, ignore_eos=ignore_eos
        )
        return [Result(**r) for r in reply["results"]]

    def abort(self, prompt: list[int], steps: int, max_tokens: int = 16) -> dict:
        return self.command("abort", tokens=prompt, max_tokens=max_tokens, steps=steps)

    def reset(self, external: bool = False, running: bool = False) -> bool:
        """Empty vLLM's own prefix cache, and the connector's when external."""
        return self.command("reset", external=external, running=running)["done"]

    def metrics(self) -> dict[str, float]:
        return self.command("metrics")["metrics"]

    def quit(self, limit_s: float = 60.0) -> None:
        if self.alive():
            self.send("quit")
            self.wait_end(limit_s)
        self.end()

    def end(self) -> None:
        super().end()
        if not self.replies.closed:
            self.replies.close()

    def kill(self) -> None:
        """SIGKILL to the engine and all its workers; returns once they are gone."""
        self.signal_all(signal.SIGKILL)
        self.wait_end(30.0)
