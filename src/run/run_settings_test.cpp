#include "run/run_settings.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace bough
