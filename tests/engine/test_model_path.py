"""A model that cannot be read: a sentence, and no engine that caches under a wrong identity."""
import os
import pathlib
import shutil

import pytest

from harness import paths
from harness.engine import Kvist, Options
from harness.process import wait_until
from harness.server import Server


def unprivileged() -> list[str]:
    """A prefix for commands that file modes bind, root or not."""
    return ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []


@pytest.fixture()
def copied(tiny, tmp_path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(tiny, tmp_path / "model"))


def test_harness_says_what_it_cannot_read(copied):
    weights = copied / "model.safetensors"
    paths.check_model(copied)
    os.truncate(weights, weights.stat().st_size - 1)
    with pytest.raises(paths.Missing, match="deploy/engine-env makes it again"):
        paths.check_model(copied)
    weights.unlink()
    weights.symlink_to("nowhere")
    with pytest.raises(paths.Missing, match="No such file"):
        paths.check_model(copied)


def test_engine_refuses_weights_that_kvist_cannot_see(copied, logs, tmp_path):
    """vLLM loads what is at the top; kvist would have left out the rest without a word."""
    hidden = copied / "part"
    hidden.mkdir()
    shutil.copy(copied / "model.safetensors", hidden / "part.safetensors")
    hidden.chmod(0)
    options = Options(model=str(copied), kvist=Kvist(str(tmp_path / "kvist.sock")))
    with Server("refused", logs, options, prefix=unprivileged()) as server:
        wait_until(lambda: not server.alive(), 240, "the server ends")
        text = server.log.read_text()
        hidden.chmod(0o755)
        assert server.exit_code() not in (0, None)
        assert f"kvist: {hidden}: Permission denied." in text and "--model" in text
