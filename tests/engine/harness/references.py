"""Right outputs: those of an engine without kvist and without any prefix cache.

Kept in a file under the cache, by everything that they depend on; a second run needs no engine.
"""
import hashlib
import json
import os
import pathlib
import platform

from . import paths
from .engine import Engine, Options

FORMAT = 1


class References:
    """Reference outputs of one model at one data type.

    The engine is started when the first output is not known yet, and lives until close().
    """

    def __init__(self, model: str, directory: pathlib.Path, dtype: str = "float32") -> None:
        self.options = Options(model=model, dtype=dtype, prefix_caching=False)
        self.directory = directory
        what = [
            FORMAT, paths.vllm_version(), paths.fingerprint(model), dtype,
            self.options.max_num_batched_tokens, platform.machine(), cpu_flags(),
        ]
        name = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:24]
        self.file = paths.cache_dir() / "references" / f"{name}.json"
        self.engine: Engine | None = None
        self.known: dict[str, list[int]] = {}
        if self.file.exists():
            self.known = json.loads(self.file.read_text())

    @staticmethod
    def _name(prompt: list[int], max_tokens: int) -> str:
        return hashlib.sha256(json.dumps([prompt, max_tokens]).encode()).hexdigest()[:32]

    def outputs(self, prompts: list[list[int]], max_tokens: int = 16) -> list[list[int]]:
        names = [self._name(p, max_tokens) for p in prompts]
        missing = {n: p for n, p in zip(names, prompts) if n not in self.known}
        if missing:
            if self.engine is None:
                self.engine = Engine("reference", self.directory, self.options)
            results = self.engine.generate(list(missing.values()), max_tokens)
            self.known |= {n: r.tokens for n, r in zip(missing, results)}
            self._save()
        return [self.known[n] for n in names]

    def __enter__(self) -> "References":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        if self.engine is not None:
            self.engine.end()
            self.engine = None

    def _save(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        temp = self.file.with_suffix(f".{os.getpid()}")
        temp.write_text(json.dumps(self.known))
        temp.replace(self.file)


def cpu_flags() -> str:
    """The instruction set decides the order of float additions."""
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("flags", "Features")):
            return hashlib.sha256(line.encode()).hexdigest()[:16]
    return "unknown"
