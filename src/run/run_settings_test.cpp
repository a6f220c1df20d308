#include "run/run_settings.h"

#include <gtest/gtest.h>

#include <set>

#include "base/peer_settings.h"
#include "run/sft.h"

namespace bough {
namespace {

// Evaluation takes from gconfig only what defines a sample of the task. Settings that change training's
// sampling do not apply.
TEST(RunSettings, EvaluationSamplingTakesOnlyLengthAndStopsFromGconfig) {
  RunSettings settings;
  settings.gconfig.n_samples = 8;
  settings.gconfig.max_new_tokens = 77;
  settings.gconfig.min_new_tokens = 5;
  settings.gconfig.temperature = 0.7;
  settings.gconfig.top_p = 0.9;
  settings.gconfig.top_k = 50;
  settings.gconfig.min_p = 0.1;
  settings.gconfig.repetition_penalty = 1.2;
  settings.gconfig.presence_penalty = 0.3;
  settings.gconfig.frequency_penalty = 0.4;
  settings.gconfig.greedy = true;
  settings.gconfig.stop = {"Q:"};
  settings.gconfig.stop_token_ids = {7};
  settings.gconfig.ignore_eos = true;
  settings.evaluator.n_samples = 3;
  settings.evaluator.temperature = 0.5;
  SamplingParameters got = settings.evaluation_sampling();
  SamplingParameters expected;
  expected.n_samples = 3;
  expected.temperature = 0.5;
  expected.max_new_tokens = 77;
  expected.stop = {"Q:"};
  expected.stop_token_ids = {7};
  // Compares every field, so that future fields are covered.
  auto expected_fields = describe_settings(expected).fields;
  const auto fields = describe_settings(got).fields;
  ASSERT_EQ(fields.size(), expected_fields.size());
  for (size_t i = 0; i < fields.size(); ++i)
    EXPECT_EQ(fields[i].get(), expected_fields[i].get()) << fields[i].key;
}

// The terminal shows at the start, and config.yaml keeps, the values for settings that nobody gave.
TEST(RunSettings, DefaultsFollowTheDevice) {
  const auto read = [](const std::vector<std::string>& given) {
    std::vector<std::string> overrides = {"model.path=m", "train_dataset.path=d"};
    overrides.insert(overrides.end(), given.begin(), given.end());
    return parse_settings<RunSettings>("", "run.yaml", overrides);
  };
  const auto changed = [](const RunSettings& settings) {
    std::string keys;
    for (const SettingRow& row : settings_rows(settings))
      if (!row.is_default && row.key != "model.path" && row.key != "train_dataset.path")
        keys += row.key + "=" + row.value + " ";
    return keys;
  };
  const RunSettings cpu = read({});
  EXPECT_EQ(cpu.dtype, "fp32");
  EXPECT_EQ(cpu.actor.mb_spec.max_tokens_per_mb, 4096);
  EXPECT_EQ(cpu.rollout.prefill_chunk_tokens, 512);
  EXPECT_EQ(changed(cpu), "");
  EXPECT_EQ(
      changed(read({"device=cuda"})),
      "device=cuda dtype=bf16 rollout.prefill_chunk_tokens=4096 actor.mb_spec.max_tokens_per_mb=16384 ");
  const std::vector<std::string> own = {"device=cuda", "dtype=fp32", "rollout.prefill_chunk_tokens=100",
                                        "actor.mb_spec.max_tokens_per_mb=200"};
  EXPECT_EQ(changed(read(own)),
            "device=cuda rollout.prefill_chunk_tokens=100 actor.mb_spec.max_tokens_per_mb=200 ");
  // The file of a run has the values, so that a later version with other defaults resumes it with these.
  const std::string yaml = settings_yaml(read({"device=cuda"}));
  EXPECT_EQ(parse_settings<RunSettings>(yaml, "config.yaml").actor.mb_spec.max_tokens_per_mb, 16384);
  EXPECT_NE(yaml.find("dtype: bf16"), std::string::npos) << yaml;

  const auto sft = [](const std::string& device) {
    return parse_settings<SftSettings>("", "command line",
                                       {"model.path=m", "out=o", "train_dataset.path=d", "device=" + device});
  };
  EXPECT_EQ(sft("cpu").dtype, "fp32");
  EXPECT_EQ(sft("cuda").dtype, "bf16");
  EXPECT_EQ(sft("cuda").mb_spec.max_tokens_per_mb, kMaxTokensPerPassOfGpu);
}

void collect_keys(const SettingField& group, const std::string& prefix, std::set<std::string>& out) {
  for (const SettingField& field : group.fields) {
    out.insert(internal::join_key(prefix, field.key));
    if (field.is_group()) collect_keys(field, internal::join_key(prefix, field.key), out);
  }
}

template <class S>
std::set<std::string> keys_of() {
  S settings;
  std::set<std::string> out;
  collect_keys(describe_settings(settings), "", out);
  return out;
}

template <class S>
std::string error_of_settings(const std::string& yaml, const std::vector<std::string>& overrides = {}) {
  try {
    parse_settings<S>(yaml, "run.yaml", overrides);
  } catch (const UserError& error) {
    return error.what();
  }
  return "no error";
}

std::string unknown_key(const std::string& key) {
  const std::string message = error_of_settings<RunSettings>("", {key + "=1"});
  const std::string begin = "command line: unknown setting " + quoted(key) + "; ";
  return message.starts_with(begin) ? message.substr(begin.size()) : message;
}

TEST(PeerSettings, EveryRowSuggestsASettingThatExists) {
  const auto of_run = keys_of<RunSettings>(), of_sft = keys_of<SftSettings>();
  std::set<std::string> names;
  for (const PeerSetting& row : peer_settings()) {
    const std::string name(row.name), key(row.key);
    EXPECT_FALSE(of_run.contains(name)) << name << " is a setting";
    for (const auto& [spelling, accepted] : RunSettings::aliases())
      EXPECT_NE(name, spelling) << "is accepted";
    const bool is_first = names.insert(name).second;
    const std::string note = row.note.empty() ? "" : str(" (", row.note, ")");
    if (key.empty()) {
      EXPECT_FALSE(row.note.empty()) << name << " says nothing";
      EXPECT_EQ(unknown_key(name), row.note);
    } else if (is_first) {
      EXPECT_TRUE(of_run.contains(key)) << name << " suggests " << key;
      EXPECT_EQ(unknown_key(name), "did you mean " + quoted(key) + note + "?") << name;
    } else {
      EXPECT_TRUE(of_run.contains(key) || of_sft.contains(key)) << name << " suggests " << key;
    }
  }
}

TEST(PeerSettings, AnUnknownKeyOfAnotherTrainerSuggestsBoughsKey) {
  EXPECT_EQ(unknown_key("learning_rate"), "did you mean 'actor.optimizer.lr'?");
  EXPECT_EQ(unknown_key("actor.learning-rate"), "did you mean 'actor.optimizer.lr'?");
  EXPECT_EQ(unknown_key("actor.optimizer.learning_rate"), "did you mean 'actor.optimizer.lr'?");
  EXPECT_EQ(unknown_key("critic.learning_rate"), "did you mean 'critic.optimizer.lr'?");
  EXPECT_EQ(unknown_key("critic.optim.lr"), "did you mean 'critic.optimizer.lr'?");
  EXPECT_EQ(unknown_key("gconfig.max_tokens"), "did you mean 'gconfig.max_new_tokens'?");
  EXPECT_EQ(unknown_key("gconfig.n"), "did you mean 'gconfig.n_samples'?");
  EXPECT_EQ(unknown_key("evaluator.n"), "did you mean 'evaluator.n_samples'?");
  EXPECT_EQ(unknown_key("actor_rollout_ref.rollout.n"), "did you mean 'gconfig.n_samples'?");
  EXPECT_EQ(unknown_key("actor_rollout_ref.rollout.val_kwargs.n"), "did you mean 'evaluator.n_samples'?");
  EXPECT_EQ(unknown_key("actor_rollout_ref.actor.optim.lr"), "did you mean 'actor.optimizer.lr'?");
  EXPECT_EQ(unknown_key("actor_rollout_ref.model.path"), "did you mean 'model.path'?");
  EXPECT_EQ(unknown_key("rollout.temperature"), "did you mean 'gconfig.temperature'?");
  EXPECT_EQ(unknown_key("algorithm.adv_estimator"), "did you mean 'actor.adv_estimator'?");
  EXPECT_EQ(unknown_key("data.train_files"), "did you mean 'train_dataset.path' (JSON Lines, not Parquet)?");
  EXPECT_EQ(unknown_key("saver.freq_epochs"), "did you mean 'saver.freq_steps'?");
  EXPECT_EQ(unknown_key("evaluator.freq_epochs"), "did you mean 'evaluator.freq_steps'?");
  EXPECT_EQ(unknown_key("max_prompt_length"),
            "did you mean 'train_dataset.max_length' (with train_dataset.overlong_prompts)?");
  EXPECT_EQ(unknown_key("data.filter_overlong_prompts"),
            "did you mean 'train_dataset.overlong_prompts' (drop)?");
  EXPECT_EQ(unknown_key("trainer.type"), "docs/coming_from.md has Bough's settings")
      << "several have this name";
  EXPECT_EQ(unknown_key("data.something_else"), "docs/coming_from.md has Bough's settings");
  // A mistyped key of Bough's own is still found by its letters.
  EXPECT_EQ(unknown_key("gconfig.temprature"), "did you mean 'gconfig.temperature'?");
}

TEST(PeerSettings, AGroupOfAnotherTrainerIsReadUpToItsFirstUnknownKey) {
  EXPECT_EQ(error_of_settings<RunSettings>("seed: 1\nactor_rollout_ref:\n  rollout:\n    n: 8\n"),
            "run.yaml:4: unknown setting 'actor_rollout_ref.rollout.n'; did you mean 'gconfig.n_samples'?");
  for (const char* nothing_inside : {"data: 3\n", "data: {}\n", "data:\n", "data: [1]\n", "data: {x: {}}\n"})
    EXPECT_TRUE(
        error_of_settings<RunSettings>(nothing_inside).starts_with("run.yaml:1: unknown setting 'data"))
        << error_of_settings<RunSettings>(nothing_inside);
}

TEST(PeerSettings, OtherSettingsSuggestOnlyTheirOwnKeys) {
  const auto error = [](const std::string& key) { return error_of_settings<SftSettings>("", {key + "=1"}); };
  const std::string begin = "command line: unknown setting ";
  EXPECT_EQ(error("learning_rate"), begin + "'learning_rate'; did you mean 'optimizer.lr'?");
  EXPECT_EQ(error("num_train_epochs"), begin + "'num_train_epochs'; did you mean 'epochs'?");
  EXPECT_EQ(error("output_dir"), begin + "'output_dir'; did you mean 'out'?");
  EXPECT_EQ(error("num_generations").find("gconfig"), std::string::npos);
}

}  // namespace
}  // namespace bough
