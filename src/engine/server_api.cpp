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

// The parameters that both APIs call the same. All are sent, because the model's generation_config.json
// could otherwise set them.
Json sampling_of(const ServerRequest& request) {
  Json sampling = {{"temperature", request.temperature},
                   {"top_p", 1.0},
                   {"min_p", 0.0},
                   {"repetition_penalty", 1.0},
                   {"presence_penalty", 0.0},
                   {"frequency_penalty", 0.0},
                   {"stop_token_ids", request.stop_tokens},
                   {"ignore_eos", request.ignore_eos},
                   {"skip_special_tokens", false}};
  if (!request.stop.empty()) sampling["stop"] = request.stop;
  return sampling;
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
    Json body = sampling_of(request);
    body.update({{"max_tokens", request.max_new_tokens}, {"top_k", 0}, {"logprobs", request.top_logprobs}});
    if (request.returns_experts) {
      // /inference/v1/generate counts the sampled token among the `logprobs` most likely ones.
      if (request.top_logprobs > 0) body["logprobs"] = request.top_logprobs + 1;
      return {.target = kGenerate,
              .body = {{"model", model},
                       {"request_id", request.id},
                       {"token_ids", request.input_ids},
                       {"sampling_params", std::move(body)},
                       {"stream", true}}};
    }
    body.update({{"model", model},
                 {"request_id", request.id},
                 {"prompt", request.input_ids},
                 {"return_token_ids", true},
                 {"return_tokens_as_token_ids", true},
                 {"stream", true}});
    return {.target = "/v1/completions", .body = std::move(body)};
  }

  ServerEvent event(const Json& event, size_t, int64_t top_logprobs) const override {
    const Json& choice = event.at("choices").at(0);
    ServerEvent out;
    if (const Json reason = choice.value("finish_reason", Json()); reason.is_string())
      out.finish_reason = reason.get<std::string>();
    out.experts = choice.value("routed_experts", Json());
    const Json ids = choice.value("token_ids", Json());
    if (ids.is_null() || ids.empty()) return out;
    const Json& logprobs = choice.at("logprobs");
    if (logprobs.contains("content")) {
      add_generated(event, ids, logprobs.at("content"), top_logprobs, out.tokens);
      return out;
    }
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

  std::string how_to_start(bool returns_experts) const override {
    return str(
        "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs "
        "--generation-config vllm",
        returns_experts ? " --enable-return-routed-experts --enable-scale-out" : "");
  }

 private:
  static constexpr const char* kGenerate = "/inference/v1/generate";

  RoutedExperts decode_experts(const Json& text, const ExpertLayout& layout,
                               int64_t num_rows) const override {
    return experts_of_npy(text, layout, num_rows);
  }
  // The tokens of an event of /inference/v1/generate.
  static void add_generated(const Json& event, const Json& ids, const Json& content, int64_t top_logprobs,
                            std::vector<ServerToken>& tokens) {
    if (content.size() != ids.size()) refuse_event(event, "a log-probability for each token");
    for (size_t i = 0; i < ids.size(); ++i) {
      ServerToken& token = tokens.emplace_back();
      token.id = ids[i].get<int32_t>();
      token.logprob = content[i].at("logprob").get<double>();
      if (top_logprobs == 0) continue;
      std::vector<std::pair<double, int32_t>> entries;
      for (const Json& entry : content[i].at("top_logprobs"))
        entries.emplace_back(entry.at("logprob").get<double>(), entry.at("token_id").get<int32_t>());
      if (std::ssize(entries) < top_logprobs) refuse_event(event, "top_logprobs for each token");
      set_top(token, std::move(entries), top_logprobs);
    }
  }
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
    Json sampling = sampling_of(request);
    sampling.update({{"max_new_tokens", request.max_new_tokens}, {"top_k", -1}});
    Json body = {{"rid", request.id},
                 {"input_ids", request.input_ids},
                 {"sampling_params", std::move(sampling)},
                 {"return_logprob", true},
                 {"top_logprobs_num", request.top_logprobs},
                 {"stream", true}};
    if (request.returns_experts) body["return_routed_experts"] = true;
    return {.target = "/generate", .body = std::move(body)};
  }

  // Lists cover all tokens so far or, with --incremental-streaming-output, the event's tokens. The token
  // count tells which.
  ServerEvent event(const Json& event, size_t seen, int64_t top_logprobs) const override {
    const Json& meta = event.at("meta_info");
    ServerEvent out;
    if (const Json reason = meta.value("finish_reason", Json()); reason.is_object())
      out.finish_reason = reason.at("type").get<std::string>();
    out.experts = meta.value("routed_experts", Json());
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

  std::string how_to_start(bool returns_experts) const override {
    return str("python -m sglang.launch_server --model-path MODEL",
               returns_experts ? " --enable-return-routed-experts" : "",
               ", without SGLANG_RETURN_ORIGINAL_LOGPROB");
  }

 private:
  RoutedExperts decode_experts(const Json& text, const ExpertLayout& layout,
                               int64_t num_rows) const override {
    return experts_of_int32(text, layout, num_rows);
  }
};

}  // namespace

RoutedExperts ServerApi::experts(const ServerEvent& event, const ExpertLayout& layout,
                                 int64_t num_rows) const {
  if (event.experts.is_null())
    throw UserError(
        str("the last event of a request has no routed_experts, but rollout.return_routed_experts is true; "
            "start it with ",
            how_to_start(true)));
  return decode_experts(event.experts, layout, num_rows);
}

void check_server_sampling(const GenerationRequest& request, const std::string& backend) {
  const SamplingParameters& sampling = request.sampling;
  const auto refuse = [&](const char* name, const auto& value, const char* expected) {
    throw UserError(str("request ", request.id, ": ", name, " is ", value, ", but ", backend,
                        " applies it to the log-probabilities, which would then differ from the policy's; "
                        "expected ",
                        expected));
  };
  if (sampling.top_p < 1) refuse("top_p", sampling.top_p, "1");
  if (sampling.top_k > 0) refuse("top_k", sampling.top_k, "0");
  if (sampling.min_p > 0) refuse("min_p", sampling.min_p, "0");
  if (sampling.repetition_penalty != 1) refuse("repetition_penalty", sampling.repetition_penalty, "1");
  if (sampling.presence_penalty != 0) refuse("presence_penalty", sampling.presence_penalty, "0");
  if (sampling.frequency_penalty != 0) refuse("frequency_penalty", sampling.frequency_penalty, "0");
  if (sampling.min_new_tokens > 0) refuse("min_new_tokens", sampling.min_new_tokens, "0");
  if (sampling.greedy && sampling.temperature != 0 && sampling.temperature != 1)
    refuse("temperature of a greedy request", sampling.temperature, "0 or 1");
}

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
