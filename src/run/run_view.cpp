#include "run/run_view.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "control/conversation.h"
#include "report/html_text.h"
#include "report/run_follower.h"
#include "report/run_page.h"
#include "run/run_settings.h"
#include "run/trace_store.h"
#include "train/run_checkpoint.h"

namespace bough {

namespace fs = std::filesystem;

namespace {

constexpr size_t kMostTreeNodes = 5000;
constexpr size_t kMostSampleText = size_t{64} << 10;  // bytes of a prompt or completion
constexpr size_t kMostSampleTokens = 4096;            // with their own texts and colours
constexpr size_t kMostStepBytes = size_t{3} << 20;    // of the groups of one answer
constexpr int64_t kSamplesOfFirstStep = 40;           // in a report

Json json_of(const MessageView& message) {
  Json out = {{"role", message.role}, {"content", cut_text(message.content, kMostSampleText)}};
  if (!message.name.empty()) out["name"] = message.name;
  if (!message.reasoning.empty()) out["reasoning"] = cut_text(message.reasoning, kMostSampleText);
  for (const auto& [name, arguments] : message.calls)
    out["calls"].push_back({name, cut_text(arguments, kMostSampleText)});
  if (!message.turn) return out;
  out["turn"] = *message.turn;
  out["tokens"] = message.tokens;
  out["engine_seconds"] = message.engine_seconds;
  out["environment_seconds"] = message.environment_seconds;
  out["reward"] = message.reward;
  out["retokenized"] = message.retokenized;
  return out;
}

Json json_of(const ConversationView& view) {
  Json runs = Json::array(), messages = Json::array();
  for (const ConversationView::Run& run : view.runs) runs.push_back({run.tokens, run.is_model});
  for (const MessageView& message : view.messages) messages.push_back(json_of(message));
  Json out = {{"name", view.name},
              {"reason", view.reason},
              {"rewards", view.rewards},
              {"turns", view.turns},
              {"tokens", view.tokens},
              {"invalid_calls", view.invalid_calls},
              {"rows", view.rows},
              {"runs", std::move(runs)},
              {"messages", std::move(messages)},
              {"forks_from", view.forks_from},
              {"common_tokens", view.common_tokens},
              {"fork_turn", view.fork_turn}};
  if (view.reward) out["reward"] = *view.reward;
  if (!view.failure.empty()) out["failure"] = view.failure;
  return out;
}

Json rounded(const std::vector<float>& values, size_t begin, size_t end) {
  Json out = Json::array();
  for (size_t i = begin; i < end; ++i) out.push_back(std::round(double{values[i]} * 1e3) / 1e3);
  return out;
}

bool is_equal_everywhere(const auto& values, size_t begin, size_t end) {
  return std::all_of(values.begin() + static_cast<std::ptrdiff_t>(begin),
                     values.begin() + static_cast<std::ptrdiff_t>(end),
                     [&](const auto& value) { return value == values[begin]; });
}

// The text of each token. Text that a token holds back belongs to the token that completes it.
Json token_texts(const Tokenizer& tokenizer, std::span<const int32_t> ids) {
  StreamDecoder decoder(tokenizer, /*skip_special_tokens=*/false);
  Json out = Json::array();
  for (const int32_t id : ids) out.push_back(decoder.push(id));
  if (const std::string rest = decoder.finish(); !rest.empty() && !out.empty())
    out.back() = out.back().get<std::string>() + rest;
  return out;
}

std::string ids_text(std::span<const int32_t> ids) {
  std::string out;
  for (size_t i = 0; i < std::min(ids.size(), kMostSampleTokens); ++i) out += str(i > 0 ? " " : "", ids[i]);
  return out;
}

}  // namespace

Json tree_json(const PrefixTree& tree, std::span<const Trajectory> rollouts) {
  BOUGH_CHECK(tree.num_sequences_total() == static_cast<int64_t>(rollouts.size()), "tree of ",
              tree.num_sequences_total(), " sequences for ", rollouts.size(), " rollouts");
  struct Node {
    int64_t parent, begin, end, num_sequences;
    std::vector<int64_t> trained;
  };
  std::vector<uint8_t> trained(static_cast<size_t>(tree.num_tokens()));
  for (size_t s = 0; s < rollouts.size(); ++s) {
    const std::vector<int32_t> path = tree.path(static_cast<int64_t>(s));
    for (size_t i = 0; i < path.size(); ++i)
      if (rollouts[s].trains(i)) trained[static_cast<size_t>(path[i])] = 1;
  }
  std::vector<Node> nodes;
  std::vector<int64_t> node_of(trained.size());
  for (size_t t = 0; t < trained.size(); ++t) {
    const int32_t parent = tree.parent[t], depth = tree.depth[t];
    // If as many sequences pass through a token as through its parent, the token is the parent's only child
    // and no sequence ends at the parent.
    if (parent >= 0 && tree.num_sequences[t] == tree.num_sequences[static_cast<size_t>(parent)]) {
      node_of[t] = node_of[static_cast<size_t>(parent)];
    } else {
      node_of[t] = std::ssize(nodes);
      nodes.push_back(
          {parent < 0 ? -1 : node_of[static_cast<size_t>(parent)], depth, depth, tree.num_sequences[t], {}});
    }
    Node& node = nodes[static_cast<size_t>(node_of[t])];
    node.end = depth + 1;
    if (!trained[t]) continue;
    if (!node.trained.empty() && node.trained.back() == depth) ++node.trained.back();
    else node.trained.insert(node.trained.end(), {depth, depth + 1});
  }
  // A parent has at least as many sequences as its children and stands before them, so it is given with them.
  std::vector<size_t> order(nodes.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return nodes[a].num_sequences > nodes[b].num_sequences; });
  order.resize(std::min(order.size(), kMostTreeNodes));
  std::sort(order.begin(), order.end());
  std::vector<int64_t> place(nodes.size(), -1);
  Json list = Json::array();
  for (const size_t i : order) {
    const Node& node = nodes[i];
    place[i] = std::ssize(list);
    list.push_back({node.parent < 0 ? -1 : place[static_cast<size_t>(node.parent)], node.begin, node.end,
                    node.num_sequences, node.trained});
  }
  return {{"nodes", std::move(list)},
          {"left_out", nodes.size() - order.size()},
          {"sequences", rollouts.size()},
          {"tokens", tree.num_flat_tokens()},
          {"tree_tokens", tree.num_tokens()}};
}

std::string tree_page(const PrefixTree& tree, std::span<const Trajectory> rollouts, const std::string& title,
                      const std::string& note) {
  Json data = {{"runs", Json::array()}, {"tree", tree_json(tree, rollouts)}, {"note", note}};
  data["title"] = title;
  return run_page(title, &data);
}

const std::optional<Tokenizer>& RunRollouts::tokenizer() {
  if (std::exchange(has_searched_, true)) return tokenizer_;
  std::vector<fs::path> places;
  if (const auto checkpoint = find_latest_checkpoint(folder_))
    places.push_back(checkpoint->model_directory());
  try {
    places.emplace_back(load_settings<RunSettings>(folder_ / "config.yaml").model.path);
  } catch (const std::exception&) {  // a folder of another version: the checkpoint may still have one
  }
  for (const fs::path& place : places) {
    try {
      tokenizer_ = Tokenizer::load(place);
      return tokenizer_;
    } catch (const UserError&) {  // relative to where the run was started, or moved
    }
  }
  return tokenizer_;
}

Json RunRollouts::sample_json(const Trajectory& row) {
  const size_t size = row.input_ids.size();
  size_t begin = 0;  // the first token that the policy sampled
  while (begin < size && row.loss_mask[begin] == 0) ++begin;
  Json out = {{"valid", row.valid}, {"trained", row.trained}, {"baseline", row.baseline}};
  out["num_tokens"] = size - begin;
  if (row.reward) out["reward"] = *row.reward;
  if (!row.rewards.empty()) out["rewards"] = row.rewards;
  if (row.answer) out["answer"] = cut_text(*row.answer, kMostSampleText);
  if (row.finish_reason) out["finish"] = *row.finish_reason;
  if (row.reward_failure) out["failure"] = cut_text(*row.reward_failure, kMostSampleText);
  const std::span<const int32_t> ids(row.input_ids);
  out["completion"] =
      row.completion ? cut_text(*row.completion, kMostSampleText) : ids_text(ids.subspan(begin));
  if (row.advantage.size() == 1) out["advantage"] = row.advantage[0];
  const size_t end = std::min(size, begin + kMostSampleTokens);
  if (begin == end || !tokenizer()) return out;
  Json tokens = {{"texts", token_texts(*tokenizer(), ids.subspan(begin, end - begin))}};
  if (row.logprobs.size() == size) tokens["logprobs"] = rounded(row.logprobs, begin, end);
  if (row.versions.size() == size) {
    if (is_equal_everywhere(row.versions, begin, end)) out["version"] = row.versions[begin];
    else
      tokens["versions"] = std::vector<int32_t>(row.versions.begin() + static_cast<std::ptrdiff_t>(begin),
                                                row.versions.begin() + static_cast<std::ptrdiff_t>(end));
  }
  for (const auto& [name, column] :
       {std::pair{"mismatches", kMismatchColumn}, {"entropies", kEntropyColumn}}) {
    const auto found = row.columns.find(column);
    if (found == row.columns.end()) continue;
    Json values = Json::array();  // null where the policy did not sample the token
    size_t sampled = 0;
    for (size_t i = begin; i < end; ++i)
      values.push_back(row.loss_mask[i] == 0 ? Json() : Json(found->second[sampled++]));
    tokens[name] = std::move(values);
  }
  if (row.advantage.size() == size) tokens["advantages"] = rounded(row.advantage, begin, end);
  if (!is_equal_everywhere(row.loss_mask, begin, end))
    tokens["mask"] = std::vector<int>(row.loss_mask.begin() + static_cast<std::ptrdiff_t>(begin),
                                      row.loss_mask.begin() + static_cast<std::ptrdiff_t>(end));
  out["tokens"] = std::move(tokens);
  return out;
}

Json RunRollouts::step(int64_t step, int64_t first_group, int64_t most_samples) {
  const StepGroups stored(folder_, step);
  const MutexLock lock(mutex_);
  Json groups = Json::array();
  int64_t num_samples = 0;
  size_t num_bytes = 0;
  const size_t num_kept = stored.num_kept();
  std::vector<Trajectory> trained;  // for the tree
  for (auto i = static_cast<size_t>(first_group); i < stored.size(); ++i) {
    const bool is_full = num_samples >= most_samples || num_bytes >= kMostStepBytes;
    if (is_full && (first_group > 0 || i >= num_kept)) break;
    const std::vector<Trajectory> rows = stored.read(i);
    if (first_group == 0 && i < num_kept) trained.insert(trained.end(), rows.begin(), rows.end());
    if (is_full) continue;
    Json group = {{"name", rows[0].group}, {"index", i}, {"samples", Json::array()}};
    if (stored.is_dropped(i)) group["dropped"] = rows[0].fields.value(kDroppedField, "");
    if (stored.is_evaluation(i)) group["evaluation"] = rows[0].fields.value(kEvaluationField, "");
    size_t begin = 0;
    while (begin < rows[0].loss_mask.size() && rows[0].loss_mask[begin] == 0) ++begin;
    group["prompt"] = rows[0].prompt ? cut_text(*rows[0].prompt, kMostSampleText)
                                     : ids_text(std::span(rows[0].input_ids).first(begin));
    if (auto conversations = conversation_groups(rows, step, 1); !conversations.empty()) {
      for (const ConversationView& view : conversations[0].views)
        group["conversations"].push_back(json_of(view));
    } else {
      for (const Trajectory& row : rows) group["samples"].push_back(sample_json(row));
    }
    num_samples += std::ssize(rows);
    num_bytes += dump_line(group).size();
    groups.push_back(std::move(group));
  }
  Json out = {{"step", step},
              {"num_groups", stored.size()},
              {"first_evaluated", stored.first_evaluated()},
              {"groups", std::move(groups)}};
  if (first_group > 0) return out;
  std::vector<TokenSpan> sequences;
  for (const Trajectory& rollout : trained) sequences.emplace_back(rollout.input_ids);
  if (!sequences.empty()) out["tree"] = tree_json(build_prefix_tree(sequences), trained);
  return out;
}

Json about_run(const fs::path& folder) {
  Json out = {{"settings", Json::array()}};
  const fs::path config = folder / "config.yaml";
  if (!fs::exists(config)) return out;
  out["config"] = read_file(config);
  try {
    for (const SettingRow& row : settings_rows(load_settings<RunSettings>(config)))
      if (!row.is_default) out["settings"].push_back({row.key, row.value, row.help});
  } catch (const UserError& error) {  // written by another version, or by `bough sft`
    out["settings_error"] = error.what();
  }
  return out;
}

ViewedRun view_of_run(const fs::path& folder) {
  std::error_code ignored;
  if (!fs::is_directory(folder, ignored) || !fs::exists(folder / "config.yaml", ignored))
    throw UserError(str("cannot show ", quoted(folder.string(), 300),
                        ": no config.yaml in it; give a run's folder, FILEROOT/EXPERIMENT/TRIAL"));
  constexpr int64_t kSamplesOfAnAnswer = 64;
  return {.folder = folder,
          .about = about_run(folder),
          .step = [rollouts = std::make_shared<RunRollouts>(folder)](int64_t step, int64_t first) {
            return rollouts->step(step, first, kSamplesOfAnAnswer);
          }};
}

std::string run_report(const fs::path& folder) {
  if (!fs::is_directory(folder))
    throw UserError(
        str("cannot report on ", quoted(folder.string(), 300), ": not a folder; give a run's folder"));
  const RunFollower follower(folder);
  Json run = follower.snapshot(), saved = Json::object();
  run.update(about_run(folder));
  RunRollouts rollouts(folder);
  int64_t num_samples = 0, num_bytes = std::ssize(inside_script(run));
  // Adds whole groups of a step, at most about `most` samples and up to `limit` bytes of the page. Returns
  // false if groups were left out because of their size.
  const auto add = [&](int64_t step, int64_t most, int64_t limit) {
    for (int64_t count = most; count > 0; count /= 2) {
      Json one = rollouts.step(step, 0, count);
      const int64_t bytes = std::ssize(inside_script(one));
      if (num_bytes + bytes > limit) continue;
      num_bytes += bytes;
      for (const Json& group : one["groups"])
        num_samples +=
            std::ssize(group.contains("conversations") ? group["conversations"] : group["samples"]);
      saved[str("0/", step)] = std::move(one);
      return count == most;
    }
    return false;
  };
  const std::vector<int64_t> steps = kTrainedFiles.numbers(folder);
  if (!steps.empty()) add(steps.front(), kSamplesOfFirstStep, kMostReportBytes / 2);
  for (size_t i = steps.size(); i-- > 1 && num_samples < kMostReportSamples;)
    // A tenth of the bound is left for the page itself.
    if (!add(steps[i], kMostReportSamples - num_samples, kMostReportBytes * 9 / 10)) break;
  if (const std::vector<int64_t> evaluated = kEvaluationFiles.numbers(folder); !evaluated.empty()) {
    const int64_t step = evaluated.back();
    const auto first = static_cast<int64_t>(StepGroups(folder, step).first_evaluated());
    Json last = rollouts.step(step, first, kMostReportSamples);
    const std::string key = str("0/", step);
    const bool fits = num_bytes + std::ssize(inside_script(last)) <= kMostReportBytes * 9 / 10;
    if (fits && !saved.contains(key)) {
      saved[key] = std::move(last);
    } else if (fits) {
      Json& groups = saved[key]["groups"];
      for (Json& group : last["groups"])
        if (group["index"] > groups.back()["index"]) groups.push_back(std::move(group));
    }
  }
  const std::string title = run["title"].get<std::string>();
  const Json data = {{"runs", Json::array({std::move(run)})}, {"saved", std::move(saved)}};
  return run_page(title, &data);
}

}  // namespace bough
