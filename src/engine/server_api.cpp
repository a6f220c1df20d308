#include "engine/server_api.h"

#include <algorithm>
#include <charconv>
#include <map>

#include "base/error.h"

namespace bough {

namespace {

[[noreturn]] void refuse_event(const Json& event, const char* expected) {
  throw UserError(str("the server's stream has ", quoted(dump_line(event), 200), ", expected ", expected));
}

// Sets the top entries by descending log-probability, at most `count`.
void set_top(ServerToken& token, std::vector<std::pair<double, int32_t>> entries, int64_t count) {
  std::stable_sort(entries.begin(), entries.end(),
                   [](const auto& a, const auto& b) { return a.first > b.first; });
  if (entries.size() > static_cast<size_t>(count)) entries.resize(static_cast<size_t>(count));
  for (const auto& [logprob, id] : entries) {
    token.top_ids.push_back(id);
    token.top_logprobs.push_back(static_cast<float>(logprob));
  }
}

class VllmApi final : public ServerApi {
 public:
  ServerCall describe() const override { return {.method = "GET", .target = "/v1/models", .body = {}}; }

  ServerDescription description(const Json& answer) const override {
    const Json& model = answer.at("data").at(0);
    const Json length = model.value("max_model_len", Json());
    return {model.at("id").get<std::string>(), length.is_number() ? length.get<int64_t>() : 0};
  }

  ServerCall generate(const ServerRequest& request, const std::string& model) const override {
    // Sends every parameter that the model's generation_config.json could otherwise set.
    return {.target = "/v1/completions",
            .body = {{"model", model},
                     {"request_id", request.id},
                     {"prompt", request.input_ids},
                     {"max_tokens", request.max_new_tokens},
                     {"temperature", request.temperature},
                     {"top_p", 1.0},
                     {"top_k", 0},
                     {"min_p", 0.0},
                     {"repetition_penalty", 1.0},
                     {"presence_penalty", 0.0},
                     {"frequency_penalty", 0.0},
                     {"stop_token_ids", request.stop_tokens},
                     {"ignore_eos", request.ignore_eos},
                     {"skip_special_tokens", false},
                     {"logprobs", request.top_logprobs},
                     {"return_token_ids", true},
                     {"return_tokens_as_token_ids", true},
                     {"stream", true}}};
  }

  ServerEvent event(const Json& event, size_t, int64_t top_logprobs) const override {
    const Json& choice = event.at("choices").at(0);
    ServerEvent out;
    if (const Json reason = choice.value("finish_reason", Json()); reason.is_string())
      out.finish_reason = reason.get<std::string>();
    const Json ids = choice.value("token_ids", Json());
    if (ids.is_null() || ids.empty()) return out;
    const Json& logprobs = choice.at("logprobs");
    const Json& token_logprobs = logprobs.at("token_logprobs");
    if (token_logprobs.size() != ids.size()) refuse_event(event, "a log-probability for each token");
    for (size_t i = 0; i < ids.size(); ++i) {
      ServerToken& token = out.tokens.emplace_back();
      token.id = ids[i].get<int32_t>();
      token.logprob = token_logprobs[i].get<double>();
      if (top_logprobs == 0) continue;
      // The most likely tokens, and the sampled token, which may not be among them.
      std::vector<std::pair<double, int32_t>> entries;
      for (const auto& [name, logprob] : logprobs.at("top_logprobs").at(i).items())
        entries.emplace_back(logprob.get<double>(), id_of(name, event));
      set_top(token, std::move(entries), top_logprobs);
    }
    return out;
  }

  std::vector<ServerCall> update_weights(const std::filesystem::path& directory) const override {
    return {
        {.target = "/pause?mode=abort", .body = {}, .is_optional = true},
        {.target = "/collective_rpc",
         .body = {{"method", "reload_weights"}, {"kwargs", {{"weights_path", directory.string()}}}}},
        {.target = "/reset_prefix_cache", .body = {}, .is_repeated = true},
        {.target = "/resume", .body = {}, .is_optional = true},
    };
  }

  std::string how_to_start() const override {
    return "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs "
           "--generation-config vllm";
  }

 private:
  static int32_t id_of(const std::string& name, const Json& event) {
    static constexpr std::string_view kPrefix = "token_id:";
    int32_t id = -1;
    if (name.starts_with(kPrefix))
      std::from_chars(name.data() + kPrefix.size(), name.data() + name.size(), id);
    if (id < 0) refuse_event(event, "tokens as token_id:NUMBER");
    return id;
  }
};

class SglangApi final : public ServerApi {
 public:
  ServerCall describe() const override { return {.method = "GET", .target = "/get_model_info", .body = {}}; }

  ServerDescription description(const Json& answer) const override {
    return {answer.at("model_path").get<std::string>(), 0};
  }

  ServerCall generate(const ServerRequest& request, const std::string&) const override {
    Json sampling = {{"max_new_tokens", request.max_new_tokens},
                     {"temperature", request.temperature},
                     {"top_p", 1.0},
                     {"top_k", -1},
                     {"min_p", 0.0},
                     {"repetition_penalty", 1.0},
                     {"presence_penalty", 0.0},
                     {"frequency_penalty", 0.0},
                     {"stop_token_ids", request.stop_tokens},
                     {"ignore_eos", request.ignore_eos},
                     {"skip_special_tokens", false}};
    return {.target = "/generate",
            .body = {{"rid", request.id},
                     {"input_ids", request.input_ids},
                     {"sampling_params", std::move(sampling)},
                     {"return_logprob", true},
                     {"top_logprobs_num", request.top_logprobs},
                     {"stream", true}}};
  }

  // Lists cover all tokens so far or, with --incremental-streaming-output, the event's tokens. The token
  // count tells which.
  ServerEvent event(const Json& event, size_t seen, int64_t top_logprobs) const override {
    const Json& meta = event.at("meta_info");
    ServerEvent out;
    if (const Json reason = meta.value("finish_reason", Json()); reason.is_object())
      out.finish_reason = reason.at("type").get<std::string>();
    const auto total = meta.at("completion_tokens").get<size_t>();
    const Json listed = meta.value("output_token_logprobs", Json::array());
    const bool lists_all = listed.size() == total;
    if (!lists_all && seen + listed.size() != total) refuse_event(event, "a log-probability for each token");
    for (size_t i = lists_all ? seen : 0; i < listed.size(); ++i) {
      ServerToken& token = out.tokens.emplace_back();
      token.logprob = listed[i].at(0).get<double>();
      token.id = listed[i].at(1).get<int32_t>();
      if (top_logprobs == 0) continue;
      std::vector<std::pair<double, int32_t>> entries;
      for (const Json& entry : meta.at("output_top_logprobs").at(i))
        entries.emplace_back(entry.at(0).get<double>(), entry.at(1).get<int32_t>());
      set_top(token, std::move(entries), top_logprobs);
    }
    return out;
  }

  std::vector<ServerCall> update_weights(const std::filesystem::path& directory) const override {
    return {
        {.target = "/pause_generation", .body = {{"mode", "abort"}}, .is_optional = true},
        {.target = "/update_weights_from_disk",
         .body = {{"model_path", directory.string()}, {"abort_all_requests", true}}},
        {.target = "/flush_cache", .body = {}},
        {.target = "/continue_generation", .body = Json::object(), .is_optional = true},
    };
  }

  std::string how_to_start() const override {
    return "python -m sglang.launch_server --model-path MODEL, without SGLANG_RETURN_ORIGINAL_LOGPROB";
  }
};

}  // namespace

const ServerApi& server_api(const std::string& name) {
  static const std::map<std::string, std::unique_ptr<const ServerApi>> kApis = [] {
    std::map<std::string, std::unique_ptr<const ServerApi>> apis;
    apis["vllm"] = std::make_unique<VllmApi>();
    apis["sglang"] = std::make_unique<SglangApi>();
    return apis;
  }();
  const auto found = kApis.find(name);
  BOUGH_CHECK(found != kApis.end(), "unknown server API ", name);
  return *found->second;
}

}  // namespace bough
