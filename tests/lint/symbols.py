#!/usr/bin/env python3
"""Check that what our libraries export is ours by name.

A static library may define kvist_* and what protoc-c generates (kvist__wire__*); a shared one,
which others link, exports kvist_* alone; a Python module exports PyInit_* alone.
"""

import argparse
import re
import subprocess
import sys

ALLOWED = {
    "static": re.compile(r"kvist_[a-z0-9]|kvist__wire__"),
    "shared": re.compile(r"kvist_[a-z0-9]"),
    "module": re.compile(r"PyInit_"),
}
# What compilers, linkers and sanitizers put there.
TOOLS = re.compile(r"(_init|_fini|_edata|_end|__bss_start)$|__(odr_)?(asan|tsan|ubsan)")


def exported(nm, kind, library):
    option = "-g" if kind == "static" else "-D"
    text = subprocess.run(
        [nm, option, "--defined-only", library], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    for line in text.splitlines():
        words = line.split()
        if len(words) == 3 and not TOOLS.match(words[2]):
            yield words[2].split("@")[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nm", default="nm")
    parser.add_argument("libraries", nargs="+", help="static:PATH, shared:PATH or module:PATH")
    arguments = parser.parse_args()
    faults = 0
    count = 0
    for argument in arguments.libraries:
        kind, library = argument.split(":", 1)
        names = sorted(set(exported(arguments.nm, kind, library)))
        count += len(names)
        if not names:
            print(f"{library}: exports nothing")
            faults += 1
        for name in names:
            if not ALLOWED[kind].match(name):
                print(f"{library}: exports {name}")
                faults += 1
    print(f"{len(arguments.libraries)} libraries, {count} symbols, {faults} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
