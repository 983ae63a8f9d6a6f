#!/usr/bin/env python3
"""Add up the JUnit files of a test run.

    summarize.py RESULTS_DIR

Prints what failed and what was skipped, then `N passed, N failed, N skipped` alone on the last
line. A test may be skipped only for want of a GPU; any other skip counts as a failure, and so does
a stage that did not get as far as its tests (RESULTS_DIR/failed-stages without a failed test).
"""
import os
import pathlib
import sys
import xml.etree.ElementTree as ElementTree


def has_gpu() -> bool:
    return os.path.exists("/dev/nvidiactl")


def may_skip(name: str) -> bool:
    return "gpu" in name.lower() and not has_gpu()


def read(path: pathlib.Path) -> list[tuple[str, str]]:
    """(name, outcome) of every case, outcome one of passed, failed, skipped."""
    cases = []
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        name = f"{path.stem}: {case.get('classname', '')} {case.get('name', '')}"
        skipped = case.find("skipped") is not None or case.get("status") in ("notrun", "disabled")
        if case.find("failure") is not None or case.find("error") is not None:
            outcome = "failed"
        elif skipped:
            outcome = "skipped"
        else:
            outcome = "passed"
        cases.append((name, outcome))
    return cases


def main() -> int:
    results = pathlib.Path(sys.argv[1])
    cases = [case for path in sorted(results.glob("*.xml")) for case in read(path)]
    failed = [name for name, outcome in cases if outcome == "failed"]
    skipped = [name for name, outcome in cases if outcome == "skipped"]
    failed += [f"{name} (skipped, though it can run here)" for name in skipped if not may_skip(name)]
    skipped = [name for name in skipped if may_skip(name)]

    stages = results / "failed-stages"
    for stage in stages.read_text().split() if stages.exists() else []:
        if not any(name.split(":")[0].endswith(stage) for name in failed):
            failed.append(f"{stage}: the stage did not reach its end; see above")
    for name in failed:
        print(f"failed: {name}")
    for name in skipped:
        print(f"skipped: {name}")
    passed = sum(outcome == "passed" for _, outcome in cases)
    print(f"{passed} passed, {len(failed)} failed, {len(skipped)} skipped")
    return 1 if failed or passed == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
