"""Restarts of the service: the weights are those of a client that nothing disturbs."""

import time

import pytest
from order_cases import STEP, assert_differ, assert_same, batches
from restarts_util import Call, Client, Killable, check_schedule
from serve_util import Served
from tinker_util import HttpError, RawClient

import tinker
from tinker import types


@pytest.mark.parametrize("seed", range(8))
def test_random_schedules_give_the_weights_of_an_undisturbed_client(killable, double, seed):
    check_schedule(killable, double("qwen3"), seed)


def client_with_a_snapshot(service):
    """A client whose model has taken a step, was saved, and has a sampler."""
    client = Client(service)
    client.begin()
    client.submit(Call(1, "forward_backward", batch=batches(1)[0]))
    client.submit(Call(2, "optim_step"))
    client.submit(Call(3, "save_weights"))
    body = {"model_id": client.model, "seq_id": 4, "sampling_session_seq_id": 0, "kind": "snapshot"}
    client.post_json("save_weights_for_sampler", body)
    client.fetch(f"{client.model}/4")
    return client


def test_an_ended_session_leaves_nothing_but_its_checkpoints(killable):
    client = client_with_a_snapshot(killable)
    state, run = killable.folder / ".state" / client.session, killable.folder / client.model
    assert state.is_dir() and [*run.glob("sampler_weights/.snapshot-*")]
    client.finish()
    end = time.monotonic() + 20
    while state.exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not state.exists()
    assert [path.name for path in run.glob("*/*")] == ["at-3"]


def test_tinkers_client_goes_on_when_the_service_is_killed(killable):
    """Sampling clients keep their weights, futures their ids, and the next step is that of a client that was
    not disturbed."""
    client = tinker.ServiceClient(base_url=killable.url)

    def train(disturb):
        training = client.create_lora_training_client(base_model=killable.model.name, rank=2, seed=5).result()
        prompt = types.ModelInput.from_ints([20, 31, 42, 53])
        values = lambda sampler: sampler.compute_logprobs(prompt).result()[1:]  # noqa: E731
        one, two, three = batches(3)
        training.forward_backward(one, "cross_entropy").result()
        training.optim_step(STEP).result()
        disturb()
        snapshot = training.save_weights_and_get_sampling_client().result()
        inflight = training.save_weights_and_get_sampling_client(kind="inflight").result()
        before = values(snapshot)
        training.forward_backward(two, "cross_entropy").result()  # its gradient is computed again
        disturb()
        step = training.optim_step(STEP)
        disturb()
        assert step.result().metrics["skipped"] == 0
        newest = training.save_weights_and_get_sampling_client(kind="inflight").result()
        disturb()
        assert values(snapshot) == pytest.approx(before, rel=1e-6)
        assert values(inflight) == values(newest) != values(snapshot)
        pending = [training.forward_backward(three, "cross_entropy"), training.optim_step(STEP)]
        sample = snapshot.sample(prompt, 1, types.SamplingParams(max_tokens=50, temperature=0.0, stop=[]))
        disturb()
        losses = [pending[0].result().metrics["loss:sum"], pending[1].result().metrics["grad_norm"]]
        tokens = sample.result().sequences[0].tokens
        return losses, tokens, killable.tensors(training.save_state("end").result().path)

    losses, tokens, wanted = train(lambda: None)
    losses_again, tokens_again, found = train(killable.kill)
    assert losses_again == pytest.approx(losses, rel=1e-9)
    assert tokens_again == tokens and len(tokens) == 50
    assert_same(found, wanted, 1e-10)


def test_a_stopped_service_goes_on_and_refuses_another_base_or_a_second_process(
    killable, models, program, tmp_path
):
    client = Client(killable)
    client.begin()
    client.submit(Call(1, "forward_backward", batch=batches(1)[0]))
    client.submit(Call(2, "optim_step"))
    client.submit(Call(3, "save_weights"))
    first = killable.tensors(client.fetch(f"{client.model}/3")["path"])
    other = [program, models("llama"), "--train", f"folder={killable.folder}"]
    with pytest.raises(RuntimeError, match=r"in use by process.*\(folder\)"):
        Served(*other)
    assert killable.served.stop() == 0
    with pytest.raises(RuntimeError, match="as base model, expected"):
        Served(*other)
    killable.start()
    client.submit(Call(4, "forward_backward", batch=batches(1)[0]))
    client.submit(Call(5, "optim_step"))
    client.submit(Call(6, "save_weights"))
    assert_differ(killable.tensors(client.fetch(f"{client.model}/6")["path"]), first)


def test_a_damaged_journal_fails_only_its_own_model(killable):
    broken, whole = Client(killable), Client(killable)
    for client in (broken, whole):
        client.begin()
        client.submit(Call(1, "forward_backward", batch=batches(1)[0]))
        client.submit(Call(2, "save_weights"))
        client.submit(Call(3, "optim_step"))
        client.fetch(f"{client.model}/3")
    file = killable.folder / ".state" / broken.session / broken.model / "step-3" / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    killable.kill()
    for client in (broken, whole):
        client.submit(Call(4, "save_weights"))
    whole.fetch(f"{whole.model}/4")
    answer = RawClient(killable).result(f"{broken.model}/4", may_fail=True)
    assert answer["category"] == "user"
    for word in ("journal is damaged", "optimizer.safetensors", f"tinker://{broken.model}/weights/at-2"):
        assert word in answer["error"]


def test_without_the_journal_a_restart_ends_the_sessions(program, models, tmp_path):
    service = Killable(program, models("qwen3"), tmp_path, "journal=false")
    client = client_with_a_snapshot(service)
    run = service.folder / client.model
    assert [*run.glob("sampler_weights/.snapshot-*")] and not (service.folder / ".state").exists()
    service.kill()
    with pytest.raises(HttpError, match="410"):
        RawClient(service).post("session_heartbeat", {"session_id": client.session})
    assert [path.name for path in run.glob("*/*")] == ["at-3"]
    service.served.stop()
