#include "tinker/losses.h"

#include <ATen/ATen.h>

#include <cmath>
#include <numeric>
#include <set>

#include "base/error.h"

namespace bough {

namespace {

constexpr const char* kServed = "cross_entropy, importance_sampling, ppo, cispo, dro or gspo";

const std::set<std::string>& config_keys(const std::string& loss) {
  static const std::set<std::string> kNone, kClip = {"clip_low_threshold", "clip_high_threshold"},
                                            kBeta = {"beta"};
  if (loss == "ppo" || loss == "cispo" || loss == "gspo") return kClip;
  return loss == "dro" ? kBeta : kNone;
}

bool is_clipped(const std::string& loss) {
  return loss == "ppo" || loss == "cispo" || loss == "gspo";
}

// The inputs that a datum must have, and those that it may have.
std::set<std::string> required_inputs(const std::string& loss) {
  if (loss == "cross_entropy") return {"target_tokens"};
  std::set<std::string> names = {"target_tokens", "logprobs", "advantages"};
  if (loss == "gspo") names.insert("sequence_ratio_mask");
  return names;
}
std::set<std::string> optional_inputs(const std::string& loss) {
  if (loss == "cross_entropy") return {"weights"};
  if (is_clipped(loss)) return {"clip_low_threshold", "clip_high_threshold"};
  return {};
}

std::string joined(const std::set<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text.empty() ? "none" : text;
}

// A view of the values, [rows, columns].
template <class T>
at::Tensor as_matrix(const std::vector<T>& values, int64_t columns) {
  const auto type = c10::CppTypeToScalarType<T>::value;
  return at::from_blob(const_cast<T*>(values.data()), {std::ssize(values) / columns, columns}, type);
}

}  // namespace

TinkerLossSettings read_loss_settings(const ForwardBackwardRequest& request) {
  TinkerLossSettings settings{request.loss_fn};
  if (settings.name == "stable_reinforce" || settings.name == "custom")
    throw ApiError(400, str("loss_fn: ", settings.name, " is not served; expected ", kServed,
                            settings.name == "custom"
                                ? "; forward_backward_custom without create_custom_loss computes the loss in "
                                  "the client"
                                : "; importance_sampling and cispo take the same inputs"));
  static const std::set<std::string> kNames = {"cross_entropy", "importance_sampling", "ppo", "cispo", "dro",
                                               "gspo"};
  if (!kNames.contains(settings.name))
    throw ApiError(400, str("loss_fn: got ", quoted(settings.name), ", expected ", kServed), "loss_fn");
  settings.clip_low = settings.name == "cispo" ? 0.0 : 0.8;
  settings.clip_high = settings.name == "cispo" ? 4.0 : 1.2;
  if (!is_clipped(settings.name)) settings.clip_low = settings.clip_high = 0;
  if (settings.name == "dro") settings.beta = 0.05;
  for (const auto& [name, value] : request.config) {
    const std::string where = "loss_fn_config." + name;
    if (!config_keys(settings.name).contains(name))
      throw ApiError(
          400,
          str(where, ": unknown for loss ", settings.name, "; it has ", joined(config_keys(settings.name))),
          where);
    const double* const number = std::get_if<double>(&value);
    if (!number || !std::isfinite(*number))
      throw ApiError(400, str(where, ": expected a finite number"), where);
    (name == "beta"                 ? settings.beta
     : name == "clip_low_threshold" ? settings.clip_low
                                    : settings.clip_high) = *number;
  }
  return settings;
}

void check_datum(const WireDatum& datum, const TinkerLossSettings& settings, int64_t vocab_size,
                 int64_t max_length, const std::string& where) {
  const auto length = std::ssize(datum.tokens);
  if (length == 0) throw ApiError(400, where + ".model_input: got no tokens, expected 1 or more");
  if (length > max_length)
    throw ApiError(400, str(where, ".model_input: got ", length, " tokens, expected at most ", max_length,
                            ", the model's context"));
  const auto check_token = [&](double id, const std::string& place) {
    if (!(id >= 0 && id < static_cast<double>(vocab_size) && id == std::floor(id)))
      throw ApiError(
          400, str(place, ": got token id ", id, ", expected a whole number from 0 to ", vocab_size - 1));
  };
  for (const int32_t id : datum.tokens) check_token(id, where + ".model_input");

  const std::set<std::string> required = required_inputs(settings.name),
                              allowed = optional_inputs(settings.name);
  for (const std::string& name : required)
    if (!datum.inputs.contains(name))
      throw ApiError(400, str(where, ".loss_fn_inputs: ", name, " is missing; loss ", settings.name,
                              " needs ", joined(required)));
  const WireTensor& targets = datum.inputs.at("target_tokens");
  for (const auto& [name, tensor] : datum.inputs) {
    const std::string place = str(where, ".loss_fn_inputs.", name);
    if (!required.contains(name) && !allowed.contains(name))
      throw ApiError(400, str(place, ": loss ", settings.name, " does not read it; expected ",
                              joined(required), " and perhaps ", joined(allowed)));
    if (tensor.rows() != length)
      throw ApiError(400, str(place, ": got ", tensor.rows(), " positions, expected ", length,
                              ", those of model_input"));
    const bool has_columns =
        settings.name == "cross_entropy" && (name == "weights" || name == "target_tokens");
    const int64_t columns = has_columns ? targets.columns : 1;
    if (tensor.columns != columns)
      throw ApiError(400, str(place, ": got ", tensor.columns, " values a position, expected ", columns));
    for (size_t i = 0; i < tensor.values.size(); ++i) {
      if (name == "target_tokens") check_token(tensor.values[i], place);
      else if (!std::isfinite(tensor.values[i]))
        throw ApiError(400, str(place, ": got a value that is not finite"));
    }
  }
}

at::Tensor tinker_loss(const TinkerLossSettings& settings, const TinkerLossInputs& inputs,
                       const at::Tensor& log_probs_RK, const at::Tensor& sequences_R) {
  if (settings.name == "cross_entropy") return -(inputs.weights_RK * log_probs_RK).sum(1);
  const at::Tensor log_probs_R = log_probs_RK.select(1, 0);
  const at::Tensor log_ratio_R = log_probs_R - inputs.sampling_log_probs_R;
  const at::Tensor& advantages_R = inputs.advantages_R;
  if (settings.name == "importance_sampling") return -log_ratio_R.exp() * advantages_R;
  if (settings.name == "dro")
    return -(log_probs_R * advantages_R - 0.5 * settings.beta * log_ratio_R.square());
  if (settings.name == "cispo") {
    const at::Tensor weight_R = log_ratio_R.detach().exp().clamp(inputs.clip_low_R, inputs.clip_high_R);
    return -weight_R * log_probs_R * advantages_R;
  }
  at::Tensor ratio_R = log_ratio_R.exp();
  if (settings.name == "gspo") {  // the sequence's ratio, with the gradient of the token's log-probability
    const at::Tensor ids_R = std::get<1>(at::unique_consecutive(sequences_R, /*return_inverse=*/true));
    const at::Tensor masked_R = (inputs.ratio_mask_R != 0).to(log_ratio_R.scalar_type());
    const int64_t sequences = ids_R.numel() == 0 ? 0 : ids_R[-1].item<int64_t>() + 1;
    const at::Tensor zeros = at::zeros({sequences}, log_ratio_R.options());
    const at::Tensor sum = zeros.index_add(0, ids_R, log_ratio_R.detach() * masked_R);
    const at::Tensor count = zeros.index_add(0, ids_R, masked_R).clamp_min(1);
    const at::Tensor mean_R = (sum / count).index_select(0, ids_R);
    ratio_R = (mean_R + log_probs_R - log_probs_R.detach()).exp();
  }
  const at::Tensor clipped_R = ratio_R.clamp(inputs.clip_low_R, inputs.clip_high_R);
  return -at::minimum(ratio_R * advantages_R, clipped_R * advantages_R);
}

std::unique_ptr<TinkerBatch> make_tinker_batch(const std::vector<const ForwardBackwardRequest*>& requests,
                                               const TinkerLossSettings& settings, at::ScalarType type) {
  auto result = std::make_unique<TinkerBatch>();
  result->settings = settings;
  std::vector<const WireDatum*> data;
  for (const ForwardBackwardRequest* request : requests)
    for (const WireDatum& datum : request->data) data.push_back(&datum);
  int64_t columns = 1, num_rows = 0;
  bool follows = true;  // all targets are the next tokens
  for (const WireDatum* datum : data) {
    const WireTensor& targets = datum->inputs.at("target_tokens");
    columns = std::max(columns, targets.columns);
    num_rows += std::ssize(datum->tokens);
    std::vector<int32_t>& tokens = result->tokens.emplace_back(datum->tokens);
    tokens.push_back(
        static_cast<int32_t>(targets.values[(tokens.size() - 1) * static_cast<size_t>(targets.columns)]));
    result->columns.push_back(targets.columns);
    for (size_t i = 0; follows && i + 1 < tokens.size(); ++i) {
      if (targets.columns > 1) follows = false;
      else follows = targets.values[i] == tokens[i + 1];
    }
  }

  const auto filled = [&](const char* name, double value, at::IntArrayRef shape) {
    const bool is_read =
        required_inputs(settings.name).contains(name) || optional_inputs(settings.name).contains(name);
    return is_read ? at::full(shape, value, at::kDouble) : at::Tensor();
  };
  const TinkerLossInputs inputs{filled("weights", 0.0, {num_rows, columns}),
                                filled("logprobs", 0.0, {num_rows, 1}),
                                filled("advantages", 0.0, {num_rows, 1}),
                                filled("clip_low_threshold", settings.clip_low, {num_rows, 1}),
                                filled("clip_high_threshold", settings.clip_high, {num_rows, 1}),
                                filled("sequence_ratio_mask", 0.0, {num_rows, 1})};
  const std::pair<const char*, const at::Tensor*> named[] = {{"weights", &inputs.weights_RK},
                                                             {"logprobs", &inputs.sampling_log_probs_R},
                                                             {"advantages", &inputs.advantages_R},
                                                             {"clip_low_threshold", &inputs.clip_low_R},
                                                             {"clip_high_threshold", &inputs.clip_high_R},
                                                             {"sequence_ratio_mask", &inputs.ratio_mask_R}};
  const at::Tensor ids_RK = at::zeros({num_rows, columns}, at::kLong);
  TrainBatch& batch = result->batch;
  batch.row_offset.push_back(0);
  std::vector<int64_t> sequences;
  for (size_t s = 0; s < data.size(); ++s) {
    const WireDatum& datum = *data[s];
    const std::vector<int32_t>& tokens = result->tokens[s];
    const int64_t begin = batch.row_offset.back(), count = std::ssize(datum.tokens);
    const auto set = [&](const at::Tensor& whole, const WireTensor& tensor) {
      whole.narrow(0, begin, count)
          .narrow(1, 0, tensor.columns)
          .copy_(as_matrix(tensor.values, tensor.columns));
    };
    batch.sequences.emplace_back(tokens.data(), tokens.size());
    std::vector<int32_t>& positions = batch.trained_positions.emplace_back(static_cast<size_t>(count));
    std::iota(positions.begin(), positions.end(), 1);
    sequences.insert(sequences.end(), static_cast<size_t>(count), static_cast<int64_t>(s));
    const WireTensor& targets = datum.inputs.at("target_tokens");
    set(ids_RK, targets);
    if (inputs.weights_RK.defined() && !datum.inputs.contains("weights")) {
      const at::Tensor weights = inputs.weights_RK.narrow(0, begin, count).narrow(1, 0, targets.columns);
      if (targets.is_set.empty()) weights.fill_(1.0);
      else weights.copy_(as_matrix(targets.is_set, targets.columns));
    }
    for (const auto& [name, whole] : named)
      if (const auto found = datum.inputs.find(name); found != datum.inputs.end()) set(*whole, found->second);
    batch.row_offset.push_back(begin + count);
  }
  result->inputs = inputs.mapped(
      [&](const at::Tensor& x) { return (x.is_same(inputs.weights_RK) ? x : x.squeeze(1)).to(type); });
  if (!follows) batch.top_k_ids_RK = ids_RK;
  batch.fields.weights_R = at::ones({num_rows}, type);
  batch.fields.sequences_R = at::tensor(sequences, at::kLong);
  batch.fields.rows_R = at::arange(num_rows, at::kLong);
  return result;
}

TinkerLoss::TinkerLoss(const TinkerBatch& batch, at::Device device)
    : batch_(batch), inputs_(batch.inputs.mapped([&](const at::Tensor& x) { return x.to(device); })) {}

LossOutput TinkerLoss::operator()(const LossRows& rows) const {
  const auto own = [&](const at::Tensor& x) { return x.index_select(0, rows.rows_R); };
  LossOutput output;
  output.loss = tinker_loss(batch_.settings, inputs_.mapped(own),
                            batch_.log_probs(rows.log_probs_R, rows.top_k_log_probs_RK), rows.sequences_R)
                    .sum();
  return output;
}

}  // namespace bough
