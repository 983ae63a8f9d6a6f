"""Which weights an engine runs: a digest of a model directory's weight files.

Sizes and safetensors headers alone would call two checkpoints of the same shape equal, so bytes are
sampled too: of every tensor of a safetensors file (begin, middle, end), and evenly of other files.
Modification times are left out: a copied model is the same model.
"""

import errno
import hashlib
import json
import os
import struct
from collections.abc import Iterator

from kvist.vllm.config import Refusal

SAMPLE_BYTES = 4096
HEADER_BYTES_MAX = 256 << 20
# Beyond this many tensors in a file one sample a tensor is taken: it bounds the reads of
# mixture-of-experts models, which have tens of thousands.
TENSORS_FULL_MAX = 4096
OTHER_FILE_SAMPLES = 256

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def _read(fd: int, offset: int, count: int) -> bytes:
    data = os.pread(fd, count, offset)
    if len(data) != count:
        raise OSError(f"short read at {offset}")
    return data


def _tensor_samples(begin: int, end: int, full: bool) -> Iterator[tuple[int, int]]:
    """(offset, bytes) to sample of a tensor that lies at [begin, end)."""
    size = end - begin
    if size <= 3 * SAMPLE_BYTES and full:
        yield begin, size
        return
    some = min(SAMPLE_BYTES, size)
    middle = begin + (size - some) // 2
    if full:
        yield begin, some
        yield middle, some
        yield end - some, some
    else:
        yield middle, some


def _safetensors(fd: int, size: int, digest: "hashlib._Hash") -> None:
    (header_bytes,) = struct.unpack("<Q", _read(fd, 0, 8))
    if header_bytes > min(HEADER_BYTES_MAX, size - 8):
        raise OSError("the safetensors header is longer than the file")
    header = _read(fd, 8, header_bytes)
    digest.update(header)
    spans = sorted(
        (entry["data_offsets"][0], entry["data_offsets"][1])
        for name, entry in json.loads(header).items()
        if name != "__metadata__"
    )
    base = 8 + header_bytes
    if spans and base + max(end for _, end in spans) > size:
        raise OSError("the file is shorter than its safetensors header says")
    full = len(spans) <= TENSORS_FULL_MAX
    for begin, end in spans:
        for offset, count in _tensor_samples(base + begin, base + end, full):
            digest.update(_read(fd, offset, count))


def _other(fd: int, size: int, digest: "hashlib._Hash") -> None:
    step = max(SAMPLE_BYTES, size // OTHER_FILE_SAMPLES)
    for offset in range(0, size, step):
        digest.update(_read(fd, offset, min(SAMPLE_BYTES, size - offset)))
    tail = min(SAMPLE_BYTES, size)
    digest.update(_read(fd, size - tail, tail))


def _unreadable(path: str, reason: str) -> Refusal:
    return Refusal(
        f"kvist: {path}: {reason}. Weights that cannot be read cannot be identified, and nothing is "
        "cached for them. Make it readable and complete, or point --model at another directory."
    )


def _file(path: str, name: str, digest: "hashlib._Hash") -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        digest.update(f"{name}\0{size}\0".encode())
        if name.endswith(".safetensors"):
            _safetensors(fd, size, digest)
        else:
            _other(fd, size, digest)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise _unreadable(path, str(error)) from error
    finally:
        os.close(fd)


def _whole(path: str, name: str, digest: "hashlib._Hash") -> None:
    with open(path, "rb") as file:
        data = file.read()
    digest.update(f"{name}\0{len(data)}\0".encode() + data)


def weight_files(directory: str) -> list[str]:
    """Names of weight files, relative, in order: the safetensors ones when there are any."""
    found: list[str] = []

    def fail(error: OSError) -> None:
        raise error  # what cannot be looked at is not left out

    for folder, _, names in os.walk(directory, onerror=fail, followlinks=True):
        relative = os.path.relpath(folder, directory)
        for name in names:
            if name.endswith(WEIGHT_SUFFIXES):
                found.append(os.path.normpath(os.path.join(relative, name)))
    safetensors = [name for name in found if name.endswith(".safetensors")]
    return sorted(safetensors or found)


def fingerprint(path: str, with_code: bool) -> bytes:
    """Digest of a model directory or of a single weight file.

    with_code: also of its Python files, for models that bring their own code.
    """
    digest = hashlib.sha256()
    try:
        if os.path.isfile(path):
            _file(path, os.path.basename(path), digest)
            return digest.digest()
        names = weight_files(path)
        if not names:
            raise Refusal(
                f"kvist: {path} has no weight files ({', '.join(WEIGHT_SUFFIXES)}), so the model "
                "cannot be identified. Point --model at a directory that holds the weights."
            )
        for name in names:
            _file(os.path.join(path, name), name, digest)
        if with_code:
            for name in sorted(os.listdir(path)):
                if name.endswith(".py"):
                    _whole(os.path.join(path, name), name, digest)
    except OSError as error:
        raise _unreadable(error.filename or path, error.strerror or str(error)) from error
    return digest.digest()


def local_path(model: str, revision: str | None) -> str:
    """The directory or file that a model name means on this machine."""
    try:
        os.stat(model)
        return model
    except OSError as error:
        if os.path.isabs(model) or model.startswith((".", "~")) or error.errno != errno.ENOENT:
            raise _unreadable(model, error.strerror or str(error)) from error
    if "://" in model:
        raise Refusal(
            f"kvist: the weights at {model} are not on this machine and cannot be identified. "
            "Copy the model to a local directory, or run without kvist."
        )
    from huggingface_hub import try_to_load_from_cache

    try:
        config = try_to_load_from_cache(model, "config.json", revision=revision)
    except ValueError:  # no repository has such a name
        config = None
    if not isinstance(config, str):
        raise Refusal(
            f"kvist: the model {model} is neither a local path nor in the Hugging Face cache, so "
            "its weights cannot be identified. Download it to a directory, and point --model at that."
        )
    return os.path.dirname(config)
