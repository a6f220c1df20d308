// Conversations under sparse attention: training computes each turn's log-probabilities as generation did.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "control/fakes.h"
#include "rollout/rollout_test_util.h"
#include "train/executor.h"
#include "train/make_batch.h"

namespace bough {
namespace {

// By pages, and by blocks of 8 tokens.
const SparseSettings kConversationPolicies[] = {
    {.budget = {"16x5"}, .dense_layers = 1},
    {.budget = {"64"}, .block = 8, .sink_tokens = 8, .recent_tokens = 16, .dense_layers = 1}};

// ChatML over 97 token ids: a line break, the characters from ' ' to '}', <|im_start|> and <|im_end|>.
class SmallChat final : public testing::TemplateChat {
 public:
  explicit SmallChat(const std::string& jinja) : TemplateChat(ChatTemplate::from_text(jinja, "test")) {}
  std::vector<int32_t> encode_chat(std::string_view text, bool) const override {
    std::vector<int32_t> ids;
    while (!text.empty()) {
      const bool is_start = text.starts_with(kBegin), is_end = text.starts_with(kEnd);
      ids.push_back(is_start ? 95 : is_end ? 96 : text[0] == '\n' ? 0 : text[0] - ' ' + 1);
      text.remove_prefix(is_start ? kBegin.size() : is_end ? kEnd.size() : 1);
    }
    return ids;
  }
  std::string text_of(std::span<const int32_t> ids) const override {
    std::string text;
    for (const int32_t id : ids) {
      if (id >= 95) text += id == 95 ? kBegin : kEnd;
      else text += id == 0 ? '\n' : static_cast<char>(id - 1 + ' ');
    }
    return text;
  }

 private:
  static constexpr std::string_view kBegin = "<|im_start|>", kEnd = "<|im_end|>";
};

// The template shows the second turn of the model otherwise, once a third turn is asked for.
std::string chat_template(bool rewrites_history) {
  const std::string content = rewrites_history
                                  ? "{{ 'x' if loop.index0 == 3 and messages|length > 4 else m.content }}"
                                  : "{{ m.content }}";
  return R"({%- for m in messages -%}<|im_start|>{{ m.role }}{{ "\n" }})" + content +
         R"(<|im_end|>{{ "\n" }}{%- endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant{{ "\n" }})"
         "{%- endif -%}";
}

struct SampledConversations {
  std::vector<Trajectory> rows;
  int64_t later_turns = 0;  // rows in which a turn follows another turn
  int64_t rewritten = 0;    // rows that begin with tokens which another row trains
};

std::unique_ptr<Model> conversation_model() {
  ModelConfig config = small_config();
  config.num_layers = 4;
  config.max_position_embeddings = 2048;
  return small_rollout_model(at::kDouble, 5, config);
}

SampledConversations sample_conversations(const Model& model, const ChatCodec& chat,
                                          const SparseSettings& sparse) {
  EmbeddedEngineOptions options = engine_options();
  options.settings.sparse = sparse;
  options.stop_tokens = {96};
  EmbeddedEngine engine(model, options);
  const Dataset problems = testing::numbered_problems(6);
  DatasetTasks tasks(problems);
  testing::FakeEnvironment environment;
  environment.turns_of = [](const Problem&) { return 3; };
  const ConversationFormat format(chat, {}, 2000);
  GeneratorOptions sampling;
  sampling.sampling.n_samples = 2;
  sampling.sampling.max_new_tokens = 500;
  sampling.sampling.min_new_tokens = 30;
  Generator generator({engine, nullptr, &environment, &format}, tasks, sampling);
  SampledConversations out;
  const std::vector<FinishedGroup> groups =
      generator.collect(static_cast<int64_t>(problems.size()), {}).value();
  for (const FinishedGroup& group : groups)
    for (const Trajectory& row : group.samples) {
      const auto first = std::find(row.loss_mask.begin(), row.loss_mask.end(), 1) - row.loss_mask.begin();
      if (first < std::ssize(row.turns))
        out.later_turns += row.turns.back() > row.turns[static_cast<size_t>(first)];
      out.rewritten += row.columns.contains(kSampledColumn);
      if (row.trains_a_token()) out.rows.push_back(row);
    }
  return out;
}

// The largest difference between the log-probabilities of training and those that the engine reported.
double training_error(Model& model, const std::vector<Trajectory>& rows, const SparseSettings& sparse) {
  std::vector<const Trajectory*> pointers;
  for (const Trajectory& row : rows) pointers.push_back(&row);
  TrainBatch batch = make_batch(rows, {}, at::kDouble);
  mark_tokens(batch, pointers, {.sampled = true});
  Executor executor(model, {.sparse = sparse_policy(sparse, at::kCPU)});
  const at::Tensor log_probs_R =
      executor.execute_forward(make_plan("blocks", plan_request(batch, 128)), batch).log_probs_R;
  return (log_probs_R - batch.fields.behaviour_log_probs_R).abs().max().item<double>();
}

TEST(SparseConversation, TrainingHasTheLogProbabilitiesOfLaterTurns) {
  const auto model = conversation_model();
  for (const bool rewrites_history : {false, true}) {
    const SmallChat chat(chat_template(rewrites_history));
    const SparseSettings& sparse = kConversationPolicies[rewrites_history ? 1 : 0];
    const SampledConversations conversations = sample_conversations(*model, chat, sparse);
    EXPECT_GT(conversations.later_turns, 4);
    EXPECT_EQ(conversations.rewritten > 4, rewrites_history);
    EXPECT_LT(training_error(*model, conversations.rows, sparse), 1e-6) << "the engine's values are floats";
  }
}

}  // namespace
}  // namespace bough
