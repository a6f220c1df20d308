// A fake inference server, and a fixture of tests that generate with it.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "engine/server_engine.h"
#include "net/net_test_util.h"

namespace bough {

// Three layers, of which the second one has no experts.
inline ExpertLayout fake_layout() {
  return {.num_layers = 3, .dense_layers = {0, 1, 0}, .num_experts = 5, .num_chosen = 2};
}

// The experts of token `id` in a model of `version`.
inline int fake_expert(int id, int layer, int k, int version) {
  return layer == 1 ? 0 : (id + 2 * layer + k + 3 * version) % 5;
}

inline std::string base64_of(std::string_view bytes) {
  constexpr std::string_view kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string text;
  for (size_t i = 0; i < bytes.size(); i += 3) {
    uint32_t group = 0;
    for (size_t j = i; j < i + 3; ++j)
      group = group << 8 | (j < bytes.size() ? static_cast<unsigned char>(bytes[j]) : 0);
    for (size_t j = 0; j < 4; ++j)
      text.push_back(i + j > bytes.size() ? '=' : kDigits[group >> (18 - 6 * j) & 63]);
  }
  return text;
}

// A .npy file as numpy.save writes it.
inline std::string npy_of(const std::string& type, const std::string& shape, std::string_view elements) {
  std::string header = "{'descr': '" + type + "', 'fortran_order': False, 'shape': " + shape + ", }";
  header.resize(128 - 10 - 1, ' ');
  header += '\n';
  return str(std::string_view("\x93NUMPY\x01\0", 8), static_cast<char>(header.size()), '\0', header,
             elements);
}

// A server with vLLM's API and no model. In a stream of `version`, token t is followed by t + 1 + version,
// with the log-probability -1 / 8 at temperature 1. /inference/v1/generate returns fake_expert().
class FakeServer {
 public:
  explicit FakeServer(uint16_t port = 0)
      : endpoint_([this](const Endpoint::Connection& c) { answer(c); }, port) {}
  ~FakeServer() {
    stops_ = true;
    endpoint_.stop();
  }
  uint16_t port() const { return endpoint_.port(); }
  std::string url() const { return str("http://127.0.0.1:", endpoint_.port()); }
  std::vector<Json> requests() const {
    const MutexLock lock(mutex_);
    return requests_;
  }
  std::vector<std::string> targets() const {
    const MutexLock lock(mutex_);
    return targets_;
  }

  static constexpr int64_t kNever = 1'000'000'000;
  std::atomic<int> pause_microseconds = 0;    // pause between two tokens
  std::atomic<int64_t> holds_after = kNever;  // tokens before a stream waits until this number is higher
  std::atomic<int> break_after = 0;           // tokens before a stream breaks; 0: never
  std::atomic<int> version = 0;
  std::atomic<int> busy_resets = 0;  // resets of the prefix cache that fail
  std::atomic<bool> is_raw = false;  // log-probabilities ignore the temperature
  std::atomic<bool> is_dev = true;
  std::atomic<bool> has_generate = true, has_experts = true;
  std::atomic<int> surplus_rows = 0;
  // The last event of a stream, with the experts: streams that break before it; whether it is held back.
  std::atomic<int> lost_ends = 0;
  std::atomic<bool> holds_ends = false;
  std::atomic<int> streams = 0, most_streams = 0;

 private:
  void answer(const Endpoint::Connection& connection) {
    const std::string target = connection.head.substr(connection.head.find(' ') + 1);
    const std::string path = target.substr(0, target.find_first_of(" ?"));
    {
      const MutexLock lock(mutex_);
      targets_.push_back(path);
    }
    if (path == "/v1/models")
      return connection.answer(R"({"data": [{"id": "fake", "max_model_len": 1000000}]})");
    if (path == "/v1/completions") return stream(connection);
    if (path == "/inference/v1/generate")
      return has_generate ? generate(connection) : connection.answer("{}", "404 Not Found");
    if (!is_dev) return connection.answer("{}", "404 Not Found");
    if (path == "/collective_rpc") {
      const std::string folder = connection.request.at("kwargs").at("weights_path");
      std::ifstream file(std::filesystem::path(folder) / "version");
      int value = -1;
      file >> value;
      if (!file) return connection.answer(R"({"error": "no weights there"})", "500 Internal Server Error");
      version = value;
    }
    if (path == "/reset_prefix_cache")
      return connection.answer(busy_resets-- > 0 ? R"({"success": false})" : R"({"success": true})");
    connection.answer("{}");
  }

  void hold(int64_t sent) {
    while (sent >= holds_after && !stops_) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

  void stream(const Endpoint::Connection& connection) {
    {
      const MutexLock lock(mutex_);
      requests_.push_back(connection.request);
    }
    most_streams = std::max<int>(most_streams, ++streams);
    connection.send("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n");
    int token = connection.request.at("prompt").back();
    const int64_t count = connection.request.at("max_tokens");
    const double temperature = connection.request.at("temperature");
    const std::set<int> stops = connection.request.at("stop_token_ids");
    const int partial = version;
    for (int64_t i = 0; i < count && !stops_; ++i) {
      if (break_after > 0 && i == break_after) break;
      hold(i);
      token += 1 + partial;
      const double logprob = is_raw || temperature == 0 ? -0.125 : -0.125 / temperature;
      const bool is_last = i + 1 == count || stops.contains(token);
      const Json choice = {
          {"finish_reason", is_last ? Json("stop") : Json()},
          {"token_ids", {token}},
          {"logprobs",
           {{"token_logprobs", {logprob}},
            {"top_logprobs",
             {{{str("token_id:", token), logprob}, {"token_id:3", -2.0}, {"token_id:4", -0.05}}}}}}};
      if (!connection.send(str("data: ", dump_line({{"choices", {choice}}}), "\n\n"))) break;
      if (is_last) {
        connection.send("data: [DONE]\n\n");
        break;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(pause_microseconds));
    }
    --streams;
  }

  // The last event of a stream has no token here, as with several events per token.
  void generate(const Endpoint::Connection& connection) {
    {
      const MutexLock lock(mutex_);
      requests_.push_back(connection.request);
    }
    connection.send("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n");
    std::vector<int> ids = connection.request.at("token_ids");
    const Json& sampling = connection.request.at("sampling_params");
    const int64_t count = sampling.at("max_tokens");
    const std::set<int> stops = sampling.at("stop_token_ids");
    const int own_version = version;
    const auto send = [&](Json ids, Json content, Json reason, Json experts) {
      const Json choice = {{"index", 0},
                           {"token_ids", std::move(ids)},
                           {"logprobs", {{"content", std::move(content)}}},
                           {"finish_reason", std::move(reason)},
                           {"routed_experts", std::move(experts)}};
      return connection.send(str("data: ", dump_line({{"choices", {choice}}}), "\n\n"));
    };
    for (int64_t i = 0; i < count && !stops_; ++i) {
      hold(i);
      ids.push_back(ids.back() + 1 + own_version);
      const Json entry = {{"token_id", ids.back()}, {"logprob", -0.125}};
      Json content = entry;
      content["top_logprobs"] = {
          entry, {{"token_id", 3}, {"logprob", -2.0}}, {{"token_id", 4}, {"logprob", -0.05}}};
      if (!send({ids.back()}, Json::array({content}), nullptr, nullptr) || stops.contains(ids.back())) break;
      std::this_thread::sleep_for(std::chrono::microseconds(pause_microseconds));
    }
    while (holds_ends && !stops_) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (lost_ends > 0 && lost_ends-- > 0) return;
    send(Json::array(), Json::array(), stops.contains(ids.back()) ? "stop" : "length",
         has_experts ? Json(base64_of(npy(ids, own_version))) : Json());
    connection.send("data: [DONE]\n\n");
  }

  std::string npy(const std::vector<int>& ids, int own_version) const {
    const int64_t rows = std::ssize(ids) - 1 + surplus_rows;
    std::string elements;
    for (int64_t i = 0; i < rows; ++i)
      for (int layer = 0; layer < 3; ++layer)
        for (int k = 0; k < 2; ++k)
          elements += static_cast<char>(
              fake_expert(ids[static_cast<size_t>(std::min(i, std::ssize(ids) - 1))], layer, k, own_version));
    return npy_of("|u1", str('(', rows, ", 3, 2)"), elements);
  }

  mutable Mutex mutex_;
  std::vector<Json> requests_ GUARDED_BY(mutex_);
  std::vector<std::string> targets_ GUARDED_BY(mutex_);
  std::atomic<bool> stops_ = false;
  Endpoint endpoint_;
};

class ServerEngineTest : public testing::Test {
 protected:
  ServerEngineTest() : folder_(std::filesystem::path(testing::TempDir()) / str("bough_weights_", getpid())) {}
  ~ServerEngineTest() override { std::filesystem::remove_all(folder_); }

  ServerEngineOptions options(const std::vector<std::string>& addresses) {
    ServerEngineOptions out{.backend = "vllm"};
    out.settings.addresses = addresses;
    out.settings.timeout_seconds = 20;
    out.limits.vocab_size = 100'000;
    out.limits.max_length = 1'000'000;
    out.stop_tokens = {50'000};
    out.token_bytes = [](int32_t id) { return std::string(1, static_cast<char>('a' + id % 26)); };
    out.weights_folder = folder_;
    out.write_weights = [this](const std::filesystem::path& directory, const Model&) {
      std::filesystem::create_directories(directory);
      const std::string name = directory.filename().string();
      std::ofstream(directory / "version") << name.substr(1);
    };
    return out;
  }
  // No test reads the model.
  static const Model& no_model() { return *reinterpret_cast<const Model*>(&kNothing); }
  static void update(ServerEngine& engine, int32_t version) {
    engine.update_weights({.version = version, .model = &no_model()});
  }
  static GenerationRequest request(uint64_t id, int64_t samples, int64_t count, int32_t last = 10) {
    GenerationRequest out{.id = id, .prompt_ids = {1, 2, last}};
    out.sampling.n_samples = samples;
    out.sampling.max_new_tokens = count;
    return out;
  }
  std::string refusal(ServerEngine& engine, GenerationRequest request) {
    try {
      engine.submit(std::move(request));
    } catch (const UserError& error) {
      return error.what();
    }
    return "it was taken";
  }

  inline static const int kNothing = 0;
  std::filesystem::path folder_;
};

}  // namespace bough
