#include "cost/calibration_cells.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "algo/loss.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/progress.h"
#include "cost/calibrate.h"
#include "kernels/common/device.h"
#include "kernels/linear/linear.h"
#include "kernels/log_prob/log_prob.h"
#include "kernels/matrix_product/matrix_product.h"
#include "kernels/tree_attention/tree_attention_segments.h"
#include "train/executor.h"

namespace bough {

namespace {

// A cell with short runs is run repeatedly within its turn, as often as this time allows. Its caches are then
// as warm as in plan execution.
constexpr double kTurnSeconds = 0.012;
constexpr int kMaxRunsPerTurn = 12;

// Device and dtype in which the cells compute.
using Kind = at::TensorOptions;
at::ScalarType scalar_type(const Kind& kind) {
  return at::typeMetaToScalarType(kind.dtype());
}

using Time = Clock::Time;
// The time at which the device has finished all submitted kernels.
Time now(const Kind& kind) {
  synchronize(kind.device());
  return std::chrono::steady_clock::now();
}

// Uniform random numbers in [-1, 1]. The speed does not depend on them.
at::Tensor values(at::IntArrayRef sizes, const Kind& kind) {
  return at::empty(sizes, kind.dtype(at::kFloat)).uniform_(-1, 1).to(kind);
}

struct CellShape {
  int64_t width, layers, heads, kv_heads, head_dim, intermediate, vocab;
};
// The models that the cells compute, with the fields in this order.
constexpr CellShape kLayersOnGpu = {4096, 2, 32, 8, 128, 12288, 32768};
constexpr CellShape kLayersOnCpu = {640, 2, 8, 4, 96, 1792, 3072};
constexpr CellShape kHalfOnGpu = {2048, 1, 32, 8, 64, 6144, 64};
constexpr CellShape kHalfOnCpu = {320, 1, 8, 4, 48, 896, 64};
constexpr CellShape kTiny = {16, 1, 2, 1, 16, 16, 64};

ModelConfig with_shape(const CellShape& shape) {
  ModelConfig config;
  config.hidden_size = shape.width;
  config.num_layers = shape.layers;
  config.num_heads = shape.heads;
  config.num_kv_heads = shape.kv_heads;
  config.head_dim = shape.head_dim;
  config.intermediate_size = shape.intermediate;
  config.vocab_size = shape.vocab;
  config.max_position_embeddings = 1 << 20;
  config.tie_word_embeddings = true;
  config.qk_norm = true;
  return config;
}

std::unique_ptr<Model> filled_model(const ModelConfig& config, const Kind& kind) {
  auto model = make_model(config, scalar_type(kind), kind.device());
  for (Parameter* parameter : model->parameters())
    parameter->value.dim() == 1 ? parameter->value.fill_(1) : parameter->value.uniform_(-0.05, 0.05);
  model->allocate_gradients();
  return model;
}

// The layers' matrices in order: all matrices except the embedding.
std::vector<const Parameter*> layer_matrices(Model& model) {
  std::vector<const Parameter*> matrices;
  for (const Parameter* parameter : model.parameters())
    if (parameter->value.dim() == 2 && parameter != &model.embedding()) matrices.push_back(parameter);
  return matrices;
}

std::shared_ptr<Loss> policy_gradient() {
  LossSettings settings;
  settings.loss = "pg";
  settings.use_decoupled_loss = settings.recompute_logprob = false;
  return make_loss(settings);
}

// A batch of one sequence in one leaf block; only the last token is trained.
struct PathBatch {
  Trajectory path;
  TrainBatch batch;
  Plan plan;

  PathBatch(int64_t count, int64_t vocab, at::ScalarType dtype) {
    for (int64_t i = 0; i < count; ++i) path.input_ids.push_back(static_cast<int32_t>(i * 7919 % vocab));
    path.loss_mask.assign(count, 0);
    path.loss_mask.back() = 1;
    path.advantage = {1};
    batch = make_batch({&path}, {}, accumulator_type(dtype));
    plan = make_plan("path", plan_request(batch, count));
  }
};

ForwardBackward time_pass(Model& model, const PathBatch& path, const Loss& loss) {
  const Kind device = model.device();
  Executor executor(model);
  const Time begin = now(device);
  executor.execute_forward(path.plan, path.batch);
  const Time middle = now(device);
  executor.execute(path.plan, path.batch, loss);
  return {seconds_between(begin, middle), seconds_between(middle, now(device))};
}

Cell tiny_pass(const Kind& kind, int layers) {
  CellShape shape = kTiny;
  shape.layers = layers;
  const auto config = with_shape(shape);
  std::shared_ptr<Model> model = filled_model(config, kind);
  auto path = std::make_shared<PathBatch>(2, config.vocab_size, scalar_type(kind));
  return {[model, path, loss = policy_gradient()] { return time_pass(*model, *path, *loss); },
          /*backward_includes_forward=*/true};
}

// Runs `linear` with each matrix, each on a separate input.
ForwardBackward time_linear(const Parameter* const* matrices, size_t count,
                            const std::vector<at::Tensor>& inputs) {
  torch::autograd::variable_list outputs, gradients;
  outputs.reserve(count);
  const Kind device = inputs.at(0).device();
  const Time begin = now(device);
  for (size_t i = 0; i < count; ++i) outputs.push_back(linear(inputs[i], *matrices[i]));
  const double forward = seconds_between(begin, now(device));
  for (const auto& output : outputs) gradients.push_back(output.detach());
  const Time middle = now(device);
  torch::autograd::grad(outputs, inputs, gradients);
  return {forward, seconds_between(middle, now(device))};
}

std::vector<at::Tensor> linear_inputs(const std::vector<const Parameter*>& matrices, size_t count,
                                      int64_t tokens, const Kind& kind) {
  std::vector<at::Tensor> inputs;
  for (size_t i = 0; i < count; ++i)
    inputs.push_back(values({tokens, matrices[i]->value.size(1)}, kind).requires_grad_(true));
  return inputs;
}

// For each key, one past the last query that attends to it. Keys of a piece are visible up to the end of the
// piece. All queries attend to the keys of the prefix KV stack.
std::vector<int32_t> ends(int64_t tokens, int64_t stack_rows, int64_t piece) {
  std::vector<int32_t> ends(static_cast<size_t>(stack_rows), static_cast<int32_t>(tokens));
  for (int64_t i = 0; i < tokens; ++i)
    ends.push_back(static_cast<int32_t>(std::min(tokens, (i / piece + 1) * piece)));
  return ends;
}

Cell attention_cell(const AttentionCells& cells, const Kind& kind, int64_t tokens, int64_t stack_rows,
                    int64_t piece) {
  const int64_t groups = cells.num_kv_heads, width = cells.head_dim;
  const std::vector<int32_t> end_local = ends(tokens, stack_rows, piece);
  const KeyEnds key_ends = upload_key_ends(end_local, stack_rows, kind.device());
  std::vector<QuerySegment> segments;
  if (vendor_attends_runs(kind.device(), scalar_type(kind), width, /*same_bits=*/false))
    segments = cut_into_segments(end_local, stack_rows);
  upload_segments(segments, kind.device());
  TreeAttentionInput in{
      values({tokens, cells.num_heads, width}, kind), values({tokens, groups, width}, kind),
      values({tokens, groups, width}, kind),          values({stack_rows, groups, width}, kind),
      values({stack_rows, groups, width}, kind),      key_ends.end_local,
      1 / std::sqrt(static_cast<double>(width)),      key_ends.spans};
  const auto d_k = at::zeros(in.k_stack_PGH.sizes(), kind.dtype(accumulator_type(scalar_type(kind))));
  return {[in, kind, segments, d_k, d_v = d_k.clone(), d_o = values(in.q_TNH.sizes(), kind)] {
    const at::NoGradGuard no_grad;
    const Time begin = now(kind);
    const auto out =
        segments.empty() ? tree_attention_forward(in) : tree_attention_forward_by_segments(in, segments);
    const Time middle = now(kind);
    if (segments.empty()) tree_attention_backward(in, out, d_o, d_k, d_v);
    else tree_attention_backward_by_segments(in, out, d_o, d_k, d_v, segments);
    return ForwardBackward{seconds_between(begin, middle), seconds_between(middle, now(kind))};
  }};
}

void add_attention(AttentionCells& cells, int64_t head_dim, const Kind& kind, int64_t largest) {
  cells.head_dim = head_dim;
  for (int64_t size = 32; size <= largest; size *= 2) {
    cells.sizes.push_back(size);
    cells.path.push_back(attention_cell(cells, kind, size, 0, size));
    cells.stack.push_back(attention_cell(cells, kind, size, AttentionCells::kStackRows, size));
    cells.pieces.push_back(attention_cell(cells, kind, size, 0, AttentionCells::kPieceTokens));
  }
}

void add_turn(Cell& cell, bool counted) {
  double seconds = 0;
  for (int i = 0; i < (counted ? kMaxRunsPerTurn : 1) && seconds < kTurnSeconds; ++i) {
    const auto [forward, backward] = cell.run();
    seconds += forward + backward;
    if (!counted) continue;
    cell.forward.push_back(forward);
    cell.backward.push_back(backward);
  }
}

}  // namespace

// The mean of the runs: a training step is long enough to include the occasional disturbance. Each run counts
// as at most 1.5 times the lower quartile. Without this limit, a run whose threads share cores with other
// programs and wait for each other would dominate the mean.
double usual_seconds(std::vector<double> runs) {
  if (runs.empty()) return 0;
  const auto quartile = runs.begin() + static_cast<int64_t>(runs.size() / 4);
  std::nth_element(runs.begin(), quartile, runs.end());
  const double most = 1.5 * *quartile;
  double total = 0;
  for (const double run : runs) total += std::min(run, most);
  return total / static_cast<double>(runs.size());
}

double upper_median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<int64_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

double Cell::forward_seconds(const Cell& cell) {
  return usual_seconds(cell.forward);
}

double Cell::backward_seconds(const Cell& cell) {
  const double seconds = usual_seconds(cell.backward);
  return cell.backward_includes_forward ? std::max(0.0, seconds - forward_seconds(cell)) : seconds;
}

struct CalibrationCells::Models {
  std::vector<std::unique_ptr<Model>> copies;
  std::vector<std::vector<const Parameter*>> matrices;  // by copy
  std::shared_ptr<Loss> loss = policy_gradient();
  size_t turn = 0;

  // Cycles through the copies, so that no run finds its weights in the nearest cache.
  size_t next() { return turn = (turn + 1) % copies.size(); }
};

CalibrationCells::CalibrationCells(at::Device device, at::ScalarType dtype, int64_t largest_pass,
                                   const DeviceKernels& kernels)
    : kind_(Kind(device).dtype(dtype)), models_(std::make_unique<Models>()) {
  // A GPU is fully used only by products as wide as those of a model with some billion weights.
  const bool on_gpu = !device.is_cpu();
  const auto config = with_shape(on_gpu ? kLayersOnGpu : kLayersOnCpu);
  // More copies need more cache. These numbers gave the best predictions for other shapes (bench/cost_model)
  // on a machine whose last-level cache has 260 MB. Weights and gradients are then 270 MB in fp32, 136 MB in
  // bf16. With more bf16 copies, small passes are predicted too slow.
  const int num_copies = dtype == at::kBFloat16 ? 2 : 3;
  for (int i = 0; i < num_copies; ++i) {
    models_->copies.push_back(filled_model(config, kind_));
    models_->matrices.push_back(layer_matrices(*models_->copies.back()));
  }
  // The reference attention keeps five matrices of all scores.
  const int64_t largest = kernels.by_reference() ? std::min<int64_t>(largest_pass, 256) : largest_pass;
  for (const int64_t size : {2, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384}) {
    if (size > largest) break;
    for (auto* cells : {&passes, &linear, &head}) cells->sizes.push_back(size);
    passes.cells.push_back(pass_cell(size));
    linear.cells.push_back(linear_cell(size));
    head.cells.push_back(head_cell(size));
  }
  for (const auto* matrix : models_->matrices[0])
    linear.flops += static_cast<double>(matrix->value.numel()) * 2 / static_cast<double>(config.num_layers);
  head.flops = 2.0 * static_cast<double>(config.hidden_size * config.vocab_size);
  if (on_gpu)
    for (AttentionCells* cells : {&narrow, &wide}) cells->num_heads = 32, cells->num_kv_heads = 8;
  // With more queries the rate does not change; the measurement would only take longer.
  const int64_t most_queries = std::min<int64_t>(largest, on_gpu ? 8192 : 1024);
  add_attention(narrow, 32, kind_, most_queries);
  add_attention(wide, 128, kind_, most_queries);

  tiny_shallow = tiny_pass(kind_, kShallow);
  tiny_deep = tiny_pass(kind_, kDeep);
  std::shared_ptr<Model> tiny = filled_model(with_shape(kTiny), kind_);
  auto matrices = layer_matrices(*tiny);
  tiny_linear.run = [tiny, matrices, inputs = linear_inputs(matrices, matrices.size(), 2, kind_)] {
    return time_linear(matrices.data(), matrices.size(), inputs);
  };
  std::shared_ptr<Model> half = filled_model(with_shape(on_gpu ? kHalfOnGpu : kHalfOnCpu), kind_);
  auto half_matrices = layer_matrices(*half);
  for (const auto* matrix : half_matrices)
    half_linear_flops += 2.0 * static_cast<double>(matrix->value.numel());
  half_linear.run = [half, half_matrices,
                     inputs = linear_inputs(half_matrices, half_matrices.size(), kHalfTokens, kind_)] {
    return time_linear(half_matrices.data(), half_matrices.size(), inputs);
  };
  AttentionCells tiny_attention_shape;
  tiny_attention_shape.num_heads = 2;
  tiny_attention_shape.num_kv_heads = 1;
  tiny_attention_shape.head_dim = 16;
  tiny_attention = attention_cell(tiny_attention_shape, kind_, 2, 0, 2);
  all_ = list();
}

CalibrationCells::~CalibrationCells() = default;

const ModelConfig& CalibrationCells::config() const {
  return models_->copies[0]->config();
}

Cell CalibrationCells::pass_cell(int64_t tokens) {
  auto path = std::make_shared<PathBatch>(tokens, config().vocab_size, scalar_type(kind_));
  return {[this, path] { return time_pass(*models_->copies[models_->next()], *path, *models_->loss); },
          /*backward_includes_forward=*/true};
}

Cell CalibrationCells::linear_cell(int64_t tokens) {
  const auto& first = models_->matrices[0];
  const size_t per_layer = first.size() / static_cast<size_t>(config().num_layers);
  const auto inputs = linear_inputs(first, per_layer, tokens, kind_);
  return {[this, inputs, per_layer] {
    return time_linear(models_->matrices[models_->next()].data(), per_layer, inputs);
  }};
}

// Computes one chunk like train/head.cpp, without the loss.
Cell CalibrationCells::head_cell(int64_t rows) {
  const auto hidden_RD = values({rows, config().hidden_size}, kind_);
  const auto labels = at::zeros({rows}, kind_.dtype(at::kLong));
  const auto seeds = at::ones({rows}, kind_.dtype(accumulator_type(scalar_type(kind_))));
  return {[this, hidden_RD, labels, seeds] {
    const at::NoGradGuard no_grad;
    const Parameter& weight = models_->copies[models_->next()]->head();
    const Time begin = now(kind_);
    const auto logits_RV = matrix_product(hidden_RD, weight.value.t());
    const auto out = log_prob_forward(logits_RV, labels, 1.0);
    const Time middle = now(kind_);
    log_prob_backward_(logits_RV, labels, out, seeds, seeds, 1.0);
    add_matrix_product_(weight.main_grad, logits_RV.t(), hidden_RD);
    const auto d_hidden_RD = matrix_product(logits_RV, weight.value).to(seeds.scalar_type());
    return ForwardBackward{seconds_between(begin, middle), seconds_between(middle, now(kind_))};
  }};
}

std::vector<Cell*> CalibrationCells::list() {
  std::vector<Cell*> cells = {&tiny_linear, &half_linear, &tiny_attention, &tiny_shallow, &tiny_deep};
  const auto add = [&](std::vector<Cell>& more) {
    for (auto& cell : more) cells.push_back(&cell);
  };
  for (auto* work : {&passes, &linear, &head}) add(work->cells);
  for (auto* attention : {&narrow, &wide}) {
    add(attention->path);
    add(attention->stack);
    add(attention->pieces);
  }
  return cells;
}

double CalibrationCells::disturbance() const {
  double total = 0, undisturbed = 0;
  for (const Cell* cell : all_)
    for (const auto* runs : {&cell->forward, &cell->backward}) {
      total += std::accumulate(runs->begin(), runs->end(), 0.0);
      undisturbed += upper_median(*runs) * static_cast<double>(runs->size());
    }
  return undisturbed > 0 ? total / undisturbed : 1;
}

int CalibrationCells::measure(const CalibrationEffort& effort) {
  const Time begin = std::chrono::steady_clock::now();
  Progress progress("measuring this machine's speed", 0, "kernel runs",
                    effort.show_progress ? ProgressStyle::kAutomatic : ProgressStyle::kSilent);
  const auto turn = [&](bool counted) {
    for (Cell* cell : all_) {
      if (effort.stop && effort.stop())
        throw Interrupted("stopped while the speed of this machine was measured; nothing was trained");
      add_turn(*cell, counted);
      progress.advance();
    }
  };
  // The first run of a size compiles its oneDNN kernels and faults its memory in.
  turn(false);
  int rounds = 0;
  while (rounds < effort.min_rounds ||
         (rounds < effort.max_rounds && seconds_since(begin) < effort.seconds)) {
    turn(true);
    ++rounds;
  }
  return rounds;
}

}  // namespace bough
