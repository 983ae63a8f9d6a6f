"""Where things are: the cache, the engine environment, the models, kvistd, the Python package."""
import functools
import hashlib
import importlib.util
import os
import pathlib
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[3]
BUILD_DIRS = ("build/release", "build/dev", "build")


class Missing(Exception):
    """Something that the tests need is not there; the text says what to do."""


@functools.cache
def cache_dir() -> pathlib.Path:
    """The same place as deploy/engine-env uses."""
    if "KVIST_CACHE" in os.environ:
        return pathlib.Path(os.environ["KVIST_CACHE"]).resolve()
    home = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    return (home / "kvist").resolve()


def vllm_version() -> str:
    return os.environ.get("KVIST_VLLM_VERSION", "0.32.0")


def _engine_env(*args: str) -> str:
    done = subprocess.run(
        [ROOT / "deploy/engine-env", "--quiet", *args], stdout=subprocess.PIPE, text=True
    )
    if done.returncode != 0:
        raise Missing("the engine environment could not be made: run deploy/engine-env")
    return done.stdout.strip().splitlines()[-1]


@functools.cache
def engine_python() -> str:
    return _engine_env()


@functools.cache
def model(name: str) -> str:
    _engine_env("--models", name)
    folder = cache_dir() / "models" / name
    check_model(folder)
    return str(folder)


def check_model(folder: pathlib.Path) -> None:
    """Every file can be read, weights are whole: vLLM takes a minute to say less of it."""
    from safetensors import SafetensorError, safe_open

    try:
        for path in sorted(folder.iterdir()):
            path.open("rb").close()
            if path.suffix == ".safetensors":
                with safe_open(path, "np"):
                    pass
    except (OSError, SafetensorError) as error:
        raise Missing(
            f"the model at {folder} cannot be used: {error}. Make it readable, or remove it: "
            "deploy/engine-env makes it again"
        ) from error


def fingerprint(model_dir: str) -> str:
    """What a model's outputs depend on: its configuration and its weights."""
    digest = hashlib.sha256()
    for path in sorted(pathlib.Path(model_dir).iterdir()):
        if path.name == "config.json" or path.suffix == ".safetensors":
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


@functools.cache
def build_file(variable: str, relative: str) -> str:
    """A built program: from its own variable, from the build directory KVIST_BUILD, else found."""
    if variable in os.environ:
        candidates = [pathlib.Path(os.environ[variable])]
    elif "KVIST_BUILD" in os.environ:
        candidates = [pathlib.Path(os.environ["KVIST_BUILD"]) / relative]
    else:
        candidates = [ROOT / build / relative for build in BUILD_DIRS]
    for path in candidates:
        if os.access(path, os.X_OK):
            return str(path.resolve())
    raise Missing(
        f"{candidates[0]} is not there: cmake --preset release && cmake --build --preset release, "
        f"or set {variable} or KVIST_BUILD"
    )


def kvistd() -> str:
    return build_file("KVISTD", "daemon/kvistd")


def kvist_tool() -> str:
    return build_file("KVIST_TOOL", "client/kvist")


@functools.cache
def python_site() -> str:
    """A directory that holds the installed Python package kvist, for PYTHONPATH."""
    if "KVIST_PYTHON_SITE" in os.environ:
        return os.environ["KVIST_PYTHON_SITE"]
    found = importlib.util.find_spec("kvist")
    if found is not None and found.origin is not None:
        return str(pathlib.Path(found.origin).parents[1])
    site = cache_dir() / "site" / hashlib.sha256(str(ROOT).encode()).hexdigest()[:12]
    _engine_env("--kvist", str(site))
    return str(site)
