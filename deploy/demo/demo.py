#!/usr/bin/env python3
"""kvist at work: a language model answers questions about one long document.

usage: demo.py [--json] [--keep]

Four engine processes, one after the other, each a real vLLM on the CPU with SmolLM2-135M:
  0  without kvist, for the right answers
  1  cold: reads the document, and stores its KV in kvist
  2  another process: gets that KV from kvist's shared memory
  3  another process, after kvistd was stopped and started again: gets it from NVMe
Run by deploy/quickstart, which builds what this needs. --json prints the result as one object on
the last line. --keep leaves the logs and says where.
"""
import argparse
import dataclasses
import json
import pathlib
import shutil
import signal
import statistics
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "tests" / "engine"))

from harness import paths  # noqa: E402
from harness.daemon import Daemon  # noqa: E402
from harness.engine import BLOCK_TOKENS, Engine, Kvist, Options, Result  # noqa: E402
from harness.process import Failed  # noqa: E402

QUESTIONS = [
    "Who was the first keeper?",
    "Where does the key of the engine house hang?",
    "How long do the batteries carry the lamp?",
]
SYSTEM = (
    "You answer questions about a handbook. Give the answer in one short sentence, in the words of "
    "the handbook."
)
ANSWER_TOKENS = 48
LOAD_BYTES = "vllm:kv_offload_load_bytes"


def say(text: str = "") -> None:
    print(text, flush=True)


class Progress:
    """Says that a long step runs, and how long it took."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __enter__(self) -> None:
        print(f"  {self.what} ...", end=" ", flush=True)
        self.start = time.monotonic()

    def __exit__(self, kind, *_) -> None:
        print("failed" if kind else f"{time.monotonic() - self.start:.1f} s", flush=True)


@dataclasses.dataclass
class Run:
    """What one engine process did."""

    title: str
    results: list[Result]
    again: Result | None = None
    bytes_loaded: float = 0.0


class Demo:
    def __init__(self, directory: pathlib.Path) -> None:
        from transformers import AutoTokenizer

        self.directory = directory
        self.model = paths.model("smollm2")
        self.tokenizer = AutoTokenizer.from_pretrained(self.model)
        document = (HERE / "document.txt").read_text()
        self.prompts = [self.chat(document, question) for question in QUESTIONS]
        self.warm_up = self.chat("A lighthouse warns ships.", "What does it warn?")

    def chat(self, document: str, question: str) -> list[int]:
        messages = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"{document}\n\nQuestion: {question}"},
        ]
        return self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )

    def answer(self, result: Result) -> str:
        return self.tokenizer.decode(result.tokens, skip_special_tokens=True).strip()

    def run(self, number: int, title: str, kvist: Kvist | None, repeat: bool = False) -> Run:
        """One engine process: every question, vLLM's own cache emptied before each."""
        say()
        say(f"Engine {number}: {title}")
        options = Options(model=self.model, kvist=kvist, max_model_len=4096)
        run = Run(title, [])
        with Engine(f"engine{number}", self.directory, options) as engine:
            with Progress("starting vLLM"):
                engine.wait_started()
            self.ask(engine, self.warm_up)
            before = engine.metrics().get(LOAD_BYTES, 0.0)
            for question, prompt in zip(QUESTIONS, self.prompts):
                engine.reset()
                result = self.ask(engine, prompt)
                run.results.append(result)
                say(f"  > {question}")
                say(f"    {self.answer(result)}")
                say(
                    f"    first token after {result.ttft:.3f} s; {result.cached} of "
                    f"{len(prompt)} prompt tokens were hits"
                )
            run.bytes_loaded = engine.metrics().get(LOAD_BYTES, 0.0) - before
            if repeat:
                run.again = self.ask(engine, self.prompts[-1])
                say(f"  > the last question again, from vLLM's own cache: {run.again.ttft:.3f} s")
            engine.quit()
        return run

    @staticmethod
    def ask(engine: Engine, prompt: list[int]) -> Result:
        return engine.generate([prompt], ANSWER_TOKENS, ignore_eos=False)[0]


def play(demo: Demo, daemon: Daemon) -> dict:
    kvist = Kvist(socket=daemon.socket)
    plain = demo.run(0, "without kvist", None)
    say()
    with Progress("Starting kvistd (512 MiB of memory, 1 GiB of NVMe)"):
        daemon.start()
    first = demo.run(1, "cold; stores its KV in kvist", kvist, repeat=True)
    second = demo.run(2, "another process; KV from kvist's memory", kvist)
    say()
    with Progress("Stopping kvistd, which saves to NVMe"):
        status = daemon.stop()
    if status != 0:
        raise Failed(f"kvistd ended with {status}: see {daemon.log}")
    with Progress("Starting kvistd again, with empty memory"):
        daemon.start()
    third = demo.run(3, "after the restart; KV from NVMe", kvist)
    with Progress("Stopping kvistd"):
        daemon.stop()
    return report(demo, plain, first, second, third)


def report(demo: Demo, plain: Run, first: Run, second: Run, third: Run) -> dict:
    right = [r.tokens for r in plain.results]
    runs = [plain, first, second, third]
    equal = all([r.tokens for r in run.results] == right for run in runs)
    equal = equal and first.again.tokens == right[-1]
    document_tokens = len(demo.prompts[0])
    result = {
        "prompt_tokens": document_tokens,
        "block_tokens": BLOCK_TOKENS,
        "hit_tokens": second.results[0].cached,
        "nvme_hit_tokens": third.results[0].cached,
        "plain_ttft_s": plain.results[0].ttft,
        "cold_ttft_s": first.results[0].ttft,
        "local_hit_ttft_s": first.again.ttft,
        "kvist_hit_ttft_s": median_ttft(second.results),
        # Only the first question's: it brings the document back into memory.
        "nvme_hit_ttft_s": third.results[0].ttft,
        "bytes_loaded": int(second.bytes_loaded),
        "nvme_bytes_loaded": int(third.bytes_loaded),
        "outputs_equal": equal,
        "answers": [demo.answer(r) for r in second.results],
    }
    rows = [
        ("without kvist, cold", result["plain_ttft_s"], plain.results[0].cached, 0.0),
        ("with kvist, cold", result["cold_ttft_s"], first.results[0].cached, 0.0),
        ("vLLM's own cache, same process", result["local_hit_ttft_s"], first.again.cached, 0.0),
        ("kvist memory, other process", result["kvist_hit_ttft_s"], result["hit_tokens"],
         second.bytes_loaded / len(QUESTIONS)),
        ("kvist NVMe, daemon restarted", result["nvme_hit_ttft_s"], result["nvme_hit_tokens"],
         third.bytes_loaded / len(QUESTIONS)),
    ]
    say()
    say(f"{'':32}{'first token':>13}{'times faster':>14}{'hit tokens':>12}{'KV loaded':>12}")
    for name, ttft, hits, loaded in rows:
        say(
            f"{name:32}{ttft:>11.3f} s{result['plain_ttft_s'] / ttft:>14.1f}{hits:>12}"
            f"{loaded / 2**20:>8.1f} MiB"
        )
    say(
        f"\nPrompt of {document_tokens} tokens; all answers token by token equal to those without "
        f"a cache: {'yes' if equal else 'NO'}"
    )
    return result


def median_ttft(results: list[Result]) -> float:
    return statistics.median(r.ttft for r in results)


def succeeded(result: dict) -> bool:
    """Equal outputs, and all full blocks of the document were hits in both later processes."""
    full = (result["prompt_tokens"] - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    hits = min(result["hit_tokens"], result["nvme_hit_tokens"])
    return result["outputs_equal"] and hits >= 0.9 * full


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--keep", action="store_true", help="keep the logs and say where")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    daemon = None
    directory = pathlib.Path(tempfile.mkdtemp(prefix="kvist-demo-"))
    try:
        daemon = Daemon(arena_mib=512, nvme_mib=1024)
        result = play(Demo(directory), daemon)
    except (Failed, paths.Missing) as error:
        print(f"\nThe demonstration failed: {error}", file=sys.stderr)
        return 1
    finally:
        if daemon is not None:
            if args.keep:
                daemon.end()
                say(f"Logs: {directory} and {daemon.home}")
            else:
                daemon.close()
        if not args.keep:
            shutil.rmtree(directory, ignore_errors=True)
    ok = succeeded(result)
    if not ok:
        print("The demonstration failed: see the figures above.", file=sys.stderr)
    if args.json:
        print(json.dumps(result))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
