"""Flip bytes of stored blocks behind kvistd's back, in memory and on NVMe."""
import mmap
import os
import pathlib
import re

SEGMENT = re.compile(r"^/memfd:s[0-9a-f]{8}\b")
# The highest byte of a float32, so that a flipped bit 6 multiplies the number by 2**128.
FLIP_OFFSET = 4 * 1000 + 3
FLIP_MASK = 0x40


def segment_files(pid: int) -> list[str]:
    """A path for every segment of a daemon's, each memory once."""
    found = {}
    for link in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(link)
        except OSError:
            continue
        if SEGMENT.match(target):
            found[os.stat(link).st_ino] = str(link)
    return sorted(found.values())


def flip_in_memory(pid: int, slot_bytes: int) -> int:
    """Flip one byte in every slot that holds something. Returns how many."""
    count = 0
    for path in segment_files(pid):
        with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            for start in range(0, len(memory) - slot_bytes + 1, slot_bytes):
                if any(memory[start : start + 4096]):
                    memory[start + FLIP_OFFSET] ^= FLIP_MASK
                    count += 1
    return count


def flip_on_disk(extents: pathlib.Path, step: int) -> int:
    """Flip one byte in every `step` bytes of every extent file. Returns how many."""
    count = 0
    for path in sorted(p for p in extents.iterdir() if p.is_file()):
        with open(path, "r+b") as file:
            size = path.stat().st_size
            for offset in range(step // 2, size, step):
                file.seek(offset)
                byte = file.read(1)
                if byte:
                    file.seek(offset)
                    file.write(bytes([byte[0] ^ FLIP_MASK]))
                    count += 1
            os.fsync(file.fileno())
    return count
