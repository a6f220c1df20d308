"""Served models, started once a session: the scripted model with both parsers, and a random model."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from script_model import write_script_model
from serve_util import Served


@pytest.fixture(scope="session")
def script_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("script") / "script-model"
    directory.mkdir()
    write_script_model(directory)
    return directory


@pytest.fixture(scope="session")
def scripted(bough_program: Path, script_model: Path) -> Iterator[Served]:
    with Served(bough_program, script_model, "tool_call_parser=hermes", "reasoning_parser=qwen3") as served:
        yield served


@pytest.fixture(scope="session")
def random_model(bough_program: Path, tiny_models) -> Iterator[Served]:
    with Served(bough_program, tiny_models("qwen3"), "rollout.kv_memory=64MiB") as served:
        yield served
