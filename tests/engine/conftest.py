"""Fixtures of the engine tests. Engines take 12 s to start: modules share them where they can."""
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from harness import paths  # noqa: E402
from harness.references import References  # noqa: E402


@pytest.fixture(scope="session")
def tiny() -> str:
    return paths.model("tiny")


@pytest.fixture(scope="session")
def references(tiny, tmp_path_factory):
    """Right outputs of the model tiny."""
    with References(tiny, tmp_path_factory.mktemp("references")) as references:
        yield references


@pytest.fixture(scope="module")
def logs(tmp_path_factory, request) -> pathlib.Path:
    """Where a module's engines write their logs; pytest keeps it after a failure."""
    return tmp_path_factory.mktemp(pathlib.Path(request.node.name).stem)
