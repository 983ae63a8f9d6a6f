#!/usr/bin/env python3
"""Check who includes whom, how long files and functions are, that the top level holds rooms, and that
nothing goes by the wall clock, which people and NTP set.

The table below is that of the rooms: a file may include what its room may, and third-party headers
only where they belong. Prints one line a fault; the exit status is 1 when there is any.
"""

import argparse
import ast
import os
import re
import sys
import tempfile

ROOMS = {
    "proto": {"proto"},
    "storage": {"proto", "storage"},
    "daemon": {"proto", "storage", "daemon"},
    "client": {"proto", "client"},
    "cuda": {"proto", "cuda"},
    "deploy": set(),
    "tests": {"proto", "storage", "daemon", "client", "cuda", "tests"},
}

# What else may stand at the top, beside dotfiles and what .gitignore names.
TOP = r"(README|CONTRIBUTING)\.md|LICENSE|CMake(Lists\.txt|Presets\.json)|build.*|dist|.*\.egg-info"

# A third-party header, and the files that may include it. Tests may include anything.
THIRD_PARTY = [
    (r"(protobuf-c/|google/protobuf)", r"proto/wire/"),
    (r"kvist\.pb-c\.h$", r"(proto/wire|daemon|client)/"),
    (r"openssl/", r"proto/key/key\.c$"),
    (r"xxhash\.h$", r"proto/key/checksum\.c$|storage/"),
    (r"rocksdb/", r"storage/"),
    (r"event2/|event\.h$", r"daemon/"),
    (r"systemd/", r"daemon/"),
    (r"ini\.h$", r"daemon/"),
    (r"(Python\.h$|structmember\.h$)", r"client/python/"),
    (r"cuda(_[a-z_]+)?\.h$|nvtx3/", r"cuda/(.*/)?[^/]*cuda[^/]*$|cuda/.*\.cuh?$"),
    (r"CUnit/", r"tests/"),
]
# Whose installed headers may be included beyond ROOMS. The Python binding stands on both libraries.
PUBLIC = [(r"cuda/", "client"), (r"client/python/", "cuda")]
# Folders of other rooms that a file may include, each with its reason.
EXCEPTIONS = [
    # `kvist replay` runs the policies of kvistd. They are a library that needs proto/ alone.
    (r"client/tool/replay", "storage/policy/"),
]
STANDALONE = ["storage/policy/"]
ONE_FILE = {"rocksdb/": "RocksDB"}

LIBC = set(
    """
    aio alloca argp arpa/inet assert byteswap ctype dirent dlfcn elf endian err errno fcntl features
    fenv float fnmatch ftw getopt glob grp ifaddrs inttypes iso646 langinfo libgen limits link
    locale malloc math mntent net/if netdb netinet/in netinet/tcp paths poll pthread pwd regex sched
    semaphore setjmp signal spawn stdalign stdarg stdatomic stdbool stddef stdint stdio stdlib
    stdnoreturn string strings sys/auxv sys/epoll sys/eventfd sys/file sys/inotify sys/ioctl
    sys/mman sys/mount sys/param sys/pidfd sys/poll sys/prctl sys/ptrace sys/random sys/resource
    sys/select sys/sendfile sys/signalfd sys/socket sys/stat sys/statfs sys/statvfs sys/syscall
    sys/sysinfo sys/sysmacros sys/time sys/timerfd sys/types sys/ucontext sys/uio sys/un sys/user
    sys/utsname sys/vfs sys/wait sys/xattr syscall sysexits syslog termios threads time uchar ucontext
    unistd utime wchar wctype execinfo cpuid immintrin emmintrin arm_neon cstddef cstdint cstring
    cstdio """.split()
)

FILE_LINES_MAX = 800
FUNCTION_LINES_MAX = 70
TEST_FUNCTION_LINES_MAX = 120
C_SUFFIXES = (".c", ".h", ".cu", ".cuh")
PY_SUFFIXES = (".py",)

# What reads the wall clock, or waits until it shows something; and who may, each with its reason.
WALL_CLOCK = re.compile(
    r"""\bCLOCK_(REALTIME|TAI)|\bTIME_UTC\b|\bgettimeofday\s*\(|(?<![\w.>])time\s*\(|\bsem_timedwait\s*\(|
    \bpthread_(mutex|rwlock)_\w*timed\w*\s*\(|\btime\.time(_ns)?\b|\bdatetime\b|\bTFD_TIMER_CANCEL""",
    re.VERBOSE,
)
CONDITION = re.compile(r"\bpthread_cond_timedwait\s*\(")  # goes by the clock that its attribute says
MONOTONIC = re.compile(r"\bpthread_condattr_setclock\s*\([^;]*CLOCK_MONOTONIC")
WALL_CLOCK_USERS = {"daemon/logging.c": "lines say when"}

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
NOT_CODE = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL)


def source_files(root):
    """Paths of all sources in the rooms, relative to the root, sorted."""
    for room in ROOMS:
        for folder, folders, names in os.walk(os.path.join(root, room)):
            folders[:] = sorted(
                name for name in folders if name[0] != "." and not name.startswith("build")
            )
            for name in sorted(names):
                if name.endswith(C_SUFFIXES + PY_SUFFIXES):
                    yield os.path.relpath(os.path.join(folder, name), root)


def public_room(root, header):
    """Room whose installed headers have <kvist/...>, or None."""
    for room in ROOMS:
        if os.path.exists(os.path.join(root, room, "include", header)):
            return room
    return None


def third_party_fault(path, header):
    """A sentence when the header may not be here, else None; and whether it is in the table."""
    for pattern, allowed in THIRD_PARTY:
        if re.match(pattern, header):
            if path.startswith("tests/") or re.match(allowed, path):
                return None, True
            return f"third-party header {header} does not belong here", True
    return None, False


def standalone_fault(path, header):
    """A sentence when a folder that others link alone needs more of its own room, else None."""
    for folder in STANDALONE:
        if path.startswith(folder) and not header.startswith((folder, "proto/")):
            return f"{folder} may include proto/ and itself alone"
    return None


def include_fault(root, path, quote, header):
    """A sentence when the file may not include the header, else None."""
    room = path.split("/")[0]
    fault, known = third_party_fault(path, header)
    if known:
        return fault
    if header.startswith("kvist/"):
        owner = public_room(root, header)
        if owner is None:
            return f"no room installs <{header}>"
        if owner in ROOMS[room] or any(re.match(at, path) and owner == to for at, to in PUBLIC):
            return None
        return f"{room}/ may not include {owner}/'s <{header}>"
    if quote == '"':
        owner = header.split("/")[0]
        if owner not in ROOMS:
            beside = os.path.join(root, os.path.dirname(path), header)
            return None if os.path.exists(beside) else f'"{header}" is in no room'
        if owner in ROOMS[room]:
            return standalone_fault(path, header)
        if any(re.match(at, path) and header.startswith(to) for at, to in EXCEPTIONS):
            return None
        return f"{room}/ may not include {owner}/"
    if header.removesuffix(".h") in LIBC or header.startswith("linux/"):
        return None
    return f"<{header}> is neither libc's nor in the table of tests/lint/layering.py"


def check_includes(root, path, lines, users):
    for number, line in enumerate(lines, 1):
        match = INCLUDE.match(line)
        if not match:
            continue
        for prefix, what in ONE_FILE.items():
            if match[2].startswith(prefix) and not path.startswith("tests/"):
                users.setdefault(what, set()).add(path)
        fault = include_fault(root, path, match[1], match[2])
        if fault:
            yield f"{path}:{number}: {fault}"


def blank(match):
    """Keep the lines of what is no code, and nothing else."""
    return "\n" * match[0].count("\n") or " "


def c_functions(text):
    """(line, lines) of each function body: a brace at the top level after a closing parenthesis."""
    code = re.sub(r'extern\s+"C"\s*\{', " ", text)
    code = NOT_CODE.sub(blank, code)
    code = re.sub(r"^\s*#(?:.*\\\n)*.*$", blank, code, flags=re.MULTILINE)
    depth, start, before, line = 0, None, "", 1
    for character in code:
        if character == "\n":
            line += 1
        elif character == "{":
            if depth == 0 and ")" in before and "=" not in before:
                start = line
            depth += 1
        elif character == "}":
            depth = max(0, depth - 1)
            if depth == 0:
                if start is not None:
                    yield start, line - start + 1
                start, before = None, ""
                continue
        if depth == 0:
            before = "" if character == ";" else before + character


def python_functions(text):
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.lineno, node.end_lineno - node.lineno + 1


def check_sizes(path, text):
    lines = text.count("\n")
    if lines > FILE_LINES_MAX:
        yield f"{path}: {lines} lines; {FILE_LINES_MAX} are allowed"
    most = TEST_FUNCTION_LINES_MAX if path.startswith("tests/") else FUNCTION_LINES_MAX
    functions = python_functions if path.endswith(PY_SUFFIXES) else c_functions
    for line, count in functions(text):
        if count > most:
            yield f"{path}:{line}: function of {count} lines; {most} are allowed"


def check_clocks(path, text):
    if path.startswith("tests/") or path in WALL_CLOCK_USERS:
        return
    code = NOT_CODE.sub(blank, text) if path.endswith(C_SUFFIXES) else text
    for number, line in enumerate(code.split("\n"), 1):
        if WALL_CLOCK.search(line):
            yield f"{path}:{number}: the wall clock jumps; kvist_clock_now_us() does not"
        if CONDITION.search(line) and not MONOTONIC.search(code):
            yield f"{path}:{number}: waits by the wall clock; pthread_condattr_setclock() comes first"


def check_tree(root):
    """All faults of a tree, and the number of files that were looked at."""
    users, count = {}, 0
    faults = [
        f"{name} is no room, and none of the files of the top level"
        for name in sorted(os.listdir(root))
        if name not in ROOMS and name[0] != "." and not re.fullmatch(TOP, name)
    ]
    for path in source_files(root):
        with open(os.path.join(root, path), encoding="utf-8") as file:
            text = file.read()
        count += 1
        if path.endswith(C_SUFFIXES):
            faults += check_includes(root, path, text.split("\n"), users)
        faults += check_sizes(path, text)
        faults += check_clocks(path, text)
    for what, paths in users.items():
        if len(paths) > 1:
            faults.append(f"{what} belongs into one file, not into {', '.join(sorted(paths))}")
    return faults, count


# Planted faults: path, contents, and what must be said about them (None: nothing).
LONG_BODY = "    call(1);\n" * 69
PLANTED = [
    ("proto/base/good.c", '#include "proto/base/good.h"\n#include <kvist/status.h>\n', None),
    ("proto/base/good.h", "#include <stdint.h>\n", None),
    ("proto/include/kvist/status.h", "#include <stddef.h>\n", None),
    ("proto/base/up.c", '#include "storage/store.h"\n', "may not include storage/"),
    ("proto/base/wire.c", "#include <protobuf-c/protobuf-c.h>\n", "does not belong here"),
    ("proto/key/other.c", "#include <openssl/evp.h>\n", "does not belong here"),
    ("proto/base/odd.c", "#include <zlib.h>\n", "neither libc's"),
    ("proto/base/lost.c", '#include "lost.h"\n', "is in no room"),
    ("proto/base/none.c", "#include <kvist/none.h>\n", "no room installs"),
    ("storage/store.c", '#include "daemon/loop.h"\n', "may not include daemon/"),
    ("storage/one.c", "#include <rocksdb/c.h>\n", "belongs into one file"),
    ("storage/two.c", "#include <rocksdb/c.h>\n", "belongs into one file"),
    ("storage/policy/lru.c", '#include "storage/policy/list.h"\n', None),
    ("storage/policy/deep.c", '#include "storage/store.h"\n', "proto/ and itself alone"),
    ("client/tool/replay_run.c", '#include "storage/policy/list.h"\n', None),
    ("client/tool/replay_deep.c", '#include "storage/store.h"\n', "may not include storage/"),
    ("client/tool/bench.c", '#include "storage/policy/list.h"\n', "may not include storage/"),
    ("daemon/loop.c", '#include <event2/event.h>\n#include "storage/store.h"\n', None),
    ("daemon/peer.c", "#include <kvist/client.h>\n", "may not include client/'s"),
    ("client/include/kvist/client.h", "#include <kvist/status.h>\n", None),
    ("client/lib/loop.c", "#include <event2/event.h>\n", "does not belong here"),
    ("client/python/kvist.c", "#include <Python.h>\n", None),
    ("cuda/copy.c", "#include <kvist/client.h>\n", None),
    ("cuda/deep.c", '#include "client/lib/session.h"\n', "may not include client/"),
    ("cuda/host.c", "#include <cuda_runtime.h>\n", "does not belong here"),
    ("cuda/include/kvist/copy.h", '#include "cuda/device.h"\n', None),
    ("cuda/device.h", "#include <stdint.h>\n", None),
    ("client/python/copy.c", "#include <kvist/copy.h>\n", None),
    ("client/lib/copy.c", "#include <kvist/copy.h>\n", "may not include cuda/'s"),
    ("cuda/copy_cuda.c", "#include <cuda_runtime.h>\n", None),
    ("tests/any.c", '#include "storage/store.h"\n#include <CUnit/CUnit.h>\n', None),
    ("proto/base/fits.c", 'extern "C" {\nint f(int a)\n{\n' + LONG_BODY[13:] + "}\n}\n", None),
    ("proto/base/long.c", "int f(int a)\n{\n" + LONG_BODY + "}\n", "function of 71 lines"),
    ("proto/base/brace.c", "int f(void) {\n/* } */ g('}', \"}\");\n" + LONG_BODY + "}\n", "of 72"),
    ("proto/base/table.c", "int t[] = {\n" + "    F(1),\n" * 100 + "};\n", None),
    ("tests/longer.c", "int f(int a)\n{\n" + LONG_BODY + "}\n", None),
    ("tests/longest.c", "int f(int a)\n{\n" + 2 * LONG_BODY + "}\n", "120 are allowed"),
    ("tests/longest.py", "def f():\n" + "    g()\n" * 120, "120 are allowed"),
    ("daemon/file.c", "int a;\n" * 801, "801 lines"),
    ("README.md", "# kvist\n", None),
    ("proto/base/clock.c", "f(clock_gettime(CLOCK_MONOTONIC, &now), up_time(1), a.time(1));\n", None),
    ("daemon/logging.c", "clock_gettime(CLOCK_REALTIME, &now);\n", None),
    ("daemon/late.c", "clock_gettime(CLOCK_REALTIME_COARSE, &now);\n", "the wall clock jumps"),
    ("storage/late.c", "/* time(NULL) */\nlong now = time (NULL);\n", "late.c:2: the wall clock"),
    ("cuda/late.c", "sem_timedwait(&done, &until);\n", "the wall clock jumps"),
    ("client/python/late.py", "import time\nNOW = time.time()\n", "late.py:2: the wall clock"),
    ("client/lib/wait.c", "pthread_cond_timedwait(&a, &b, &c);\n", "waits by the wall clock"),
    ("client/lib/waits.c", "pthread_condattr_setclock(&a, CLOCK_MONOTONIC);\n"
     "pthread_cond_timedwait(&a, &b, &c);\n", None),
    ("tier_left", "", "is no room"),
]


def self_test():
    """Plant faults in an empty tree, and say which were not seen."""
    with tempfile.TemporaryDirectory() as root:
        for path, contents, _ in PLANTED:
            os.makedirs(os.path.dirname(os.path.join(root, path)), exist_ok=True)
            with open(os.path.join(root, path), "w", encoding="utf-8") as file:
                file.write(contents)
        faults, _ = check_tree(root)
    wrong = []
    for path, _, expected in PLANTED:
        said = [fault for fault in faults if path in fault]
        if (expected is None) != (not said):
            wrong.append(f"{path}: expected {expected}, got {said}")
        elif expected and expected not in said[0]:
            wrong.append(f"{path}: expected {expected}, got {said[0]}")
    return wrong, len(PLANTED)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", nargs="?", default=".", help="top of the source tree")
    parser.add_argument("--self-test", action="store_true", help="check this check")
    arguments = parser.parse_args()
    faults, count = self_test() if arguments.self_test else check_tree(arguments.root)
    for fault in faults:
        print(fault)
    print(f"{count} files, {len(faults)} faults")
    return 1 if faults or count == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
