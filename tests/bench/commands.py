"""What the benchmarks run beside kvistd, and how they speak to it."""
import json
import pathlib
import re
import subprocess
import sys

MIB = 1 << 20
LIMIT_S = 590
PAIR = re.compile(r"(\w+)=(\S+)")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def pairs_of(text: str) -> dict[str, str]:
    """What a C program printed: `name=value ...`."""
    return dict(PAIR.findall(text))


def program(argv: list[str], **more) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, **more)
    if done.returncode != 0:
        raise RuntimeError(f"{pathlib.Path(argv[0]).name} failed: {done.stderr.strip()[-2000:]}")
    return done.stdout


def fio(kind: str, path: pathlib.Path, size: int, ms: int, block: int = 2 * MIB) -> float:
    """GB/s of direct I/O in blocks, 8 in flight; mixed: a quarter is read."""
    text = program([
        "fio", "--name=limit", f"--filename={path}", f"--size={size}", f"--bs={block}", "--direct=1",
        f"--rw={'randrw' if kind == 'mixed' else kind}", "--rwmixread=25", "--ioengine=libaio",
        "--iodepth=8", "--time_based", f"--runtime={ms}ms", "--output-format=json",
    ])
    job = json.loads(text[text.index("{"):])["jobs"][0]
    return (job["read"]["bw_bytes"] + job["write"]["bw_bytes"]) / 1e9
