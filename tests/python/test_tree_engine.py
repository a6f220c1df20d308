"""bough.TreeEngine against transformers, which runs each sequence by itself."""

import copy
import functools

import bough
import peft
import pytest
import torch
import transformers
from rollout_files import compute_in_double, random_rollouts
from tiny_models import ARCHITECTURES, make_tiny_model

# TreeEngine refuses mixtures of experts (test_supports_says_why_not).
ARCHITECTURE_NAMES = [name for name, config in ARCHITECTURES.items() if "num_experts_per_tok" not in config]


def sequences_of(seed, vocab):
    """Random rollouts as sequences of the engine."""
    rollouts = random_rollouts(seed, vocab)
    for rollout in rollouts:
        rollout["loss_mask"][:1] = [0] * len(rollout["loss_mask"][:1])
    return rollouts


def flat_values(model, sequences, temperature=1.0):
    """Log-probabilities and entropies of the trained tokens by transformers, with a graph."""
    log_probs, entropies = [], []
    for sequence in sequences:
        ids, mask = torch.tensor(sequence["input_ids"]), torch.tensor(sequence["loss_mask"][1:]).bool()
        if not mask.any():
            continue
        logits = model(ids.unsqueeze(0), use_cache=False).logits[0, :-1] / temperature
        all_log_probs = logits.log_softmax(-1)
        log_probs.append(all_log_probs.gather(1, ids[1:].unsqueeze(1)).squeeze(1)[mask])
        entropies.append(-(all_log_probs.exp() * all_log_probs).sum(-1)[mask])
    return torch.cat(log_probs), torch.cat(entropies)


def some_loss(log_probs, entropies, weights):
    return (weights * log_probs + 0.1 * log_probs.exp() - 0.3 * weights * entropies).sum()


def gradients_of(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_similar_gradients(got, expected, tolerance):
    """For bf16, in which single parameters may err more: all parameters together."""
    assert got.keys() == expected.keys()
    error = sum((g.float() - expected[name].float()).norm() ** 2 for name, g in got.items()) ** 0.5
    assert error <= tolerance * sum(g.float().norm() ** 2 for g in expected.values()) ** 0.5


def assert_equal_gradients(got, expected, tolerance):
    assert got.keys() == expected.keys()
    largest = max(g.norm() for g in expected.values())
    for name, gradient in got.items():
        error = (gradient - expected[name]).norm() / max(expected[name].norm(), 1e-5 * largest)
        assert error <= tolerance, (name, error)


@pytest.mark.parametrize("index", range(len(ARCHITECTURE_NAMES)), ids=ARCHITECTURE_NAMES)
def test_values_and_gradients_in_fp64(monkeypatch, index):
    """Every family: values, loss.backward() with activations held and with two forwards, and step()."""
    compute_in_double(monkeypatch)
    model = make_tiny_model(ARCHITECTURE_NAMES[index], seed=index).double()
    model.set_attn_implementation("sdpa")  # the eager attention computes its softmax in fp32
    sequences = sequences_of(index, 311)
    expected_log_probs, expected_entropies = flat_values(model, sequences, temperature=0.7)
    torch.manual_seed(index)
    weights = torch.randn(len(expected_log_probs), dtype=torch.float64)
    some_loss(expected_log_probs, expected_entropies, weights).backward()
    expected = gradients_of(model)

    for strategy, holds in (("packed", True), ("path", False)):
        model.zero_grad()
        engine = bough.TreeEngine(model, strategy=strategy)
        log_probs, entropies = engine(sequences, temperature=0.7)
        assert engine.last_plan["holds_activations"] is holds
        torch.testing.assert_close(log_probs, expected_log_probs, rtol=0, atol=1e-10)
        torch.testing.assert_close(entropies, expected_entropies, rtol=0, atol=1e-10)
        some_loss(log_probs, entropies, weights).backward()
        assert_equal_gradients(gradients_of(model), expected, 1e-10)

    model.zero_grad()
    result = engine.step(sequences, lambda lp, ent, rows: some_loss(lp, ent, weights[rows]), temperature=0.7)
    assert result.loss == pytest.approx(some_loss(expected_log_probs, expected_entropies, weights).item())
    assert_equal_gradients(gradients_of(model), expected, 1e-10)


@pytest.fixture
def model():
    return make_tiny_model("qwen3", seed=5)


SEQUENCES = [([5, 6, 7, 8, 9], [10, 11, 12]), ([5, 6, 7, 8, 9], [10, 13]), ([5, 6, 7], [8, 9, 30, 31])]
NUM_ROWS = 9


def as_dicts(sequences):
    return [{"input_ids": a + b, "loss_mask": [0] * len(a) + [1] * len(b)} for a, b in sequences]


def loss_of(log_probs, entropies=None):
    return (torch.linspace(-1, 1, NUM_ROWS, dtype=log_probs.dtype) * log_probs).sum()


def flat_gradients(model, sequences=SEQUENCES):
    model.zero_grad()
    log_probs, _ = flat_values(model, as_dicts(sequences))
    loss_of(log_probs).backward()
    gradients = gradients_of(model)
    model.zero_grad()
    return gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_add_to_grad_in_the_parameters_dtype(model, dtype):
    model = model.to(dtype)
    engine = bough.TreeEngine(model)
    expected = flat_gradients(model.float() if dtype == torch.float32 else copy.deepcopy(model).float())
    exact = dtype == torch.float32
    check = functools.partial(
        assert_equal_gradients if exact else assert_similar_gradients, expected=expected
    )
    for once in range(2):  # added to what is there
        loss_of(engine(SEQUENCES)[0]).backward()
        assert all(p.grad.dtype == dtype for p in model.parameters())
        got = {name: g.float() / (once + 1) for name, g in gradients_of(model).items()}
        check(got, tolerance=1e-5 if exact else 0.03)
    model.zero_grad()
    for once in range(2):
        engine.step(SEQUENCES, lambda lp, ent, rows: (torch.linspace(-1, 1, NUM_ROWS)[rows] * lp).sum())
        got = {name: g.float() / (once + 1) for name, g in gradients_of(model).items()}
        check(got, tolerance=1e-5 if exact else 0.03)


@pytest.mark.parametrize("by_step", [False, True])
def test_sums_over_micro_batches_in_fp32_are_rounded_once(model, by_step):
    model = model.to(torch.bfloat16)
    engines = {fp32: bough.TreeEngine(model, fp32_sums=fp32) for fp32 in (False, True)}
    weights = torch.linspace(-1, 1, NUM_ROWS)

    def add(engine):
        if by_step:
            engine.step(SEQUENCES, lambda lp, ent, rows: (weights[rows] * lp).sum())
        else:
            loss_of(engine(SEQUENCES)[0]).backward()

    add(engines[True])
    exact = {name: 50 * p.main_grad.clone() for name, p in model.named_parameters()}
    for _ in range(49):
        add(engines[True])
    assert all(p.grad is None for p in model.parameters())
    engines[True].write_gradients()
    assert all(p.main_grad is None for p in model.parameters())
    got = gradients_of(model)
    assert {g.dtype for g in got.values()} == {torch.bfloat16}
    assert_similar_gradients(got, exact, 0.004)  # one rounding
    model.zero_grad()
    for _ in range(50):
        add(engines[False])
    with pytest.raises(AssertionError):
        assert_similar_gradients(gradients_of(model), exact, 0.004)


def test_scaled_losses_and_autocast_change_nothing_else(model):
    """GradScaler multiplies the loss; autocast would round products."""
    engine, expected = bough.TreeEngine(model), flat_gradients(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        log_probs, _ = engine(SEQUENCES)
    assert log_probs.dtype == torch.float32
    (1024 * loss_of(log_probs)).backward()
    assert_equal_gradients({name: g / 1024 for name, g in gradients_of(model).items()}, expected, 1e-5)
    with torch.inference_mode():
        assert torch.equal(engine(SEQUENCES)[0], log_probs)
        assert torch.is_inference_mode_enabled()


def test_an_optimizer_trains_the_models_own_weights(model):
    """Weights in place: what the optimizer changes is what the engine reads, and what transformers reads."""
    engine, twin = bough.TreeEngine(model), copy.deepcopy(model)
    for one in (model, twin):
        optimizer = torch.optim.SGD(one.parameters(), lr=1e-2, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            values = engine(SEQUENCES)[0] if one is model else flat_values(one, as_dicts(SEQUENCES))[0]
            loss_of(values).backward()
            optimizer.step()
    for (name, a), (_, b) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-4, msg=name)
    with torch.no_grad():
        torch.testing.assert_close(engine(SEQUENCES)[0], flat_values(model, as_dicts(SEQUENCES))[0])


def test_saving_and_loading_see_the_same_weights(model, tmp_path):
    engine = bough.TreeEngine(model)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    for (name, a), (_, b) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    other = make_tiny_model("qwen3", seed=6)
    model.load_state_dict(other.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(engine(SEQUENCES)[0], flat_values(other, as_dicts(SEQUENCES))[0])


def test_moved_weights_are_bound_again_and_never_read_stale(model):
    engine = bough.TreeEngine(model)
    for parameter in model.parameters():  # as FSDP, merge_and_unload or an assignment do
        parameter.data = parameter.data * 1.5
    with torch.no_grad():
        torch.testing.assert_close(engine(SEQUENCES)[0], flat_values(model, as_dicts(SEQUENCES))[0])
    second = bough.TreeEngine(model)  # shares the joined matrices
    with torch.no_grad():
        assert torch.equal(engine(SEQUENCES)[0], second(SEQUENCES)[0])
    assert engine._weights._is_bound(1, engine._weights._by_parameter[1])
    model.model.layers[1] = make_tiny_model("qwen3", seed=9).model.layers[1]
    with pytest.raises(bough.UserError, match=r"layers.1.*is another Parameter.*make a new TreeEngine"):
        engine(SEQUENCES)
    engine = bough.TreeEngine(model)
    model.to(torch.bfloat16)
    with pytest.raises(bough.UserError, match=r"is now torch.bfloat16.*make a new TreeEngine"):
        engine(SEQUENCES)


def test_copies_leave_the_models_tensors_alone(model):
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    engine = bough.TreeEngine(model, copy=True)
    expected = flat_gradients(model)
    loss_of(engine(SEQUENCES)[0]).backward()
    assert_equal_gradients(gradients_of(model), expected, 1e-5)
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == before
    assert engine.last_plan["copied_weight_bytes"] == sum(p.nbytes for p in model.parameters())
    assert bough.TreeEngine(model).plan(SEQUENCES)["copied_weight_bytes"] == 0


def test_hooks_and_autograd_grad_see_the_gradients(model):
    engine, expected = bough.TreeEngine(model), flat_gradients(model)
    names, parameters = zip(*model.named_parameters(), strict=True)
    got = torch.autograd.grad(loss_of(engine(SEQUENCES)[0]), parameters)
    assert all(p.grad is None for p in parameters)
    assert_equal_gradients(dict(zip(names, got, strict=True)), expected, 1e-5)
    model.model.norm.weight.register_hook(lambda gradient: 2 * gradient)
    loss_of(engine(SEQUENCES)[0]).backward()
    torch.testing.assert_close(
        model.model.norm.weight.grad, 2 * expected["model.norm.weight"], rtol=1e-4, atol=1e-6
    )


def test_frozen_parameters_get_no_gradient(model):
    expected = flat_gradients(model)
    model.model.layers[0].self_attn.k_proj.weight.requires_grad_(False)
    engine = bough.TreeEngine(model)
    loss_of(engine(SEQUENCES)[0]).backward()
    del expected["model.layers.0.self_attn.k_proj.weight"]
    assert_equal_gradients(gradients_of(model), expected, 1e-5)


def test_losses_that_couple_tokens_get_them_together(model):
    engine, sizes = bough.TreeEngine(model, strategy="path", max_tokens_per_pass=2), []

    def sequence_loss(log_probs, entropies, rows):
        sizes.append(len(rows))
        return sum(log_probs[rows // 3 == s].sum().square() for s in set((rows // 3).tolist()))

    result = engine.step(SEQUENCES, sequence_loss, couples="batch")
    assert sizes == [NUM_ROWS]
    got = gradients_of(model)
    model.zero_grad()
    log_probs, _ = flat_values(model, as_dicts(SEQUENCES))
    loss = sum(part.sum().square() for part in log_probs.split(3))
    loss.backward()
    assert result.loss == pytest.approx(loss.item(), rel=1e-5)
    assert_equal_gradients(got, gradients_of(model), 1e-4)


def test_two_calls_may_wait_for_their_backward(model):
    """Two micro-batches go forward before the first goes backward."""
    engine, expected = bough.TreeEngine(model), flat_gradients(model)
    for strategy in ("packed", "path"):
        model.zero_grad()
        engine = bough.TreeEngine(model, strategy=strategy)
        first, second = loss_of(engine(SEQUENCES)[0]), loss_of(engine(SEQUENCES)[0])
        with torch.no_grad():
            engine([([1, 2], [3])])
        (first + 2 * second).backward()
        assert_equal_gradients({n: g / 3 for n, g in gradients_of(model).items()}, expected, 1e-5)


@pytest.mark.parametrize(
    "kind", ["ForTokenClassification", "ForSequenceClassification", "Model", "ForCausalLM"]
)
@pytest.mark.parametrize("strategy", ["packed", "path"])
def test_a_critics_values_and_gradients(monkeypatch, model, kind, strategy):
    """Hidden states through a head of PyTorch: classifiers of transformers, a backbone, a causal model."""
    compute_in_double(monkeypatch)
    config = copy.deepcopy(model.config)
    config.num_labels = 1
    critic = getattr(transformers, f"Qwen3{kind}")(config).double().eval()
    critic.config._attn_implementation = "sdpa"
    score = getattr(critic, "score", torch.nn.Linear(48, 1).double())
    trained = {**dict(critic.named_parameters()), **{f"score.{n}": p for n, p in score.named_parameters()}}
    trained = {n: p for n, p in trained.items() if "lm_head" not in n}
    states = []
    for prompt, response in SEQUENCES:
        backbone = critic if kind == "Model" else critic.model
        hidden = backbone(torch.tensor([prompt + response]), use_cache=False).last_hidden_state[0]
        states.append(hidden[len(prompt) - 1 : -1])
    loss_of(score(torch.cat(states)).squeeze(-1)).backward()
    expected = {name: p.grad.clone() for name, p in trained.items()}
    critic.zero_grad()
    score.zero_grad()
    engine = bough.TreeEngine(critic, strategy=strategy)
    values = score(engine.hidden_states(SEQUENCES)).squeeze(-1)
    torch.testing.assert_close(values, score(torch.cat(states)).squeeze(-1), rtol=0, atol=1e-10)
    loss_of(values).backward()
    assert_equal_gradients({name: p.grad for name, p in trained.items()}, expected, 1e-10)
    with torch.no_grad():
        assert torch.equal(score(engine.hidden_states(SEQUENCES)).squeeze(-1), values)
    if kind != "ForCausalLM":
        with pytest.raises(bough.UserError, match="has no lm_head"):
            engine(SEQUENCES)


def wrong_uses():
    ids = [5, 6, 7]
    return {
        "token outside": ([([5, 400], [6])], r"sequence 0, position 1: got token id 400, expected 0 to 310"),
        "64 bits": ([([5], [2**40])], r"sequence 0: got token ids from 5 to 1099511627776"),
        "empty prompt": ([([], ids)], r"sequence 0: its prompt is empty"),
        "first trained": ([{"input_ids": ids, "loss_mask": [1, 1, 1]}], r"first token is marked as trained"),
        "lengths": ([{"input_ids": ids, "loss_mask": [0, 1]}], r"got 2 loss_mask values for 3 input_ids"),
        "no mask": ([{"input_ids": ids}], r"has no loss_mask; got the keys input_ids"),
        "floats": ([([5.0], [6.0])], r"got torch.float32, expected integers"),
        "two dimensions": ([(torch.ones(1, 2), torch.ones(1, 2))], r"got shape \(1, 2\)"),
        "a text": (["text"], r"sequence 0: got str, expected"),
        "none": ([], r"got none, expected at least one"),
    }


@pytest.mark.parametrize("case", wrong_uses())
def test_wrong_sequences_are_refused_and_leave_grad_alone(model, case):
    sequences, message = wrong_uses()[case]
    engine = bough.TreeEngine(model)
    loss_of(engine(SEQUENCES)[0]).backward()
    before = gradients_of(model)
    with pytest.raises(bough.UserError, match=message):
        engine(sequences)
    with pytest.raises(bough.UserError, match=message):
        engine.step(sequences, lambda lp, ent, rows: lp.sum())
    assert all(torch.equal(g, before[name]) for name, g in gradients_of(model).items())


def test_a_sequence_beyond_the_models_window_is_refused():
    engine = bough.TreeEngine(make_tiny_model("mistral"))
    with pytest.raises(bough.UserError, match=r"sequence 1: got 600 tokens, expected at most 512"):
        engine([([1], [2]), ([1] * 590, [2] * 10)])


def test_wrong_use_is_refused_and_leaves_grad_alone(model):
    engine = bough.TreeEngine(model)
    loss = loss_of(engine(SEQUENCES)[0])
    loss.backward(retain_graph=True)
    before = gradients_of(model)

    def unchanged():
        return all(torch.equal(g, before[name]) for name, g in gradients_of(model).items())

    with pytest.raises(bough.UserError, match="a second backward"):
        loss.backward()
    loss = loss_of(engine(SEQUENCES)[0])
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)
    with pytest.raises(bough.UserError, match="changed in place between forward and backward"):
        loss.backward()

    class Mine(Exception):
        pass

    def raises(log_probs, entropies, rows):
        raise Mine("of the user")

    with pytest.raises(Mine, match="of the user"):
        engine.step(SEQUENCES, raises)
    with pytest.raises(bough.UserError, match=r"loss_fn: got shape \(9,\), expected a scalar"):
        engine.step(SEQUENCES, lambda lp, ent, rows: lp)
    with pytest.raises(bough.UserError, match="do not depend on log_probs"):
        engine.step(SEQUENCES, lambda lp, ent, rows: torch.tensor(1.0))
    with pytest.raises(bough.UserError, match="couples: got 'group'"):
        engine.step(SEQUENCES, lambda lp, ent, rows: lp.sum(), couples="group")
    with pytest.raises(bough.UserError, match="temperature: got 0"):
        engine(SEQUENCES, temperature=0)
    with pytest.raises(bough.UserError, match=r"memory.*smallest"):
        bough.TreeEngine(model, memory=1000).step(SEQUENCES, lambda lp, ent, rows: lp.sum())
    for setting, value in (("strategy", "forest"), ("memory", "8GB"), ("max_tokens_per_pass", 0.5)):
        with pytest.raises(bough.UserError, match=f"{setting}: got {value!r}"):
            bough.TreeEngine(model, **{setting: value})
    with pytest.raises(bough.UserError, match="temperature: got 'hot'"):
        engine(SEQUENCES, temperature="hot")
    assert unchanged()
    model.requires_grad_(False)
    with pytest.raises(bough.UserError, match="no parameter of the model requires a gradient"):
        engine(SEQUENCES)
    with torch.no_grad():
        assert not engine(SEQUENCES)[0].requires_grad


def test_supports_says_why_not(model):
    assert bough.supports(model) and bough.supports(model).reason == ""
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=50))
    mixture = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "num_local_experts": 2}
    reasons = {
        "a mixture of experts": transformers.MixtralForCausalLM(
            transformers.MixtralConfig(**mixture, num_key_value_heads=2, intermediate_size=8, vocab_size=50)
        ),
        "GPT2LMHeadModel": gpt2,
        "expected float32, bfloat16 or float64": copy.deepcopy(model).half(),
        "DistributedDataParallel": type("DistributedDataParallel", (torch.nn.Module,), {})(),
        "several dtypes": copy.deepcopy(model),
        "got weights on meta": copy.deepcopy(model).to("meta"),
        "expected a model of transformers": torch.nn.Linear(2, 2),
        "the model has the weight 'model.extra'": copy.deepcopy(model),
    }
    reasons["several dtypes"].lm_head.to(torch.bfloat16)
    reasons["the model has the weight 'model.extra'"].model.register_parameter(
        "extra", torch.nn.Parameter(torch.zeros(1))
    )
    for reason, other in reasons.items():
        support = bough.supports(other)
        assert not support and reason in support.reason, support
        with pytest.raises(bough.UserError):
            bough.TreeEngine(other)


class TestAdapters:
    @staticmethod
    def adapted(model, **settings):
        torch.manual_seed(7)
        settings = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", **settings}
        adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0, 0.05)
        return adapted

    @pytest.mark.parametrize(
        "targets", ["all-linear", ["q_proj", "v_proj", "down_proj"], ["q_proj", "lm_head"], ["lm_head"]]
    )
    @pytest.mark.parametrize("strategy", ["packed", "path"])
    def test_gradients_equal_pefts(self, monkeypatch, model, targets, strategy):
        compute_in_double(monkeypatch)
        adapted = self.adapted(model.double(), target_modules=targets)
        adapted.get_base_model().set_attn_implementation("sdpa")
        expected = flat_gradients(adapted)
        assert expected and all("lora_" in name for name in expected)
        engine = bough.TreeEngine(adapted, strategy=strategy)
        loss_of(engine(SEQUENCES)[0]).backward()
        assert_equal_gradients(gradients_of(adapted), expected, 1e-10)
        adapted.zero_grad()
        weights = torch.linspace(-1, 1, NUM_ROWS, dtype=torch.float64)
        engine.step(SEQUENCES, lambda lp, ent, rows: (weights[rows] * lp).sum())
        assert_equal_gradients(gradients_of(adapted), expected, 1e-10)

    @pytest.mark.filterwarnings("ignore:.*tie_word_embeddings")
    def test_the_adapter_of_a_tied_head_acts_on_the_logits_only(self, monkeypatch):
        compute_in_double(monkeypatch)
        adapted = self.adapted(make_tiny_model("qwen3_tied", seed=5).double(), target_modules=["lm_head"])
        adapted.get_base_model().set_attn_implementation("sdpa")
        expected = flat_gradients(adapted)
        assert len(expected) == 2 and all("lm_head.lora_" in name for name in expected)
        loss_of(bough.TreeEngine(adapted)(SEQUENCES)[0]).backward()
        assert_equal_gradients(gradients_of(adapted), expected, 1e-10)

    def test_the_active_adapter_is_read_at_each_call(self, model):
        """Switching, disabling, changing in place, and a reference between forward and backward."""
        adapted = self.adapted(model)
        adapted.add_adapter("ref", peft.LoraConfig(r=4, lora_alpha=6, target_modules="all-linear"))
        engine, expected = bough.TreeEngine(adapted), flat_gradients(adapted)
        log_probs, _ = engine(SEQUENCES)
        values = {}
        with torch.no_grad():
            with adapted.disable_adapter():
                values["disabled"] = engine(SEQUENCES)[0]
                torch.testing.assert_close(values["disabled"], flat_values(adapted, as_dicts(SEQUENCES))[0])
            adapted.set_adapter("ref")
            for name, parameter in adapted.named_parameters():
                if "lora_B.ref" in name:
                    parameter.normal_(0, 0.1)
            values["ref"] = engine(SEQUENCES)[0]
            torch.testing.assert_close(values["ref"], flat_values(adapted, as_dicts(SEQUENCES))[0])
            adapted.set_adapter("default")
        loss_of(log_probs).backward()
        assert_equal_gradients(gradients_of(adapted), expected, 1e-5)
        assert (values["disabled"] - log_probs).abs().max() > 1e-3 < (values["ref"] - log_probs).abs().max()

    def test_an_adapter_that_comes_later_is_not_overlooked(self, model):
        engine = bough.TreeEngine(model)
        adapted = self.adapted(model, target_modules=["q_proj"])
        with pytest.raises(
            bough.UserError, match=r"q_proj has an adapter; expected the model that PEFT returned"
        ):
            engine(SEQUENCES)
        engine = bough.TreeEngine(adapted)
        adapted.add_adapter("other", peft.LoraConfig(r=2, target_modules=["down_proj"]))
        adapted.set_adapter("other")
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_B.other" in name:
                    parameter.normal_(0, 0.1)
            torch.testing.assert_close(engine(SEQUENCES)[0], flat_values(adapted, as_dicts(SEQUENCES))[0])

    def test_merging_is_seen(self, model):
        adapted = self.adapted(model)
        engine = bough.TreeEngine(adapted)
        with torch.no_grad():
            before = engine(SEQUENCES)[0]
            adapted.merge_adapter()
            torch.testing.assert_close(engine(SEQUENCES)[0], before, rtol=0, atol=1e-5)
            merged = adapted.merge_and_unload()
            torch.testing.assert_close(bough.TreeEngine(merged)(SEQUENCES)[0], before, rtol=0, atol=1e-5)

    def test_adapters_in_fp32_on_a_model_in_bf16(self, model):
        """PEFT's default. The gradients have the adapters' precision."""
        adapted = self.adapted(model.to(torch.bfloat16))
        assert {p.dtype for p in adapted.parameters() if p.requires_grad} == {torch.float32}
        loss_of(bough.TreeEngine(adapted)(SEQUENCES)[0]).backward()
        got = gradients_of(adapted)
        assert {g.dtype for g in got.values()} == {torch.float32}
        assert_similar_gradients(got, flat_gradients(adapted.float()), 0.08)

    @pytest.mark.parametrize(
        ("settings", "reason"),
        [
            ({"lora_dropout": 0.1}, "lora_dropout 0.1"),
            ({"use_dora": True}, "DoRA"),
            ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
            ({"rank_pattern": {"q_proj": 2}}, "several ranks"),
            ({"target_modules": ["embed_tokens"]}, "embed_tokens"),
            ({"lora_bias": True}, "bias"),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
    )
    def test_other_kinds_are_refused(self, model, settings, reason):
        adapted = self.adapted(model, **settings).train()
        support = bough.supports(adapted)
        with pytest.raises(bough.UserError, match=reason):
            bough.TreeEngine(adapted)(SEQUENCES)
        assert not support and reason in support.reason
