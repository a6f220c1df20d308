// The bodies of Tinker's API: requests and results, as protobuf and as JSON. The SDK sends forward_backward
// as protobuf from version 0.25 on, all other requests as JSON, and reads the results of forward_backward and
// asample as protobuf. Its message `tinker_public` is not compiled: the field numbers are in wire.cpp.
//
// A body that is no message of its type throws ApiError 400, which names the field.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/json.h"
#include "serve/api.h"

namespace bough {

// A tensor of a request, [rows, columns] with columns 1 for a list. `values` has rows · columns entries;
// token ids are exact in a double. A sparse tensor is stored dense, with `is_set` 0 where it has no entry.
struct WireTensor {
  std::vector<double> values;
  int64_t columns = 1;
  std::vector<uint8_t> is_set;  // empty: all entries are set

  int64_t rows() const { return static_cast<int64_t>(values.size()) / columns; }
};

// One training sequence. Position i of the inputs predicts the targets at row i.
struct WireDatum {
  std::vector<int32_t> tokens;
  std::map<std::string, WireTensor> inputs;  // target_tokens, weights, logprobs, advantages, ...
};

struct ForwardBackwardRequest {
  std::string model_id;
  int64_t seq_id = 0;
  std::vector<WireDatum> data;
  std::string loss_fn;
  std::map<std::string, std::variant<double, std::string>> config;  // loss_fn_config_v2 wins
  bool forward_only = false;
};
ForwardBackwardRequest read_forward_backward(std::string_view protobuf);
// The JSON of SDKs before 0.25. `forward_only`: the request came to /forward.
ForwardBackwardRequest read_forward_backward(const OrderedJson& body, bool forward_only);

// A row of a result: the log-probabilities of one datum, [rows, columns].
struct WireOutput {
  std::vector<float> log_probs;
  int64_t columns = 1;
};
struct ForwardBackwardResult {
  std::vector<WireOutput> outputs;        // one a datum
  std::map<std::string, double> metrics;  // "name:reduction"

  std::string protobuf() const;
  Json json() const;
};

// Top-k tokens at each of some positions, [length, k]. Missing entries: id 0, log-probability -99999.
struct WireTopK {
  std::vector<int32_t> ids;
  std::vector<float> log_probs;
  int64_t k = 0;

  int64_t length() const { return k == 0 ? 0 : static_cast<int64_t>(ids.size()) / k; }
};
struct SampleResult {
  struct Sequence {
    bool stopped = false;  // else it ended at max_tokens
    std::vector<int32_t> tokens;
    std::vector<float> log_probs;
    WireTopK top;
  };
  std::vector<Sequence> sequences;
  std::optional<std::vector<float>> prompt_log_probs;  // of each prompt token; NaN: not computed
  WireTopK prompt_top;
  // Log-probabilities of the request's target_prompt_logprobs, in their layout: sparse if it has is_set.
  std::optional<WireTensor> prompt_targets;

  std::string protobuf() const;
  Json json() const;
};

// A tensor in JSON. Sparse tensors may have at most `elements_left` elements, which are subtracted.
WireTensor read_tensor(const OrderedJson& body, int64_t& elements_left, const std::string& where);

// The tokens of a ModelInput in JSON. Throws ApiError 400 if it has images or audio.
std::vector<int32_t> read_model_input(const OrderedJson& input, const std::string& where);

}  // namespace bough
