"""A plug-in of pytest for the tests of bough.verl: one process of torch.distributed, and tiny models."""

import sys
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from verl.models.transformers import monkey_patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tiny_models import make_tiny_model, write_tiny_model


@pytest.fixture(scope="module", autouse=True)
def one_process(tmp_path_factory):
    monkey_patch.is_trl_available = lambda: False  # this environment's TRL is newer than verl's
    store = tmp_path_factory.mktemp("store") / "file"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, "qwen3")
    return folder


@pytest.fixture(scope="module")
def critic_folder(tmp_path_factory):
    """The tiny model with a head of one label."""
    from transformers import AutoModelForTokenClassification

    folder = tmp_path_factory.mktemp("critic")
    policy = make_tiny_model("qwen3")
    config = deepcopy(policy.config)
    config.num_labels = 1
    critic = AutoModelForTokenClassification.from_config(config)
    critic.model.load_state_dict(policy.model.state_dict())
    torch.manual_seed(3)
    torch.nn.init.normal_(critic.score.weight, std=0.1)
    torch.nn.init.normal_(critic.score.bias)
    critic.save_pretrained(folder)
    return folder
