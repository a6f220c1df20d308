"""Adapters against torch: gradients of `bough step`, files in PEFT's format, and merging. The gradients are
compared with autograd through transformers with the LoRA term added to its linear layers, and with PEFT."""

import json

import peft
import pytest
import torch
from host_env import is_batch_invariant
from rollout_files import (
    compute_in_double,
    flat_gradients,
    gradient_error,
    log_probs,
    random_rollouts,
    write_rollouts,
)
from safetensors.torch import load_file, save_file
from tiny_models import ARCHITECTURES
from transformers import AutoModelForCausalLM, AutoTokenizer

RANK, ALPHA = 3, 7
PREFIX = "base_model.model."


class Adapted(torch.nn.Module):
    """y = W x + b + alpha / r B A x, with W and b frozen."""

    def __init__(self, linear, a, b):
        super().__init__()
        self.linear, self.a, self.b = linear, torch.nn.Parameter(a), torch.nn.Parameter(b)

    def forward(self, x):
        return self.linear(x) + (x @ self.a.T @ self.b.T) * (ALPHA / RANK)


def adapted_linears(model, targets):
    """As in PEFT, all-linear leaves the lm_head out."""
    found = {}
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if isinstance(module, torch.nn.Linear) and (
            last in targets or ("all-linear" in targets and last != "lm_head")
        ):
            found[name] = module
    return found


def write_adapter(directory, model, targets, seed=0, **changes):
    """A random adapter of the model, in PEFT's format."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in adapted_linears(model, targets).items():
        for which, shape in (("A", (RANK, module.in_features)), ("B", (module.out_features, RANK))):
            tensors[f"{PREFIX}{name}.lora_{which}.weight"] = 0.2 * torch.randn(shape, generator=generator)
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "base", "r": RANK,
        "lora_alpha": ALPHA, "lora_dropout": 0.0, "bias": "none", "target_modules": targets, **changes,
    }  # fmt: skip
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return tensors


def adapt(model, tensors, dtype):
    """Adds the adapter to the model's linear layers. Everything else is frozen."""
    model.requires_grad_(False)
    for name in {name.removeprefix(PREFIX).rsplit(".lora_")[0] for name in tensors}:
        parent, _, last = name.rpartition(".")
        a, b = (tensors[f"{PREFIX}{name}.lora_{which}.weight"].to(dtype) for which in "AB")
        setattr(model.get_submodule(parent), last, Adapted(model.get_submodule(name), a, b))
    return model


def file_name(parameter):
    """The tensor name in the file for a parameter of an adapted model."""
    module, _, which = parameter.rpartition(".")
    return f"{PREFIX}{module}.lora_{which.upper()}.weight"


def step(bough, model, rollouts, adapter, *arguments, grads):
    fixed = ("--model", model, "--rollouts", rollouts, "--json", "--threads", 1, "--grads", grads)
    report = bough("step", *fixed, *arguments, f"lora.path={adapter}", ok=True).json
    return report, load_file(grads)


@pytest.mark.parametrize(
    ("architecture", "targets"),
    [
        ("qwen3", "all-linear"),
        ("qwen2_tied", ["q_proj", "v_proj"]),
        ("gemma3", "all-linear"),
        ("phi3", "all-linear"),
        ("olmo2", ["k_proj", "o_proj", "up_proj"]),
        ("llama_biases", ["gate_proj", "down_proj"]),
        ("qwen3", ["all-linear", "lm_head"]),
        ("qwen3_tied", ["lm_head"]),
        ("gemma2", ["q_proj", "lm_head"]),
        ("qwen3_moe_dense_layer", "all-linear"),  # experts have no adapters, as in PEFT
        ("mixtral", ["q_proj", "o_proj", "lm_head"]),
    ],
)
def test_gradients(bough, tiny_models, tmp_path, monkeypatch, architecture, targets):
    directory = tiny_models(architecture)
    seed = list(ARCHITECTURES).index(architecture)
    with monkeypatch.context() as patch:
        compute_in_double(patch)
        model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float64, attn_implementation="sdpa"
        )
        tensors = write_adapter(tmp_path / "adapter", model, targets)
        adapt(model, tensors, torch.float64)
        rollouts = random_rollouts(seed, model.config.vocab_size)
        path = write_rollouts(tmp_path / "rollouts.jsonl", rollouts)
        expected_loss, expected, norms = flat_gradients(model, rollouts, "pg")
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    # transformers' own error in fp32. It exceeds 1e-5 for matrices whose gradient is small compared with the
    # terms that it is the sum of.
    plain = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa")
    _, in_fp32, _ = flat_gradients(adapt(plain, tensors, torch.float32), rollouts, "pg")
    floor = {name: gradient_error(in_fp32[name].double(), expected[name], norms[name]) for name in names}
    for dtype, tolerance in (("fp64", 1e-9), ("fp32", 1e-5)):
        results = {}
        for mode in ("dense", "path"):
            report, got = step(
                bough, directory, path, tmp_path / "adapter", "--dtype", dtype, "--mode", mode,
                grads=tmp_path / "grads.safetensors",
            )  # fmt: skip
            assert report["loss"] == pytest.approx(expected_loss, rel=tolerance * 10, abs=1e-6)
            # The base model has no gradients at all.
            assert got.keys() == {file_name(name) for name in names}
            for name in names:
                error = gradient_error(got[file_name(name)].double(), expected[name], norms[name])
                # Both errors are rounding errors. Ours was 6 times transformers' error on a CPU without
                # AVX-512.
                times = 5 if is_batch_invariant() else 7
                bound = tolerance if dtype == "fp64" else max(tolerance, times * floor[name])
                assert error <= bound, (mode, dtype, name, error, floor[name])
            whole, reference, rounded = (
                torch.cat([g[key(name)].double().flatten() for name in sorted(names)])
                for g, key in ((got, file_name), (expected, str), (in_fp32, str))
            )
            error, floor_of_whole = ((g - reference).norm() / reference.norm() for g in (whole, rounded))
            bound = tolerance if dtype == "fp64" else max(tolerance, 5 * floor_of_whole)
            assert error <= bound, (mode, dtype, error, floor_of_whole)
            results[mode] = got
        if dtype == "fp64":
            for name in names:
                error = gradient_error(
                    results["path"][file_name(name)], results["dense"][file_name(name)], norms[name]
                )
                assert error <= 1e-10, (name, error)


# With tied embeddings, PEFT's adapter of the lm_head acts on the logits only. PEFT stores the base's lm_head
# beside it.
WITH_HEAD = [("qwen3", ["q_proj", "lm_head"]), ("llama_tied", ["down_proj", "lm_head"])]


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings", "ignore:Setting .save_embedding_layers")
@pytest.mark.parametrize(("architecture", "targets"), [("qwen3", "all-linear"), *WITH_HEAD])
def test_against_peft(bough, tiny_models, tmp_path, architecture, targets):
    directory = tiny_models(architecture)
    base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    torch.manual_seed(5)
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets, init_lora_weights=False)
    model = peft.get_peft_model(base, config)
    model.save_pretrained(tmp_path / "adapter")
    rollouts = random_rollouts(3, base.config.vocab_size)
    path = write_rollouts(tmp_path / "rollouts.jsonl", rollouts)
    expected_loss, expected, norms = flat_gradients(model, rollouts, "pg")
    report, got = step(bough, directory, path, tmp_path / "adapter", grads=tmp_path / "grads.safetensors")
    assert report["loss"] == pytest.approx(expected_loss, rel=1e-5, abs=1e-6)
    for name, gradient in got.items():
        theirs = name.replace(".weight", ".default.weight")
        assert gradient_error(gradient, expected[theirs], norms[theirs]) <= 1e-5, name


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings", "ignore:Setting .save_embedding_layers")
@pytest.mark.parametrize("tied", [False, True])
def test_twenty_steps_are_pefts(bough, tied):
    """`bough sft` on all examples in each step, and PEFT with torch's AdamW."""
    sizes = ("--hidden-size", 32, "--layers", 2, "--heads", 2, "--kv-heads", 1)
    bough("init", "base", *sizes, *(["--tie"] if tied else []), ok=True)
    texts = [("one plus two is ", "three"), ("one plus three is ", "four"), ("two plus two is ", "four")]
    data = [{"prompt": prompt, "completion": completion} for prompt, completion in texts]
    (bough.cwd / "data.jsonl").write_text("".join(json.dumps(example) + "\n" for example in data))
    torch.manual_seed(6)
    model = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(bough.cwd / "base", dtype=torch.float32),
        peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["q_proj", "up_proj", "lm_head"]),
    )
    model.save_pretrained(bough.cwd / "start")
    bough(
        "sft", "--model", "base", "--data", "data.jsonl", "--out", "adapter", "--max-steps", 20,
        "--lr", 0.003, "--batch-size", len(data), "lora.path=start", "optimizer.lr_scheduler_type=constant",
        "optimizer.warmup_steps_proportion=0", "optimizer.weight_decay=0", "optimizer.beta2=0.999",
        "optimizer.gradient_clipping=0", "optimizer.eps=1e-8", ok=True,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(bough.cwd / "base")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.003, betas=(0.9, 0.999), eps=1e-8, weight_decay=0)
    for _ in range(20):
        losses = []
        for prompt, completion in texts:
            ids = tokenizer(prompt + completion).input_ids + [tokenizer.eos_token_id]
            losses.append(-log_probs(model, ids)[len(tokenizer(prompt).input_ids) - 1 :])
        torch.cat(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    got = load_file(bough.cwd / "adapter" / "adapter_model.safetensors")
    assert got.keys() == expected.keys() and f"{PREFIX}lm_head.lora_B.weight" in got
    for name, tensor in got.items():
        assert (tensor - expected[name]).abs().max() <= 1e-4, name
    assert got[f"{PREFIX}lm_head.lora_B.weight"].abs().max() > 0.01
    # PEFT reads what Bough wrote.
    loaded = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(bough.cwd / "base", dtype=torch.float32), bough.cwd / "adapter"
    )
    ids = torch.arange(3, 40).unsqueeze(0)
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings", "ignore:Setting .save_embedding_layers")
@pytest.mark.parametrize(("architecture", "targets"), WITH_HEAD)
def test_merging_an_adapter_of_the_head(bough, tiny_models, tmp_path, architecture, targets):
    """The merged model has an lm_head of its own, and PEFT's logits."""
    directory = tiny_models(architecture)
    torch.manual_seed(5)
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets, init_lora_weights=False)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32), config)
    model.save_pretrained(tmp_path / "adapter")
    bough("merge", directory, tmp_path / "adapter", tmp_path / "merged", "--dtype", "fp32", ok=True)
    assert not json.loads((tmp_path / "merged" / "config.json").read_text())["tie_word_embeddings"]
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    base = load_file(directory / "model.safetensors")
    assert torch.equal(merged["model.embed_tokens.weight"], base["model.embed_tokens.weight"])
    assert not torch.equal(merged["lm_head.weight"], merged["model.embed_tokens.weight"])
    ids = torch.arange(3, 40).unsqueeze(0)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)


def test_an_adapter_of_another_head_is_refused(bough, tiny_models, tmp_path):
    """PEFT stores the base's lm_head beside the adapter. If it is not the model's, Bough refuses the file."""
    model = AutoModelForCausalLM.from_pretrained(tiny_models("qwen3"), dtype=torch.float32)
    tensors = write_adapter(tmp_path / "adapter", model, ["lm_head"])
    base = model.lm_head.weight.detach().clone()
    stored = f"{PREFIX}lm_head.base_layer.weight"
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    for head in (base, base.to(torch.bfloat16)):
        save_file({**tensors, stored: head}, file)
        bough("merge", tiny_models("qwen3"), tmp_path / "adapter", tmp_path / "merged", ok=True)
    base[3, 5] += 0.01
    save_file({**tensors, stored: base}, file)
    result = bough("merge", tiny_models("qwen3"), tmp_path / "adapter", tmp_path / "other")
    assert result.returncode == 2 and stored in result.stderr, result


def trained_adapter(bough, data_count=6):
    """Trains an adapter by `bough sft` on a small model. Returns the folders of the model and the adapter."""
    bough("data", "sums", "--out", "train.jsonl", "-n", data_count, "--max-operand", 9, ok=True)
    bough("init", "base", "--hidden-size", 32, "--layers", 2, "--heads", 2, "--kv-heads", 1, ok=True)
    bough(
        "sft", "--model", "base", "--data", "train.jsonl", "--out", "adapter", "--max-steps", 4, "--lr", 0.02,
        "lora.rank=3", "lora.alpha=7", "lora.targets=[q_proj,down_proj,up_proj]", ok=True,
    )  # fmt: skip
    return bough.cwd / "base", bough.cwd / "adapter"


def test_a_trained_adapter_merged_is_the_model_with_it(bough):
    base, adapter = trained_adapter(bough)
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (3, 7)
    assert config["target_modules"] == ["down_proj", "q_proj", "up_proj"]
    tensors = load_file(adapter / "adapter_model.safetensors")
    assert any(tensor.abs().max() > 0 for name, tensor in tensors.items() if ".lora_B." in name)
    bough("merge", base, adapter, "merged", "--dtype", "fp32", ok=True)
    merged = AutoModelForCausalLM.from_pretrained(bough.cwd / "merged", dtype=torch.float32)
    expected = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    ids = torch.arange(3, 40).unsqueeze(0)
    plain = expected(ids).logits
    adapt(expected, tensors, torch.float32)
    torch.testing.assert_close(merged(ids).logits, expected(ids).logits, rtol=1e-5, atol=1e-5)
    assert (merged(ids).logits - plain).abs().max() > 1e-2


def test_a_merged_model_has_the_type_of_the_stored_weights(bough):
    """The key dtype of config.json may say another type than the tensors have."""
    base, adapter = trained_adapter(bough)
    weights = load_file(base / "model.safetensors")
    stored = {tensor.dtype for tensor in weights.values()}
    config = json.loads((base / "config.json").read_text())
    config["dtype"] = "bfloat16" if stored == {torch.float32} else "float32"
    (base / "config.json").write_text(json.dumps(config))
    bough("merge", base, adapter, "merged", ok=True)
    merged = load_file(bough.cwd / "merged" / "model.safetensors")
    assert {tensor.dtype for tensor in merged.values()} == stored


def test_peft_reads_what_was_trained(bough):
    base, adapter = trained_adapter(bough)
    tensors = load_file(adapter / "adapter_model.safetensors")
    expected = adapt(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), tensors, torch.float32)
    model = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter
    )
    ids = torch.arange(3, 40).unsqueeze(0)
    torch.testing.assert_close(model(ids).logits, expected(ids).logits, rtol=1e-5, atol=1e-5)


def test_without_an_adapter_sft_trains_the_weights(bough):
    base, adapter = trained_adapter(bough)
    assert not (adapter / "model.safetensors").exists()
    assert (base / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"r": 2.5}, "a whole number"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"bias": "all"}, "bias"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"r": 4}, "lora_A"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ],
)
def test_other_adapters_are_refused(bough, tiny_models, tmp_path, change, message):
    directory = tiny_models("qwen3")
    model = AutoModelForCausalLM.from_pretrained(directory)
    write_adapter(tmp_path / "adapter", model, ["q_proj"], **change)
    result = bough("merge", directory, tmp_path / "adapter", tmp_path / "merged")
    assert result.returncode == 2 and message in result.stderr, result
    assert not (tmp_path / "merged").exists()


def test_an_adapter_of_another_model_is_refused(bough, tiny_models, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_models("qwen3"))
    write_adapter(tmp_path / "adapter", model, ["q_proj", "down_proj"])
    result = bough("merge", tiny_models("phi3"), tmp_path / "adapter", tmp_path / "merged")
    assert result.returncode == 2 and "q_proj" in result.stderr, result


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["lora.rank=4", "lora.targets=[q_proj,query]"], "query"),
        (["lora.rank=4", "lora.dropout=0.1"], "lora.dropout"),
        (["lora.rank=4", "lora.targets=[]"], "lora.targets"),
    ],
)
def test_settings_are_refused(bough, tiny_models, tmp_path, settings, message):
    path = write_rollouts(tmp_path / "rollouts.jsonl", random_rollouts(1, 311))
    result = bough("step", "--model", tiny_models("qwen3"), "--rollouts", path, *settings)
    assert result.returncode == 2 and message in result.stderr, result
