"""Fifty random schedules of requests that are sent again, reordered and lost, and of kills."""

import pytest
from restarts_util import check_schedule


@pytest.mark.parametrize("seed", range(100, 150))
def test_fifty_random_schedules_give_the_weights_of_an_undisturbed_client(killable, double, seed):
    check_schedule(killable, double("qwen3"), seed)
