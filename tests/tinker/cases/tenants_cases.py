"""Several API keys: each tenant sees and addresses only its own."""

import json
import urllib.error
import urllib.request

import pytest
from order_cases import STEP, batches
from tinker_util import HttpError, RawClient, Service, datum, paths_in

import tinker
from tinker import types

KEYS = "# two tenants\ntml-dummy\nanna tml-anna\nanna tml-anna-2\nbob   tml-bob\n"
TOKENS = [20, 31, 42, 53]


class Tenant:
    """One tenant's client, with a model, a sampler and a checkpoint of each kind."""

    def __init__(self, served, key):
        self.raw = RawClient(served, key)
        self.client = tinker.ServiceClient(base_url=served.url, api_key=key)
        self.rest = tinker.RestClient(base_url=served.url, api_key=key)
        self.session = self.client.holder.get_session_id()
        self.training = self.client.create_lora_training_client(base_model=served.model.name, rank=2).result()
        self.training.forward_backward(batches(1)[0], "cross_entropy")
        self.training.optim_step(STEP).result()
        self.path = self.training.save_state("same").result().path
        self.sampler_path = self.training.save_weights_for_sampler("same").result().path
        self.sampling = self.client.create_sampling_client(base_model=served.model.name).result()
        self.sampler = self.sampling._sampling_session_id
        self.future = self.raw.forward_backward(
            self.raw.create(self.raw.session()), 1, [datum(TOKENS, target_tokens=TOKENS)], "json"
        )


@pytest.fixture(scope="module")
def served(program, models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tenants")
    (folder / "keys").write_text(KEYS)
    settings = ["--dtype", "fp32", f"api_key_file={folder / 'keys'}", "max_models=4", "max_sessions=5"]
    with Service(program, models("qwen3"), folder, *settings, "max_requests=40") as one:
        yield one


@pytest.fixture(scope="module")
def anna(served):
    return Tenant(served, "tml-anna")


@pytest.fixture(scope="module")
def bob(served):
    return Tenant(served, "tml-bob")


def refused(raw, route, body, *statuses):
    with pytest.raises(HttpError) as caught:
        raw.post(route, body)
    assert caught.value.status in (statuses or (404,)), (route, caught.value)
    return caught.value


def get(served, route, key, method="GET"):
    request = urllib.request.Request(
        f"{served.url}/api/v1/{route}", method=method, headers={"X-API-Key": key}
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_key_is_needed_and_both_headers_give_one(served):
    for headers in ({}, {"X-API-Key": "tml-x"}, {"Authorization": "Bearer tml-x"}, {"X-API-Key": "anna"}):
        request = urllib.request.Request(f"{served.url}/api/v1/training_runs", headers=headers)
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request)
        assert caught.value.code == 401
    for headers in ({"X-API-Key": "tml-bob"}, {"Authorization": "Bearer tml-bob"}):
        request = urllib.request.Request(f"{served.url}/api/v1/training_runs", headers=headers)
        assert urllib.request.urlopen(request).status == 200
    assert get(served, "healthz", "")[0] == 200


def test_lists_show_a_tenants_own(served, anna, bob):
    other_key = tinker.RestClient(base_url=served.url, api_key="tml-anna-2")
    for mine, theirs, name in ((anna, bob, "anna"), (bob, anna, "bob")):
        runs = mine.rest.list_training_runs().result().training_runs
        assert mine.training.model_id in [each.training_run_id for each in runs]
        assert {each.model_owner for each in runs} == {name}
        assert theirs.training.model_id not in [each.training_run_id for each in runs]
        paths = [each.tinker_path for each in mine.rest.list_user_checkpoints().result().checkpoints]
        assert sorted(paths) == sorted([mine.path, mine.sampler_path])
        sessions = mine.rest.list_sessions().result().sessions
        assert mine.session in sessions and theirs.session not in sessions
    assert anna.session in other_key.list_sessions().result().sessions  # a second key of the same tenant


def test_what_belongs_to_another_tenant_does_not_exist(served, anna, bob):
    sample = {"seq_id": 900, "prompt": {"chunks": [{"tokens": TOKENS}]}, "sampling_params": {"max_tokens": 1}}
    model, session = {"model_id": anna.training.model_id}, {"session_id": anna.session}
    new = {"model_seq_id": 7, "base_model": served.model.name, "lora_config": {"rank": 1}}
    target = {"type": "sampling_session", "sampling_session_id": anna.sampler}
    for route, body in (
        ("get_info", model),
        ("optim_step", {**model, "seq_id": 50, "adam_params": {}}),
        ("save_weights", {**model, "seq_id": 50, "path": "x"}),
        ("save_weights_for_sampler", {**model, "seq_id": 50, "path": "x"}),
        ("save_weights_external", {**model, "seq_id": 50, "path": "x"}),
        ("load_weights", {**model, "seq_id": 50, "path": bob.path, "optimizer": False}),
        ("create_model", {**session, **new}),
        ("session_heartbeat", session),
        (
            "create_sampling_session",
            {**session, "sampling_session_seq_id": 3, "base_model": served.model.name},
        ),
        (f"sessions/{anna.session}/finish", {}),
        ("asample", {**sample, "sampling_session_id": anna.sampler}),
        ("retrieve_future", {"request_id": anna.future}),
        ("retrieve_futures", {"target": target, "timeout": 0}),
        ("cancel_future", {"request_id": anna.future}),
        (f"training_runs/{anna.training.model_id}/checkpoints/weights/same/publish", {}),
    ):
        assert "does not exist" in refused(bob.raw, route, body).body, route
    for encoding in ("json", "protobuf"):
        with pytest.raises(HttpError) as caught:
            bob.raw.forward_backward(
                anna.training.model_id, 9, [datum(TOKENS, target_tokens=TOKENS)], encoding
            )
        assert caught.value.status == 404
    for route, method in (
        (f"training_runs/{anna.training.model_id}", "GET"),
        (f"training_runs/{anna.training.model_id}/checkpoints", "GET"),
        (f"training_runs/{anna.training.model_id}/checkpoints/weights/same", "DELETE"),
        (f"training_runs/{anna.training.model_id}/checkpoints/weights/same/ttl", "PUT"),
        (f"training_runs/{anna.training.model_id}/checkpoints/weights/same/external_weights_urls", "GET"),
        (f"sessions/{anna.session}", "GET"),
        (f"samplers/{anna.sampler}", "GET"),
    ):
        assert get(served, route, "tml-bob", method)[0] == 404, route
        if method == "GET":
            assert get(served, route, "tml-anna")[0] == 200, route
    anna.training.optim_step(STEP).result()  # all is as before
    anna.raw.result(anna.future)


def test_a_checkpoint_of_another_tenant_is_read_only_if_public(served, anna, bob):
    def tries(raw):
        session = raw.session()
        model = raw.create(session, 5)
        for route, body in (
            (
                "load_weights",
                {"session_id": session, "model_seq_id": 1, "path": anna.path, "optimizer": False},
            ),
            ("load_weights", {"model_id": model, "seq_id": 1, "path": anna.path, "optimizer": False}),
            (
                "create_sampling_session",
                {"session_id": session, "sampling_session_seq_id": 0, "model_path": anna.path},
            ),
            ("weights_info", {"tinker_path": anna.path}),
        ):
            try:
                yield raw.post(route, body)
            except HttpError as error:
                assert error.status == 400 and "there is no such checkpoint" in error.body, error
                yield None
        raw.post(f"sessions/{session}/finish", {})

    assert list(tries(bob.raw)) == [None] * 4
    anna.rest.publish_checkpoint_from_tinker_path(anna.path).result()
    assert None not in list(tries(bob.raw))
    assert (
        get(served, f"training_runs/{anna.training.model_id}", "tml-bob")[0] == 404
    )  # and no more than that
    anna.rest.unpublish_checkpoint_from_tinker_path(anna.path).result()
    assert list(tries(bob.raw)) == [None] * 4


def test_ids_of_two_sessions_in_one_request_are_refused(served, anna):
    raw = anna.raw
    other = raw.session()
    for route, body in (
        (
            "load_weights",
            {"session_id": other, "model_seq_id": 0, "model_id": anna.training.model_id, "path": anna.path},
        ),
        ("retrieve_future", {"request_id": anna.future, "model_id": anna.training.model_id}),
        ("asample", {"session_id": other, "sampling_session_id": anna.sampler}),
    ):
        assert "expected one of the session of" in refused(raw, route, body, 400).body
    raw.post(f"sessions/{other}/finish", {})


def test_ids_cannot_be_guessed(anna, bob):
    for each in (anna, bob):
        secret = each.session.removeprefix("session-")
        assert len(secret) == 32 and int(secret, 16) > 0
        assert each.training.model_id.startswith(each.session) and each.sampler.startswith(each.session)
    pairs = zip(anna.session, bob.session, strict=True)
    assert sum(a != b for a, b in pairs) > 16


def test_a_tenants_sessions_models_and_requests_are_bounded(served, anna, bob):
    key = "tml-dummy"
    raw = RawClient(served, key)
    for session in raw_sessions(served, key):
        raw.post(f"sessions/{session}/finish", {})
    sessions = [raw.session() for _ in range(5)]
    assert "max_sessions" in refused(raw, "create_session", {"tags": []}, 400).body
    models = [raw.create(sessions[0], number) for number in range(4)]
    body = {"session_id": sessions[1], "model_seq_id": 0, "base_model": served.model.name}
    assert "max_models" in refused(raw, "create_model", {**body, "lora_config": {"rank": 1}}, 400).body
    data = [datum(TOKENS, target_tokens=TOKENS)]
    futures = [raw.forward_backward(models[0], 2 + i, data, "protobuf") for i in range(40)]  # 1 is missing
    step = {"model_id": models[1], "seq_id": 1, "adam_params": {}}
    assert "max_requests" in refused(raw, "optim_step", step, 429).body
    assert len(set(futures)) == 40
    bob.training.optim_step(STEP).result()  # another tenant has its own
    for session in raw_sessions(served, key):
        raw.post(f"sessions/{session}/finish", {})
    assert raw.session()


def raw_sessions(served, key):
    return json.loads(get(served, "sessions", key)[1])["sessions"]


TRAVERSALS = [
    "../anna",
    "..",
    "%2e%2e",
    "/etc/passwd",
    "a/../../b",
    "..\\b",
    "\0",
    "tinker://../weights/same",
    "tinker://{run}/weights/../../{run}/weights/same",
    "tinker://{run}/../{run}/weights/same",
    "{run}/weights/same",
    "tinker://./weights/same",
    "tinker://{run}/./same",
    "tinker://{run}//same",
    "file:///etc/passwd",
    "~",
]
FIELDS = [
    (
        "create_model",
        {"session_id": "{session}", "model_seq_id": 9, "base_model": "{base}", "lora_config": {"rank": 1}},
        ("session_id", "base_model"),
    ),
    ("save_weights", {"model_id": "{mine}", "seq_id": 99, "path": "x"}, ("model_id", "path")),
    (
        "save_weights_for_sampler",
        {"model_id": "{mine}", "seq_id": 99, "path": "x"},
        ("model_id", "path", "kind"),
    ),
    ("save_weights_external", {"model_id": "{mine}", "seq_id": 99, "path": "x"}, ("model_id", "path")),
    (
        "load_weights",
        {"session_id": "{session}", "model_seq_id": 9, "path": "{path}", "optimizer": False},
        ("session_id", "path", "base_model", "weights_access_token"),
    ),
    (
        "create_sampling_session",
        {"session_id": "{session}", "sampling_session_seq_id": 9, "model_path": "{path}"},
        ("session_id", "model_path", "base_model"),
    ),
    ("weights_info", {}, ("tinker_path", "path")),
    (
        "asample",
        {"sampling_session_id": "x", "seq_id": 1, "prompt": {"chunks": [{"tokens": [5]}]}},
        ("sampling_session_id", "model_path", "base_model"),
    ),
    ("retrieve_future", {}, ("request_id",)),
    ("session_heartbeat", {}, ("session_id",)),
    ("get_info", {}, ("model_id",)),
    ("retrieve_futures", {"target": {}}, ("target",)),
]


@pytest.mark.parametrize("case", range(len(FIELDS)))
def test_no_field_that_names_something_leaves_the_tenants_folder(served, anna, bob, case):
    route, body, fields = FIELDS[case]
    names = {
        "{session}": bob.session,
        "{mine}": bob.training.model_id,
        "{path}": bob.path,
        "{base}": served.model.name,
    }
    body = {key: names.get(value, value) if isinstance(value, str) else value for key, value in body.items()}
    before = paths_in(served.folder)
    for field in fields:
        for text in TRAVERSALS:
            text = text.format(run=anna.training.model_id)
            value = {"type": "sampling_session", "sampling_session_id": text} if field == "target" else text
            refused(bob.raw, route, {**body, field: value}, 400, 404, 410)
    assert paths_in(served.folder) <= before  # sessions of other tests may leave meanwhile


def test_no_path_of_a_url_leaves_the_tenants_folder(served, anna, bob):
    run = anna.training.model_id
    for text in ("..", "%2e%2e", f"..%2f{run}", f"{run}%00", f"{run}/..", ".", "a%2fb"):
        for rest in (
            "",
            "/checkpoints",
            "/checkpoints/weights/same",
            "/checkpoints/weights/same/external_weights_urls",
        ):
            for method in ("GET", "DELETE"):
                assert get(served, f"training_runs/{text}{rest}", "tml-bob", method)[0] in (400, 404), (
                    text,
                    rest,
                )
    assert (served.checkpoint(anna.path) / "adapter_config.json").exists()


def test_a_tenants_samples_are_its_own(anna, bob):
    prompt = types.ModelInput.from_ints(TOKENS)
    for each in (anna, bob):
        sampler = each.training.create_sampling_client(each.sampler_path).result()
        assert len(sampler.sample(prompt, 1, types.SamplingParams(max_tokens=2)).result().sequences) == 1
