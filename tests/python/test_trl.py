"""bough.trl against TRL's own trainers, which replay the same completions."""

import random
import warnings

import pytest
import torch
from bough.trl import TreeGRPOTrainer, TreeRLOOTrainer
from datasets import Dataset
from peft import LoraConfig
from tiny_models import make_tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

warnings.filterwarnings("ignore", message=".*rollout_func.*")
NUM_SAMPLES = 4


def make_tokenizer():
    vocab = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, 311)}}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def make_dataset():
    draw = random.Random(0)
    prompts = [" ".join(f"w{draw.randrange(2, 311)}" for _ in range(draw.randint(3, 30))) for _ in range(64)]
    return Dataset.from_list([{"prompt": prompt} for prompt in prompts])


def completions_of(prompts):
    completion_ids = []
    for index, prompt in enumerate(prompts):
        draw = random.Random(f"{prompt} {index % NUM_SAMPLES}")
        completion_ids.append([draw.randrange(2, 311) for _ in range(draw.randint(1, 12))] + [1])
    return completion_ids


def recorded_completions(prompts, trainer):
    """The same completions whatever the weights are."""
    prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    completion_ids = completions_of(prompts)
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": completion_ids,
        "logprobs": [[-5.0] * len(ids) for ids in completion_ids],
    }


def reward_of(completion_ids, **_):
    return [float(sum(ids) % 7) for ids in completion_ids]


def saved_model(tmp_path):
    """A folder: TRL loads the reference from it, too."""
    folder = tmp_path / "model"
    make_tiny_model("qwen3_tied", seed=3).save_pretrained(folder)
    return str(folder)


class Record(TrainerCallback):
    def __init__(self):
        self.grad_norms = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "grad_norm" in logs:
            self.grad_norms.append(logs["grad_norm"])


def run(kind, tmp_path, model=None, config=GRPOConfig, steps=20, extra=None, **settings):
    """Trains and returns the trainer, its gradient norms, and the log-probabilities of its first loss."""
    torch.manual_seed(0)
    arguments = {
        "output_dir": str(tmp_path),
        "per_device_train_batch_size": 2 * NUM_SAMPLES,
        "num_generations": NUM_SAMPLES,
        "max_completion_length": 16,
        "num_iterations": 2,
        "beta": 0.05,
        "temperature": 0.8,
        "learning_rate": 1e-3,
        "max_steps": steps,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_dropout": True,
        **settings,
    }
    record = Record()
    first = []

    class Recording(kind):
        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            first.append(result[0].detach().clone())
            return result

    Recording.__name__ = kind.__name__
    if config is GRPOConfig:
        extra = {**(extra or {}), "rollout_func": recorded_completions}
    trainer = Recording(
        model=model if model is not None else saved_model(tmp_path),
        reward_funcs=reward_of,
        args=config(**arguments),
        train_dataset=make_dataset(),
        processing_class=make_tokenizer(),
        callbacks=[record],
        **(extra or {}),
    )
    trainer.train()
    return trainer, record.grad_norms, first


def assert_same_run(plain, tree):
    (plain_trainer, plain_norms, plain_log_probs), (tree_trainer, tree_norms, tree_log_probs) = plain, tree
    assert len(plain_norms) == len(tree_norms) == 20
    assert max(plain_norms) > 1e-3, "the run trains"
    torch.testing.assert_close(tree_log_probs[0], plain_log_probs[0], rtol=0, atol=1e-5)
    assert tree_norms == pytest.approx(plain_norms, rel=1e-4)
    for (name, a), (_, b) in zip(
        plain_trainer.model.named_parameters(), tree_trainer.model.named_parameters(), strict=True
    ):
        assert (a - b).norm() <= 1e-4 * max(a.norm(), 1e-3), name


CASES = [
    {"loss_type": "grpo"},
    {"loss_type": "bnpo"},
    {"loss_type": "dr_grpo"},
    {"loss_type": "dapo"},
    {"loss_type": "cispo"},
    {"loss_type": "sapo"},
    {"loss_type": "vespo"},
    {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    {"loss_type": "dapo", "entropy_coef": 0.01},
    {"loss_type": "dapo", "top_entropy_quantile": 0.4},
    {"loss_type": "dapo", "steps_per_generation": 2, "gradient_accumulation_steps": 2},
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_grpo_trains_the_same_weights(tmp_path, case):
    plain = run(GRPOTrainer, tmp_path / "plain", **case)
    tree = run(TreeGRPOTrainer, tmp_path / "tree", extra={"keep_groups": False}, **case)
    assert_same_run(plain, tree)


def test_defaults_of_grpo_config_train(tmp_path):
    """bf16 autocast and gradient checkpointing, as GRPOConfig sets them, and groups that stay together."""
    seen = []

    class Trainer(TreeGRPOTrainer):
        def _compute_loss(self, model, inputs):
            seen.append([tuple(row) for row in inputs["prompt_ids"].tolist()])
            return super()._compute_loss(model, inputs)

    settings = {"bf16": True, "gradient_checkpointing": True, "steps_per_generation": 2, "num_iterations": 1}
    trainer, norms, log_probs = run(Trainer, tmp_path, steps=4, **settings)
    assert all(torch.isfinite(torch.tensor(norms))) and max(norms) > 1e-3
    assert log_probs[0].dtype == torch.float32
    for prompts in seen:
        assert all(prompts.count(prompt) == NUM_SAMPLES for prompt in prompts)


def test_rloo_trains_the_same_weights(tmp_path, monkeypatch):
    """RLOOTrainer has no rollout_func, so generation itself is replaced by recorded completions."""

    def recorded(trainer, prompt_ids, images, multimodal_fields):
        return completions_of([trainer.processing_class.decode(ids) for ids in prompt_ids])

    monkeypatch.setattr(RLOOTrainer, "_generate_single_turn", recorded)
    plain, tree = (RLOOTrainer, tmp_path / "plain"), (TreeRLOOTrainer, tmp_path / "tree")
    assert_same_run(
        run(*plain, config=RLOOConfig), run(*tree, config=RLOOConfig, extra={"keep_groups": False})
    )


@pytest.mark.parametrize("beta", [0.0, 0.05])
def test_an_adapter_trains_as_in_trl(tmp_path, beta):
    """PEFT's LoRA. With beta > 0 the reference is the model without its adapter: a stale adapter would make
    the KL 0."""
    peft = {"peft_config": LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", lora_dropout=0.0)}
    plain = run(GRPOTrainer, tmp_path / "plain", extra=dict(peft), beta=beta)
    tree = run(TreeGRPOTrainer, tmp_path / "tree", extra={**peft, "keep_groups": False}, beta=beta)
    assert_same_run(plain, tree)
    if beta:
        kls = [entry["kl"] for entry in tree[0].state.log_history if "kl" in entry]
        assert max(kls) > 1e-3
