"""What the rows mean, and how they are judged and printed."""
import dataclasses
import datetime
import json
import os
import pathlib
import platform
import re
import statistics
from xml.sax.saxutils import quoteattr

# A row fails when the best of its runs is so many times off its target: a cliff is in every run,
# noise is not. Nothing less fails.
CLIFF = 3.0


@dataclasses.dataclass(frozen=True)
class Row:
    name: str
    what: str
    limit: str  # what the limit is; "": the figure stands by itself
    unit: str
    kind: str  # least: figure/limit >= target; times: figure/limit <= target; most: figure <= target
    target: float
    cliff: float = CLIFF
    worst: bool = False  # the largest of all runs counts, not their median


ROWS = [
    Row("get_512k", "get, 512 KiB blocks", "memcpy", "GB/s", "least", 0.92),
    Row("get_2m", "get, 2 MiB blocks", "memcpy", "GB/s", "least", 0.92),
    Row("put_512k", "put, 512 KiB blocks, warm slots", "memcpy", "GB/s", "least", 0.90),
    Row("put_2m", "put, 2 MiB blocks, warm slots", "memcpy", "GB/s", "least", 0.90),
    Row("put_cold", "put, 2 MiB, pool just opened", "memcpy", "GB/s", "least", 0.75),
    Row("two_get_own", "two clients get, own pools", "two memcpys", "GB/s", "least", 0.85),
    Row("two_put_own", "two clients put, own pools", "two memcpys", "GB/s", "least", 0.85),
    Row("two_get_one", "two clients get, one pool", "two memcpys", "GB/s", "least", 0.85),
    Row("two_put_one", "two clients put, one pool", "two memcpys", "GB/s", "least", 0.85),
    Row("get_verify", "get with verify=always, 2 MiB", "copy + XXH3", "GB/s", "least", 0.90),
    Row("probe_hit", "probe one key, hit", "64-byte read", "ns", "times", 2.0),
    Row("probe_miss", "probe one key, miss", "64-byte read", "ns", "times", 2.0),
    Row("chain_c", "probe, lease, release 512 keys, C", "", "us", "most", 100),
    Row("chain_batch", "the same, Python in batches", "", "us", "most", 200),
    Row("chain_keys", "the same, Python key by key", "", "us", "most", 800),
    Row("found_1", "commit posted until found, 1 block", "echo", "us", "times", 2.0, 10),
    Row("found_512", "commit posted until found, 512 blocks", "echo", "us", "times", 4.0, 10),
    Row("loop_commits", "loop CPU a 1,000 commits, batches of 64", "", "ms", "most", 2.0),
    Row("loop_evictions", "loop CPU a 1,000 evicted, 64 sessions", "", "ms", "most", 2.0),
    Row("sessions", "64 busy sessions", "one session", "GB/s", "least", 1.0),
    Row("caller_idle", "longest call, daemon idle", "", "us", "most", 1000, 50, True),
    Row("caller_busy", "longest call, daemon busy", "", "us", "most", 1000, 50, True),
    Row("caller_stopped", "longest call, daemon stopped", "", "us", "most", 1000, 50, True),
    Row("caller_killed", "longest call, daemon killed", "", "us", "most", 1000, 50, True),
    Row("spill", "spill to NVMe, 2 MiB", "fio write", "GB/s", "least", 0.80),
    Row("spill_bytes", "written to the device", "blocks' bytes", "GB", "times", 1.15),
    Row("promote", "promote, 2 MiB, random, 8 in flight", "fio randread", "GB/s", "least", 0.80),
    Row("flat_probe", "probe p99, NVMe tier flat out", "tier idle", "us", "times", 3.0, 30),
    Row("flat_lease", "lease p99, NVMe tier flat out", "tier idle", "us", "times", 3.0, 30),
    Row("flat_commit", "commit p99, NVMe tier flat out", "tier idle", "us", "times", 3.0, 30),
    Row("memory", "memory beyond 512 KiB blocks", "blocks' bytes", "MB", "times", 0.005),
    Row("memory_nvme", "memory for a block on NVMe", "", "B", "most", 160),
    Row("start_ready", "start on a full NVMe tier: serving", "", "s", "most", 1.0, 10),
    Row("start_loaded", "start on a full NVMe tier: all indexed", "", "s", "most", 5.0, 10),
    Row("ttft", "vLLM: first token, kvist has the prefix", "own hit + memcpy", "s", "times", 1.25),
    Row("misses", "vLLM: workload that never hits", "without kvist", "tok/s", "least", 0.98),
    Row("scheduler", "vLLM: plugin p99 a request", "", "ms", "most", 1.0, 30),
    Row("scheduler_stopped", "the same, daemon stopped", "", "ms", "most", 1.0, 30),
]
BY_NAME = {row.name: row for row in ROWS}


@dataclasses.dataclass
class Measured:
    """One row's runs. limits is empty where the figure stands by itself."""

    row: Row
    limits: list[float]
    figures: list[float]
    notes: dict[str, str]

    def judged(self) -> list[float]:
        """What the target is compared with, a value a run."""
        if self.row.kind == "most":
            return self.figures
        return [figure / limit for figure, limit in zip(self.figures, self.limits, strict=True)]

    def value(self) -> float:
        values = self.judged()
        return max(values) if self.row.worst else statistics.median(values)

    def off(self, value: float) -> float:
        """How many times a value misses the target; at most 1 when it is reached."""
        if self.row.kind == "least":
            return self.row.target / value if value > 0 else float("inf")
        return value / self.row.target

    def mark(self) -> str:
        if self.off(self.value()) <= 1:
            return "ok"
        best = min(self.off(value) for value in self.judged())
        return "FAIL" if best >= self.row.cliff else "miss"

    def to_json(self) -> dict:
        values = self.judged()
        return {
            "row": self.row.name, "what": self.row.what, "unit": self.row.unit,
            "limit_is": self.row.limit, "limits": self.limits, "figures": self.figures,
            "judged": self.row.kind, "target": self.row.target, "value": self.value(),
            "min": min(values), "max": max(values), "mark": self.mark(), **self.notes,
        }


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def spread(values: list[float]) -> str:
    text = number(statistics.median(values))
    return text if len(values) == 1 else f"{text} ({number(min(values))}-{number(max(values))})"


def line(measured: Measured) -> str:
    row = measured.row
    limit = f"{number(statistics.median(measured.limits))} {row.unit}" if measured.limits else ""
    of = max if row.worst else statistics.median
    figure = f"{number(of(measured.figures))} {row.unit}"
    sign = ">=" if row.kind == "least" else "<="
    return (f"{row.what:<40} {row.limit:<16} {limit:>12} {figure:>13} "
            f"{spread(measured.judged()):>24} {sign} {number(row.target):<6} {measured.mark()}")


def head() -> str:
    return (f"{'what':<40} {'limit':<16} {'limit':>12} {'figure':>13} "
            f"{'ratio or figure':>24} {'target':<9} mark")


def machine() -> dict[str, str]:
    cpu = re.search(r"^model name\s*: (.*)$", pathlib.Path("/proc/cpuinfo").read_text(), re.M)
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": f"{os.cpu_count()} x {cpu[1] if cpu else platform.machine()}",
        "memory_gib": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f}",
        "kernel": platform.release(),
        "load": "%.1f" % os.getloadavg()[0],
    }


def write_junit(path: str, results: list[Measured]) -> None:
    """A case a row; only a cliff is a failure."""
    with open(path, "w") as file:
        file.write('<?xml version="1.0"?>\n<testsuite name="bench">\n')
        for result in results:
            file.write(f'<testcase classname="bench" name={quoteattr(result.row.name)}>')
            if result.mark() == "FAIL":
                file.write(f"<failure message={quoteattr(line(result))}/>")
            file.write("</testcase>\n")
        file.write("</testsuite>\n")


def to_json(machine: dict, results: list[Measured], skipped: dict[str, str]) -> str:
    rows = [result.to_json() for result in results]
    return json.dumps({"machine": machine, "rows": rows, "skipped": skipped}, indent=1)
