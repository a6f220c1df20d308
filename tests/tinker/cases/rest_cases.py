"""Lists, checkpoints and downloads with Tinker's RestClient, its command line and the cookbook."""

import json
import os
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from click.testing import CliRunner
from order_cases import STEP, batches
from safetensors.torch import load_file
from tinker.cli.__main__ import main_cli
from tinker_cookbook import weights
from tinker_util import HttpError, RawClient, Service, paths_in

import tinker
from tinker import types


@pytest.fixture(scope="module")
def served(program, models, tmp_path_factory):
    """A service of its own, whose lists have nothing else."""
    with Service(program, models("qwen3"), tmp_path_factory.mktemp("rest"), "--dtype", "fp32") as one:
        yield one


@pytest.fixture(scope="module")
def rest(served):
    return tinker.RestClient(base_url=served.url)


@pytest.fixture(scope="module")
def run(served):
    """A training client after a step, with a checkpoint of each kind."""
    client = served.train(rank=3, user_metadata={"note": "first"})
    client.forward_backward(batches(1)[0], "cross_entropy")
    client.optim_step(STEP)
    paths = [
        client.save_state("one", user_metadata={"step": "1"}).result().path,
        client.save_weights_for_sampler("two").result().path,
        client.save_weights_external("three", ttl_seconds=7200).result().path,
    ]
    return client, paths


def command_line(served, *arguments):
    """The JSON that `tinker` prints."""
    done = CliRunner(env={"TINKER_BASE_URL": served.url}).invoke(main_cli, ["--format", "json", *arguments])
    assert done.exit_code == 0, (done.output, done.exception)
    return json.loads(done.stdout) if done.stdout.strip() else None


def test_a_training_run_and_its_checkpoints_are_listed(served, rest, run):
    client, paths = run
    found = rest.get_training_run(client.model_id).result()
    assert (found.training_run_id, found.base_model) == (client.model_id, served.model.name)
    assert (found.is_lora, found.lora_rank, found.user_metadata) == (True, 3, {"note": "first"})
    assert found.last_checkpoint.tinker_path == paths[0]
    assert found.last_sampler_checkpoint.tinker_path == paths[1]
    assert rest.get_training_run_by_tinker_path(paths[2]).result() == found
    checkpoints = rest.list_checkpoints(client.model_id).result().checkpoints
    assert [each.tinker_path for each in checkpoints] == paths
    assert [each.checkpoint_type for each in checkpoints] == ["training", "sampler", "external"]
    assert checkpoints[0].user_metadata == {"step": "1"} and checkpoints[2].expires_at is not None
    assert all(each.size_bytes > 1000 and not each.public for each in checkpoints)
    info = rest.get_weights_info_by_tinker_path(paths[0]).result()
    assert (info.lora_rank, info.train_unembed, info.is_lora) == (3, True, True)


def test_lists_have_pages(served, rest, run):
    names = [served.train(rank=1) for _ in range(4)]
    others = [client.save_state("x").result().path for client in names]
    runs = rest.list_training_runs(limit=2, offset=1).result()
    assert (runs.cursor.limit, runs.cursor.offset, runs.cursor.total_count) == (2, 1, 5)
    everything = rest.list_training_runs().result().training_runs
    assert runs.training_runs == everything[1:3] and len(everything) == 5
    page = rest.list_user_checkpoints(limit=4).result()
    rest_of = rest.list_user_checkpoints(limit=4, offset=4).result()
    found = [each.tinker_path for each in page.checkpoints + rest_of.checkpoints]
    assert sorted(found) == sorted(run[1] + others) and page.cursor.total_count == 7
    assert rest.list_user_checkpoints(offset=100).result().checkpoints == []


def test_sessions_are_listed_newest_first(served, rest, run):
    client = tinker.ServiceClient(
        base_url=served.url, user_metadata={"by": "me"}, display_name="a new session"
    )
    session = client.holder.get_session_id()
    sampler = client.create_sampling_client(base_model=served.model.name).result()
    training = client.create_lora_training_client(base_model=served.model.name, rank=1).result()
    listed = rest.list_sessions(limit=1).result().sessions
    assert listed == [session]
    found = rest.get_session(session).result()
    assert found.training_run_ids == [training.model_id]
    assert found.sampler_ids == [sampler._sampling_session_id]
    assert (found.user_metadata, found.display_name) == ({"by": "me"}, "a new session")
    assert rest.get_sampler(found.sampler_ids[0]).result().base_model == served.model.name
    client.close("success").result()
    assert session not in rest.list_sessions().result().sessions
    with pytest.raises(tinker.NotFoundError):
        rest.get_session(session).result()


@pytest.mark.parametrize(
    "query",
    [
        "limit=0",
        "limit=1001",
        "limit=-1",
        "limit=two",
        "offset=-1",
        "offset=1.5",
        "limit=",
        "page=2",
        "limit=99999999999999999999",
        "access_scope=all",
        "project_id=p",
    ],
)
@pytest.mark.parametrize("route", ["training_runs", "checkpoints", "sessions"])
def test_a_bad_query_is_refused_by_name(served, route, query):
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"{served.url}/api/v1/{route}?{query}")
    assert caught.value.code == 400
    assert query.partition("=")[0] in json.loads(caught.value.read())["detail"]


def test_a_run_without_checkpoints_leaves_the_list_with_its_session(served, rest):
    client = tinker.ServiceClient(base_url=served.url)
    training = client.create_lora_training_client(base_model=served.model.name, rank=1).result()
    assert rest.get_training_run(training.model_id).result().last_checkpoint is None
    client.close("success").result()
    with pytest.raises(tinker.NotFoundError):
        while True:  # until the computation thread has freed the model
            rest.get_training_run(training.model_id).result()


def test_the_command_line_lists_publishes_and_deletes(served, run):
    client, _ = run
    path = client.save_state("cli").result().path
    assert path in [each["tinker_path"] for each in command_line(served, "checkpoint", "list")["checkpoints"]]
    ids = [each["training_run_id"] for each in command_line(served, "run", "list")["runs"]]
    assert client.model_id in ids
    assert command_line(served, "run", "info", client.model_id)["lora_rank"] == 3
    command_line(served, "checkpoint", "publish", path)
    assert command_line(served, "checkpoint", "info", path)["public"] is True
    command_line(served, "checkpoint", "unpublish", path)
    command_line(served, "checkpoint", "set-ttl", path, "--ttl", "7200")
    info = command_line(served, "checkpoint", "info", path)
    assert info["public"] is False and info["expires_at"]
    assert command_line(served, "checkpoint", "delete", "--yes", path)["deleted_count"] == 1
    left = command_line(served, "checkpoint", "list", "--run-id", client.model_id)["checkpoints"]
    assert path not in [each["tinker_path"] for each in left]


def same_adapter(folder, served, path):
    mine, theirs = load_file(folder / "adapter_model.safetensors"), served.tensors(path)
    assert mine.keys() == theirs.keys()
    assert all((mine[name] == theirs[name]).all() for name in mine)
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 3


def test_the_command_line_and_the_cookbook_download_checkpoints(served, run, tmp_path):
    _, paths = run
    command_line(served, "checkpoint", "download", paths[0], "--output", str(tmp_path))  # by an export
    name = paths[0].removeprefix("tinker://").replace("/", "_")
    same_adapter(tmp_path / name, served, paths[0])
    weights.download(tinker_path=paths[2], output_dir=str(tmp_path / "cookbook"), base_url=served.url)
    same_adapter(tmp_path / "cookbook", served, paths[2])
    assert not list((tmp_path / "cookbook").glob("checkpoint.json"))
    exports = [each for each in paths_in(served.folder) if each.parent.name == "external_weights"]
    assert not [each for each in exports if each.name == "download"]


def test_a_download_link_opens_only_its_checkpoints_files(served, rest, run):
    _, paths = run
    urls = rest.get_external_weights_urls(paths[2]).result().urls
    assert sorted(urls) == ["adapter_config.json", "adapter_model.safetensors"]
    config = urls["adapter_config.json"]
    assert json.load(urllib.request.urlopen(config))["r"] == 3
    folder, secret = config.rsplit("/", 1)[0], config.rsplit("/", 2)[1]
    names = ["checkpoint.json", "", "..", "../../weights/one/adapter_config.json", "%2e%2e/x", "none"]
    for url in (
        *(f"{folder}/{name}" for name in names),
        folder,
        folder.replace(secret, secret[:-1]),
        folder.replace(secret, ""),
        config.replace(secret, "0" * 32),
    ):
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(url)
        assert caught.value.code == 404, url
    rest.get_external_weights_urls(paths[2]).result()
    with pytest.raises(urllib.error.HTTPError):  # a new link replaces the old one
        urllib.request.urlopen(config)


def test_a_long_file_is_downloaded_whole(served, rest, run):
    _, paths = run
    content = os.urandom(9_000_001)
    (served.checkpoint(paths[2]) / "more.bin").write_bytes(content)
    with urllib.request.urlopen(rest.get_external_weights_urls(paths[2]).result().urls["more.bin"]) as answer:
        assert answer.headers["Content-Length"] == str(len(content))
        assert answer.read() == content
    (served.checkpoint(paths[2]) / "more.bin").unlink()


@pytest.mark.parametrize(
    "method, route",
    [
        ("POST", "training_runs/{run}/checkpoints/weights/one/copy"),
        ("GET", "training_runs/{run}/archive"),
        ("GET", "training_runs/none"),
        ("GET", "training_runs/../none"),
        ("GET", "training_runs/"),
        ("DELETE", "training_runs/{run}"),
        ("PUT", "sessions/x/project"),
        ("GET", "sessions/x/trace_export"),
        ("POST", "copy_weights"),
        ("GET", "audit"),
        ("GET", "billing/usage/events"),
        ("POST", "auth/token"),
        ("POST", "join_sampling_session"),
        ("POST", "create_custom_loss"),
        ("GET", "sessions/none"),
    ],
)
def test_what_is_not_served_is_answered_404(served, run, method, route):
    url = f"{served.url}/api/v1/{route.format(run=run[0].model_id)}"
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(urllib.request.Request(url, b"{}" if method != "GET" else None, method=method))
    assert caught.value.code == 404


def test_publishing_twice_and_encryption_are_refused(served, rest, run):
    _, paths = run
    with pytest.raises(tinker.BadRequestError, match="not public"):
        rest.unpublish_checkpoint_from_tinker_path(paths[1]).result()
    with pytest.raises(tinker.BadRequestError, match="age_encryption_recipients"):
        served.train(rank=1).save_weights_external("x", age_encryption_recipients=["age1x"]).result()


def test_one_poll_gets_the_completions_of_a_sampling_session(served):
    raw = RawClient(served)
    body = {"session_id": raw.session(), "sampling_session_seq_id": 0, "base_model": served.model.name}
    sampler = raw.post("create_sampling_session", body)["sampling_session_id"]
    target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": 0}

    def sample(seq_id, **fields):
        request = {
            "sampling_session_id": sampler,
            "seq_id": seq_id,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
            "sampling_params": {"max_tokens": 4, "stop": []},
        }
        return raw.post("asample", {**request, **fields})["request_id"]

    assert raw.post("retrieve_futures", {"target": target, "timeout": 0}) == {"completions": [], "cursor": 0}
    with ThreadPoolExecutor(1) as threads:  # a poll that waits
        waiting = threads.submit(raw.post, "retrieve_futures", {"target": target})
        ids = [sample(seq_id) for seq_id in range(5)]
        answer = waiting.result(60)
    cursor, done = 0, []
    while len(done) < len(ids):
        answer = raw.post("retrieve_futures", {"target": target, "prev_cursor": cursor})
        assert answer["cursor"] > cursor
        cursor = answer["cursor"]
        done += answer["completions"]
    assert sorted(each["request_id"] for each in done) == sorted(ids)
    assert all(each["response_payload_uncompressed_size"] > 0 for each in done)
    raw.result(ids[0])
    poll = {"target": target, "prev_cursor": cursor, "timeout": 0, "retrieved_request_ids": ids[:2]}
    assert raw.post("retrieve_futures", poll) == {"completions": [], "cursor": cursor}
    with pytest.raises(HttpError) as caught:  # its result is no longer kept
        raw.send("retrieve_future", json.dumps({"request_id": ids[0]}).encode())
    assert caught.value.status == 410
    raw.result(ids[1])  # nobody had fetched it
    for bad, word in (
        ({}, "target"),
        ({"target": {**target, "sampling_session_id": "x"}}, "sampling_session_id"),
        ({"target": {**target, "type": "model"}}, "target.type"),
        ({"target": target, "prev_cursor": -1}, "prev_cursor"),
        ({"target": target, "more": 1}, "more"),
    ):
        with pytest.raises(HttpError) as caught:
            raw.post("retrieve_futures", bad)
        assert word in caught.value.body


def test_samples_of_a_client_that_polls_arrive(served, monkeypatch):
    """The client's own poller, which the service's client/config turns off."""
    client = tinker.ServiceClient(base_url=served.url)
    monkeypatch.setitem(vars(client.holder.get_client_config()), "sample_use_retrieve_futures", True)
    sampler = client.create_sampling_client(base_model=served.model.name).result()
    prompt = types.ModelInput.from_ints([5, 6, 7])
    futures = [sampler.sample(prompt, 2, types.SamplingParams(max_tokens=4)) for _ in range(20)]
    assert all(len(each.result().sequences) == 2 for each in futures)


def test_a_sample_that_a_client_abandons_ends(served):
    client = tinker.ServiceClient(base_url=served.url)
    sampler = client.create_sampling_client(base_model=served.model.name).result()
    parameters = types.SamplingParams(max_tokens=400, stop=[])
    target = {"type": "sampling_session", "sampling_session_id": sampler._sampling_session_id}
    future = sampler.sample(types.ModelInput.from_ints([5, 6, 7]), 2000, parameters)
    raw = RawClient(served)
    with pytest.raises(TimeoutError):
        future.result(timeout=2)
    future.cancel()
    (done,) = raw.post("retrieve_futures", {"target": target})["completions"]
    assert done["state"] == "failed"
