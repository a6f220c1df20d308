#include "run/sft.h"

#include <algorithm>
#include <filesystem>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "base/file.h"
#include "base/format.h"
#include "base/log.h"
#include "base/parallel.h"
#include "base/progress.h"
#include "base/random.h"
#include "control/prompt_encoder.h"
#include "cost/calibrate.h"
#include "cost/run_costs.h"
#include "models/checkpoint.h"
#include "models/lora.h"
#include "run/run_checkpoints.h"
#include "text/stop_tokens.h"
#include "train/executor.h"
#include "train/router_losses.h"
#include "train/run_checkpoint.h"

namespace bough {

namespace {

class Sft {
 public:
  Sft(const SftSettings& settings, const SftOptions& options);

  SftSummary work();

 private:
  std::vector<SftExample> read_examples();
  void encode_examples();
  int64_t max_length() const;  // of an example, in tokens
  bool fit(const PromptEncoder& encoder, const SftExample& example, EncodedExample& encoded,
           int64_t limit) const;
  // The examples of a training step. Each epoch has its own order. An epoch's last batch may be smaller.
  std::vector<const Trajectory*> batch_of(int64_t step);
  double train(const std::vector<const Trajectory*>& examples);
  void train_all();
  void resume();
  void check_unfinished(const std::filesystem::path& settings_file) const;
  void write_checkpoint();
  uint64_t hash_examples() const;  // their tokens and masks
  void write_model();
  SftSummary summary() const;

  const SftSettings& settings_;
  const SftOptions& options_;
  std::vector<Trajectory> sequences_;
  // Each example's sequences, one for each message that is learned: the first one, and the end.
  std::vector<std::pair<size_t, size_t>> examples_;
  std::unique_ptr<Model> model_;
  CostModel costs_;
  int64_t steps_per_epoch_ = 0;
  int64_t total_steps_ = 0;
  std::unique_ptr<Loss> loss_;
  std::unique_ptr<Optimizer> optimizer_;
  std::vector<size_t> order_;
  int64_t ordered_epoch_ = -1;
  const std::filesystem::path unfinished_;  // holds the checkpoint
  uint64_t fingerprint_ = 0;                // hash_examples()
  std::vector<double> losses_;              // of the steps so far
  int64_t flat_tokens_ = 0, tree_tokens_ = 0, trained_tokens_ = 0;
  const Clock::Time start_ = SteadyClock().now();
  double seconds_before_ = 0;  // of the training that this one continues
  WeightedSums metrics_;       // of the last step
};

std::unique_ptr<Model> load_trained(const SftSettings& settings) {
  auto model = load_model(settings.model.path, scalar_type_of(settings.dtype),
                          settings.device == "cuda" ? at::kCUDA : at::kCPU);
  model->set_precisions(
      {router_type_named(settings.model.router_dtype), head_type_named(settings.model.head_dtype)});
  check_router_losses("", settings.router_losses, model->config());
  if (settings.lora.enabled()) add_adapter(*model, settings.lora, static_cast<uint64_t>(settings.seed));
  return model;
}

Sft::Sft(const SftSettings& settings, const SftOptions& options)
    : settings_(settings),
      options_(options),
      model_(load_trained(settings)),
      costs_(model_costs(*model_, options_.stop, settings.router_losses.is_used())),
      unfinished_(std::filesystem::path(settings.out) / "unfinished") {
  encode_examples();
  fingerprint_ = hash_examples();
  const auto count = static_cast<int64_t>(examples_.size());
  const int64_t batch = settings.train_dataset.batch_size;
  steps_per_epoch_ = (count + batch - 1) / batch;
  total_steps_ = settings.max_steps > 0 ? settings.max_steps : settings.epochs * steps_per_epoch_;
  LossSettings loss;
  loss.loss = "sft";
  loss_ = make_loss(loss);
  optimizer_ = std::make_unique<Optimizer>(*model_, settings.optimizer, total_steps_);
}

// A conversation whose messages are all learned becomes several examples that end with one of them. They have
// the conversation's `where`.
std::vector<SftExample> Sft::read_examples() {
  std::vector<SftExample> examples = read_sft(settings_.train_dataset);
  if (settings_.learned_messages == "last") return examples;
  std::vector<SftExample> out;
  int64_t num_conversations = 0, num_first = 0;
  for (SftExample& example : examples) {
    num_conversations += !example.messages.empty();
    for (size_t i = 0; i + 1 < example.messages.size(); ++i) {
      if (example.messages[i].value("role", "") != "assistant") continue;
      if (i == 0) {
        ++num_first;
        continue;
      }
      SftExample& part = out.emplace_back(example);
      part.messages.erase(part.messages.begin() + static_cast<std::ptrdiff_t>(i) + 1, part.messages.end());
    }
    out.push_back(std::move(example));
  }
  if (num_conversations == 0)
    log_warning(str("learned_messages: all has no effect: no example of ", settings_.train_dataset.path,
                    " has messages"));
  if (num_first > 0)
    log_info(str("learned_messages: ", num_first, " of ", num_conversations,
                 " conversations begin with the assistant; this message is not learned"));
  return out;
}

void Sft::encode_examples() {
  const PromptEncoder encoder = PromptEncoder::from_directory(settings_.model.path);
  const std::vector<int32_t> stop_tokens = load_stop_tokens(settings_.model.path, encoder.tokenizer());
  std::optional<int32_t> stop_token;
  if (!stop_tokens.empty()) stop_token = stop_tokens.front();
  else
    log_warning(
        str(settings_.model.path, ": the model has no stop token: it will not learn where answers end"));
  const std::vector<SftExample> examples = read_examples();
  std::vector<EncodedExample> encoded(examples.size());
  {
    Progress progress("encoding", static_cast<int64_t>(examples.size()), "examples",
                      options_.show_progress && examples.size() >= 1000 ? ProgressStyle::kAutomatic
                                                                        : ProgressStyle::kSilent);
    parallel_for(examples.size(), [&](size_t i) {
      try {
        encoded[i] = encoder.encode(examples[i], stop_token);
      } catch (const UserError& error) {
        throw UserError(str(examples[i].where, ": ", error.what()));
      }
      progress.advance();
    });
  }
  const int64_t limit = max_length();
  int64_t num_overlong = 0;
  std::string last_where;
  for (size_t i = 0; i < encoded.size(); ++i) {
    if (std::ssize(encoded[i].ids) > limit) {
      ++num_overlong;
      if (!fit(encoder, examples[i], encoded[i], limit)) continue;
    }
    if (std::exchange(last_where, examples[i].where) != examples[i].where)
      examples_.emplace_back(sequences_.size(), sequences_.size());
    ++examples_.back().second;
    Trajectory& trajectory = sequences_.emplace_back();
    trajectory.input_ids = std::move(encoded[i].ids);
    trajectory.loss_mask = std::move(encoded[i].loss_mask);
  }
  if (examples_.empty())
    throw UserError(
        str(settings_.train_dataset.path, ": no example is left: all have more than ", limit, " tokens"));
  if (num_overlong > 0)
    log_info(str("train_dataset: ", num_overlong, " of ", examples.size(), " examples have more than ", limit,
                 " tokens; they were ",
                 settings_.train_dataset.overlong_prompts == "drop" ? "left out" : "cut at their left"));
}

int64_t Sft::max_length() const {
  const int64_t context = model_->config().max_length(), given = settings_.train_dataset.max_length;
  return given > 0 ? std::min(given, context) : context;
}

// Makes an example of more than `limit` tokens fit, by the setting overlong_prompts. False: it is left out.
bool Sft::fit(const PromptEncoder& encoder, const SftExample& example, EncodedExample& encoded,
              int64_t limit) const {
  const std::string& mode = settings_.train_dataset.overlong_prompts;
  if (mode == "drop") return false;
  const auto length = std::ssize(encoded.ids);
  const auto refuse = [&](const std::string& remedy) {
    throw UserError(str(example.where, ": the example has ", length, " tokens, but at most ", limit, " fit (",
                        limit < model_->config().max_length() ? "train_dataset.max_length"
                                                              : model_->config().max_length_reason(),
                        "); ", remedy));
  };
  if (mode == "error")
    refuse(
        "leave it out (train_dataset.overlong_prompts: drop), cut its prompt (truncate_left), or use fewer "
        "worked examples");
  if (!example.messages.empty())
    refuse("train_dataset.overlong_prompts is truncate_left, which cuts only plain prompts; set it to drop");
  const auto num_prompt = std::count(encoded.loss_mask.begin(), encoded.loss_mask.end(), 0);
  const auto completion = encoded.ids.begin() + num_prompt;
  std::vector<int32_t> prompt(encoded.ids.begin(), completion);
  encoder.truncate_left(prompt, std::max<int64_t>(1, limit - (length - num_prompt)));
  std::vector<int32_t> ids = prompt;
  ids.insert(ids.end(), completion, encoded.ids.end());
  if (std::ssize(ids) > limit) refuse("its completion alone does not fit; shorten it");
  encoded.loss_mask.erase(encoded.loss_mask.begin(),
                          encoded.loss_mask.begin() + (num_prompt - std::ssize(prompt)));
  encoded.ids = std::move(ids);
  return true;
}

std::vector<const Trajectory*> Sft::batch_of(int64_t step) {
  const int64_t epoch = step / steps_per_epoch_;
  if (epoch != ordered_epoch_) {
    order_ = CounterRandom(static_cast<uint64_t>(settings_.seed), Purpose::shuffle)
                 .permutation(examples_.size(), static_cast<uint64_t>(epoch));
    ordered_epoch_ = epoch;
  }
  const auto batch = static_cast<size_t>(settings_.train_dataset.batch_size);
  const size_t begin = static_cast<size_t>(step % steps_per_epoch_) * batch;
  std::vector<const Trajectory*> out;
  for (size_t i = begin; i < std::min(begin + batch, order_.size()); ++i)
    for (size_t s = examples_[order_[i]].first; s < examples_[order_[i]].second; ++s)
      out.push_back(&sequences_[s]);
  return out;
}

double Sft::train(const std::vector<const Trajectory*>& examples) {
  const TrainBatch batch = make_batch(examples, AggregationSettings{}, accumulator_type(model_->dtype()));
  const Plan plan =
      make_plan(settings_.tree.strategy(), plan_request(batch, settings_.mb_spec, settings_.tree, &costs_));
  ExecutionResult result =
      Executor(*model_, {.router_losses = settings_.router_losses}).execute(plan, batch, *loss_);
  optimizer_->step();
  for (const PlannedTree& planned : plan.trees) {
    flat_tokens_ += planned.tree->num_flat_tokens();
    tree_tokens_ += planned.tree->num_tokens();
  }
  trained_tokens_ += batch.num_rows();
  metrics_ = std::move(result.metrics);
  return result.loss;
}

double mean_of(const std::vector<double>& values, size_t begin, size_t end) {
  double sum = 0;
  for (size_t i = begin; i < end; ++i) sum += values[i];
  return end > begin ? sum / static_cast<double>(end - begin) : 0.0;
}

uint64_t Sft::hash_examples() const {
  std::vector<uint64_t> hashes;
  for (const Trajectory& sequence : sequences_) {
    hashes.push_back(stable_hash(sequence.input_ids.data(), sequence.input_ids.size() * sizeof(int32_t)));
    hashes.push_back(stable_hash(sequence.loss_mask.data(), sequence.loss_mask.size()));
  }
  return stable_hash(hashes.data(), hashes.size() * sizeof(uint64_t));
}

// Throws UserError if settings differ on which the weights depend.
void Sft::check_unfinished(const std::filesystem::path& settings_file) const {
  std::string changes;
  for (const SettingDifference& change : settings_diff(load_settings<SftSettings>(settings_file), settings_))
    if (change.key != "out" && !change.key.starts_with("saver."))
      changes += str("\n  ", change.key, ": was ", quoted(change.left), ", now ", quoted(change.right));
  if (!changes.empty())
    throw UserError(str(unfinished_.string(), ": an unfinished training has other settings:", changes,
                        "\nRestore them to continue it, remove this folder, or name another out"));
}

void Sft::resume() {
  clean_run_checkpoints(unfinished_);
  const std::filesystem::path settings_file = unfinished_ / "settings.yaml";
  const auto checkpoint = find_latest_checkpoint(unfinished_);
  if (checkpoint) {
    check_unfinished(settings_file);
    const Json state = load_run_checkpoint(*checkpoint, *model_, *optimizer_);
    if (state.at("examples") != fingerprint_)
      throw UserError(str(unfinished_.string(), ": an unfinished training has other examples than ",
                          settings_.train_dataset.path,
                          " now; restore the file to continue it, remove this folder, or name another out"));
    losses_ = state.at("losses").get<std::vector<double>>();
    flat_tokens_ = state.at("flat_tokens");
    tree_tokens_ = state.at("tree_tokens");
    trained_tokens_ = state.at("trained_tokens");
    seconds_before_ = state.at("seconds");
    log_info(str("resumed from ", checkpoint->directory.string(), ": step ", checkpoint->step, " of ",
                 total_steps_));
  }
  write_file_atomically(settings_file, settings_yaml(settings_));
}

void Sft::write_checkpoint() {
  const Json state = {
      {"examples", fingerprint_},          {"losses", losses_},
      {"flat_tokens", flat_tokens_},       {"tree_tokens", tree_tokens_},
      {"trained_tokens", trained_tokens_}, {"seconds", seconds_before_ + seconds_since(start_)}};
  save_run_checkpoint(unfinished_, std::ssize(losses_), *model_, optimizer_->snapshot(/*copies=*/false),
                      state, {.source_model = settings_.model.path, .keep_last = 1});
}

void Sft::train_all() {
  const SteadyClock clock;
  CheckpointSchedule schedule(settings_.saver, clock);
  const int64_t first = std::ssize(losses_);
  Progress progress(first > 0 ? str("sft after step ", first) : "sft", total_steps_ - first, "steps",
                    options_.show_progress ? ProgressStyle::kAutomatic : ProgressStyle::kSilent);
  while (std::ssize(losses_) < total_steps_) {
    const int64_t step = std::ssize(losses_);
    const bool stops = options_.stop && options_.stop();
    if (step > first && (stops || schedule.is_due(step))) {
      write_checkpoint();
      schedule.has_written();
    }
    if (stops)
      throw Interrupted(str("sft stopped after step ", step, " of ", total_steps_,
                            "; the same command continues from there"));
    losses_.push_back(train(batch_of(step)));
    progress.advance(1, str("loss ", format_significant(losses_.back(), 3)));
  }
}

void Sft::write_model() {
  if (settings_.lora.enabled()) save_adapter(settings_.out, *model_, settings_.model.path);
  else save_model(settings_.out, *model_, {.copy_from = settings_.model.path});
}

SftSummary Sft::summary() const {
  const size_t tenth = std::max<size_t>(1, losses_.size() / 10);
  SftSummary summary;
  summary.examples = std::ssize(examples_);
  summary.steps = total_steps_;
  summary.first_loss = mean_of(losses_, 0, std::min(tenth, losses_.size()));
  summary.last_loss = mean_of(losses_, losses_.size() - std::min(tenth, losses_.size()), losses_.size());
  if (const auto found = metrics_.find("experts/aux_loss"); found != metrics_.end())
    summary.aux_loss = found->second.value();
  if (const auto found = metrics_.find("experts/z_loss"); found != metrics_.end())
    summary.z_loss = found->second.value();
  summary.trained_tokens = trained_tokens_;
  summary.compression =
      tree_tokens_ > 0 ? static_cast<double>(flat_tokens_) / static_cast<double>(tree_tokens_) : 1.0;
  summary.seconds = seconds_before_ + seconds_since(start_);
  return summary;
}

SftSummary Sft::work() {
  make_directories(unfinished_);
  const FolderLock lock(unfinished_, "out");
  resume();
  train_all();
  write_model();
  remove_tree(unfinished_);
  return summary();
}

}  // namespace

void SftSettings::check() const {
  const auto require = [](const std::string& value, const char* key, const char* flag) {
    if (value.empty()) throw UserError(str(key, " is missing; give ", flag, ", or ", key, "=..."));
  };
  require(model.path, "model.path", "--model");
  require(train_dataset.path, "train_dataset.path", "--data");
  require(out, "out", "--out");
  tree.check();
  std::error_code absent;  // if a path does not exist, the two paths differ
  if (std::filesystem::equivalent(out, model.path, absent))
    throw UserError(
        str("out: ", quoted(out), " is model.path itself, which would be overwritten; name another folder"));
}

SftSummary run_sft(const SftSettings& settings, const SftOptions& options) {
  return Sft(settings, options).work();
}

Json to_json(const SftSummary& summary) {
  Json json = {{"examples", summary.examples},
               {"steps", summary.steps},
               {"first_loss", summary.first_loss},
               {"last_loss", summary.last_loss},
               {"trained_tokens", summary.trained_tokens},
               {"compression", summary.compression},
               {"seconds", summary.seconds}};
  if (summary.aux_loss) json["aux_loss"] = *summary.aux_loss;
  if (summary.z_loss) json["z_loss"] = *summary.z_loss;
  return json;
}

}  // namespace bough
