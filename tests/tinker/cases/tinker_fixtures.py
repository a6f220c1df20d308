"""A plug-in of pytest: tiny models and training services, started once a session."""

import os
from pathlib import Path

import pytest
from restarts_util import Killable
from tinker_util import Service
from tiny_models import write_tiny_model


@pytest.fixture(scope="session")
def program() -> Path:
    return Path(os.environ["BOUGH_PROGRAM"])


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """`models("qwen3")` returns a directory with a tiny model."""
    made = {}

    def get(architecture: str) -> Path:
        if architecture not in made:
            made[architecture] = tmp_path_factory.mktemp("model") / architecture
            write_tiny_model(made[architecture], architecture)
        return made[architecture]

    return get


@pytest.fixture(scope="session")
def double(program, models, tmp_path_factory):
    """`double("qwen3")` returns a service in fp64."""
    services = {}

    def get(architecture: str) -> Service:
        if architecture not in services:
            folder = tmp_path_factory.mktemp("double")
            services[architecture] = Service(program, models(architecture), folder, "--dtype", "fp64")
        return services[architecture]

    yield get
    for service in services.values():
        service.stop()


@pytest.fixture(scope="session")
def service(program, models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("service")
    with Service(program, models("qwen3"), folder, "--dtype", "fp32", "max_models=64") as one:
        yield one


@pytest.fixture(scope="module")
def killable(program, models, tmp_path_factory):
    """A service in fp64 that tests kill."""
    service = Killable(program, models("qwen3"), tmp_path_factory.mktemp("killable"), "--dtype", "fp64")
    yield service
    service.served.stop()
