"""What tests/bench/peers measured: means with confidence intervals, ratios, targets."""
import math
import statistics

import report

FIND_KEYS = 512
WHAT = {"put": "put", "get": "get", "cold": "put into fresh memory", "find": f"find {FIND_KEYS} keys"}
# kvist beside the best of the others; find is a time, so less is better.
TARGETS = {"put": 1.05, "get": 1.15, "cold": 3.0, "find": 1 / 3}
# Student's t for 95 %, by degrees of freedom from 1.
T_95 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
        2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
        2.052, 2.048, 2.045, 2.042)


def interval(values: list[float]) -> tuple[float, float, float]:
    """Geometric mean of two values or more and its 95 % interval, by the t distribution of the logs."""
    logs = [math.log(value) for value in values]
    mean = statistics.fmean(logs)
    t = T_95[min(len(logs) - 1, len(T_95)) - 1]
    half = t * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


class Figures:
    """A figure a round, by size of block, operation and cache: GB/s, for find us."""

    def __init__(self) -> None:
        self.rounds: dict[tuple[int, str, str], list[float]] = {}

    def add(self, size: int, operation: str, name: str, value: float) -> None:
        self.rounds.setdefault((size, operation, name), []).append(value)

    def drop(self, name: str) -> None:
        self.rounds = {key: values for key, values in self.rounds.items() if key[2] != name}

    def others(self, size: int, operation: str) -> list[str]:
        return [key[2] for key in self.rounds
                if key[:2] == (size, operation) and key[2] not in ("kvist", "memcpy")]

    def best(self, size: int, operation: str) -> str | None:
        names = self.others(size, operation)
        sign = -1 if operation == "find" else 1
        return max(names, default=None,
                   key=lambda name: sign * interval(self.rounds[size, operation, name])[0])

    def results(self) -> list[tuple[report.Measured, tuple[float, float, float]]]:
        """kvist beside the best of the others, and the interval of the ratio."""
        made = []
        for size, operation, name in self.rounds:
            best = self.best(size, operation)
            if name != "kvist" or best is None:
                continue
            limits = self.rounds[size, operation, best]
            figures = self.rounds[size, operation, name]
            ratio = interval([a / b for a, b in zip(figures, limits, strict=True)])
            is_time = operation == "find"
            row = report.Row(
                f"peers_{operation}_{size >> 10}k", f"{WHAT[operation]}, {size >> 10} KiB blocks", best,
                "us" if is_time else "GB/s", "times" if is_time else "least", TARGETS[operation],
            )
            notes = {"ratio": ratio[0], "ratio_low": ratio[1], "ratio_high": ratio[2]}
            made.append((report.Measured(row, limits, figures, notes), ratio))
        return made

    def to_json(self) -> list[dict]:
        made = []
        for (size, operation, name), values in self.rounds.items():
            mean, low, high = interval(values)
            made.append({"block_bytes": size, "operation": operation, "cache": name, "rounds": values,
                         "mean": mean, "low": low, "high": high})
        return made

    def table(self) -> list[str]:
        """A line a cache, with 95 % intervals."""
        lines = []
        for size in dict.fromkeys(key[0] for key in self.rounds):
            operations = [one for one in WHAT if (size, one, "kvist") in self.rounds]
            units = {one: "us" if one == "find" else "GB/s" for one in operations}
            lines.append(f"{size >> 10} KiB blocks".ljust(16) + "".join(
                f"{WHAT[one]}, {units[one]}".rjust(30) for one in operations))
            for name in dict.fromkeys(key[2] for key in self.rounds if key[0] == size):
                cells = [self.rounds.get((size, one, name)) for one in operations]
                lines.append(name.ljust(16) + "".join(self.cell(values).rjust(30) for values in cells))
        return lines

    @staticmethod
    def cell(values: list[float] | None) -> str:
        if not values:
            return ""
        mean, low, high = map(report.number, interval(values))
        return f"{mean} ({low}-{high})"
