#include "train/optimizer.h"

#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <numbers>
#include <set>
#include <utility>

#include "base/error.h"
#include "kernels/adamw/adamw.h"
#include "kernels/common/host_snapshot.h"
#include "models/pipeline_stage.h"
#include "models/tensor_parallel.h"
#include "train/collective_buckets.h"
#include "train/offloaded_update.h"

namespace bough {

double Schedule::learning_rate(int64_t step) const {
  BOUGH_CHECK(step >= 0, "step: got ", step, ", expected at least 0");
  if (step < num_warmup_steps)
    return peak * static_cast<double>(step + 1) / static_cast<double>(num_warmup_steps);
  if (shape == Shape::kConstant) return peak;
  const double length = static_cast<double>(std::max<int64_t>(1, num_steps - num_warmup_steps));
  const double progress = std::min(1.0, static_cast<double>(step - num_warmup_steps) / length);
  const double left =
      shape == Shape::kLinear ? 1 - progress : (1 + std::cos(std::numbers::pi * progress)) / 2;
  return peak * (min_ratio + (1 - min_ratio) * left);
}

Schedule::Shape schedule_shape(const std::string& name) {
  if (name == "constant") return Schedule::Shape::kConstant;
  if (name == "linear") return Schedule::Shape::kLinear;
  if (name == "cosine") return Schedule::Shape::kCosine;
  throw UserError(str("lr_scheduler_type: got ", quoted(name), "; expected constant, linear or cosine"));
}
namespace {

namespace fs = std::filesystem;

constexpr const char* kFile = "optimizer.safetensors";
constexpr const char* kOptimizerFormat = "bough-adamw-1";

int64_t read_count(const SafetensorsFile& file, const std::string& key) {
  const auto found = file.metadata().find(key);
  int64_t value = -1;
  if (found != file.metadata().end()) {
    const std::string& text = found->second;
    const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (code != std::errc() || end != text.data() + text.size()) value = -1;
  }
  if (value < 0)
    throw UserError(
        str(file.path().string(), ": metadata ", quoted(key), ": got ",
            found == file.metadata().end() ? "nothing" : quoted(found->second),
            "; expected a count: the file is damaged or from another program; use another checkpoint"));
  return value;
}

void check_tensor(const SafetensorsFile& file, const std::string& name, at::IntArrayRef sizes,
                  at::ScalarType dtype) {
  const auto found = file.entries().find(name);
  // bough:: is written out because c10, the namespace of some arguments, has a str of its own.
  const std::string remedy = "; resume with the model and dtype that the run was started with";
  if (found == file.entries().end())
    throw UserError(bough::str(file.path().string(), ": got no tensor ", quoted(name), "; expected shape ",
                               sizes, remedy));
  const auto& entry = found->second;
  if (at::IntArrayRef(entry.shape) != sizes || entry.dtype != dtype)
    throw UserError(bough::str(file.path().string(), ": tensor ", quoted(name), ": got ",
                               c10::toString(entry.dtype), " ", at::IntArrayRef(entry.shape), ", expected ",
                               c10::toString(dtype), " ", sizes, remedy));
}

Communicator* of_several(Communicator* ranks) {
  return ranks && ranks->size() > 1 ? ranks : nullptr;
}

}  // namespace

Schedule make_schedule(const OptimizerSettings& settings, int64_t total_steps) {
  return {
      .peak = settings.lr,
      .shape = schedule_shape(settings.lr_scheduler_type),
      .min_ratio = settings.min_lr_ratio,
      .num_warmup_steps = std::llround(settings.warmup_steps_proportion * static_cast<double>(total_steps)),
      .num_steps = total_steps};
}

Optimizer::Optimizer(Model& model, const OptimizerSettings& settings, int64_t total_steps,
                     Communicator* ranks, bool fixed_shards)
    : Optimizer(model.trained_parameters(), settings, total_steps,
                {.data = ranks,
                 .tensor = model.tensor_ranks(),
                 .stages = model.ranks().stages,
                 .tied = model.trained_at_both_ends(),
                 .fixed_shards = fixed_shards}) {}

Optimizer::Optimizer(const std::vector<Parameter*>& parameters, const OptimizerSettings& settings,
                     int64_t total_steps, const OptimizerRanks& ranks)
    : settings_(settings),
      schedule_(make_schedule(settings, total_steps)),
      ranks_(of_several(ranks.data)),
      tensor_ranks_(of_several(ranks.tensor)),
      stages_(of_several(ranks.stages)),
      tied_(ranks.tied),
      fixed_(ranks.fixed_shards) {
  BOUGH_CHECK(!fixed_ || !ranks_ || kFixedShares % ranks_->size() == 0, "got ", ranks_->size(),
              " ranks, expected 1, 2, 4 or 8");
  BOUGH_CHECK(total_steps >= 0, "total_steps: got ", total_steps, ", expected at least 0");
  for (Parameter* parameter : parameters) {
    const at::ScalarType acc = accumulator_type(parameter->value.scalar_type());
    if (!parameter->main_grad.defined())
      parameter->main_grad = at::zeros_like(parameter->value, parameter->value.options().dtype(acc));
    const ElementShare share = share_of(parameter->value.numel(), ranks_, fixed_);
    State state{.parameter = parameter,
                .decayed = parameter->value.dim() > 1,
                .begin = share.begin,
                .count = share.count};
    const bool is_apart = settings.offload.value_or(false) && !parameter->value.is_cpu();
    const auto options =
        at::TensorOptions().dtype(acc).device(is_apart ? at::kCPU : parameter->value.device());
    const auto zeros = [&] { return at::zeros({state.count}, options); };
    state.exp_avg = zeros();
    state.exp_avg_sq = zeros();
    if (acc != parameter->value.scalar_type()) {
      state.master = zeros();
      state.master.copy_(state.own(parameter->value));
    }
    if (is_apart && !offloaded_)
      offloaded_ = std::make_shared<OffloadedUpdate>(copies_on_side_stream(parameter->value.device()));
    states_.push_back(std::move(state));
  }
  check_integrity();
}

namespace {

// The number of pieces (shares, if `fixed`) into which a rank's elements of a parameter are cut. Each piece
// is updated separately.
int64_t pieces_of(bool fixed, const Communicator* ranks) {
  return fixed ? kFixedShares / (ranks ? ranks->size() : 1) : 1;
}

}  // namespace

// Sum of squares of `count` gradient elements, from element `begin` of this rank's shard on. If several
// tensor-parallel ranks hold copies of an element, each rank's square is divided by the number of copies, so
// the sum over ranks counts the element once.
at::Tensor Optimizer::square_of(const State& state, const at::Tensor& gradient, int64_t begin,
                                int64_t count) const {
  const at::Tensor none = at::zeros({}, gradient.options().dtype(at::kDouble));
  if (count == 0) return none;
  if (!tensor_ranks_) return sum_of_squares(gradient.narrow(0, begin, count));
  const at::Tensor& value = state.parameter->value;
  const int64_t row = value.numel() / std::max<int64_t>(1, value.size(0));
  at::Tensor sum = none;
  for (const Parameter::Part& part : state.parameter->parts) {
    const int64_t from = std::max(begin, part.begin * row - state.begin);
    const int64_t to = std::min(begin + count, part.end * row - state.begin);
    if (from < to)
      sum = sum + sum_of_squares(gradient.narrow(0, from, to - from)) / static_cast<double>(part.copies);
  }
  return sum;
}

double Optimizer::norm_of(const std::vector<at::Tensor>& gradients) const {
  const int64_t num_ranks = ranks_ ? ranks_->size() : 1, pieces = pieces_of(fixed_, ranks_);
  // All sums are copied from the device together, with one wait instead of one per parameter.
  std::vector<at::Tensor> squares;
  for (size_t i = 0; i < gradients.size(); ++i) {
    // The tied embedding counts once, on the first stage.
    const bool counts = states_[i].parameter != tied_ || stages_->rank() == 0;
    const int64_t length = share_of(states_[i].parameter->value.numel(), ranks_, fixed_).most / pieces;
    for (int64_t piece = 0; piece < pieces; ++piece) {
      const int64_t begin = std::min(piece * length, gradients[i].numel());
      squares.push_back(square_of(states_[i], gradients[i], begin,
                                  counts ? std::min(length, gradients[i].numel() - begin) : 0));
    }
  }
  at::Tensor all = squares.empty() ? at::zeros({0}, at::kDouble) : at::stack(squares).to(at::kCPU);
  const int64_t num_squares = all.numel();
  if (tensor_ranks_) all_reduce_(all, *tensor_ranks_);
  if (ranks_ && num_squares > 0) all = all_gather(all, num_squares * num_ranks, *ranks_);
  double sum = 0;
  for (int64_t i = 0; i < num_squares; i += pieces)
    for (int64_t rank = 0; rank < num_ranks; ++rank)
      for (int64_t piece = 0; piece < pieces; ++piece)
        sum += all.const_data_ptr<double>()[rank * num_squares + i + piece];
  if (stages_) stages_->all_reduce(std::span<double>(&sum, 1));
  return std::sqrt(sum);
}

void Optimizer::use(const OptimizerSettings& settings) {
  settings_ = settings;
  schedule_ = {.peak = settings.lr};
}

Optimizer::Report Optimizer::step() {
  if (tensor_ranks_) {
    std::vector<Parameter*> parameters;
    for (const State& state : states_) parameters.push_back(state.parameter);
    sum_copied_gradients(parameters, *tensor_ranks_);
  }
  std::vector<at::Tensor> gradients;
  for (const State& state : states_) gradients.push_back(state.parameter->main_grad);
  if (ranks_) reduce_scatter_(gradients, *ranks_, fixed_);
  for (size_t i = 0; i < states_.size(); ++i) {
    gradients[i] = states_[i].own(gradients[i]);
    if (states_[i].parameter == tied_) sum_over_ends_(gradients[i], *stages_);
  }
  Report report{.grad_norm = norm_of(gradients), .lr = schedule_.learning_rate(num_steps_), .skipped = false};
  ++num_steps_;
  if (!std::isfinite(report.grad_norm)) {
    ++num_skipped_;
    report.skipped = true;
    for (const State& state : states_) state.parameter->main_grad.zero_();
    return report;
  }
  const double clip = settings_.gradient_clipping;
  AdamwStep update{.lr = report.lr,
                   .beta1 = settings_.beta1,
                   .beta2 = settings_.beta2,
                   .eps = settings_.eps,
                   .weight_decay = 0,
                   .gradient_scale = clip > 0 && report.grad_norm > clip ? clip / report.grad_norm : 1.0,
                   .step = num_steps_ - num_skipped_};
  std::vector<OffloadedUpdate::Call> offloaded;
  for (size_t i = 0; i < states_.size(); ++i) {
    const State& state = states_[i];
    const at::Tensor& value = state.parameter->value;
    update.weight_decay = state.decayed ? settings_.weight_decay : 0.0;
    const at::Tensor own = state.own(value);
    // A kernel may round its last few elements differently. If fixed_, the pieces are therefore the same for
    // any number of ranks.
    const int64_t most = share_of(value.numel(), ranks_, fixed_).most / pieces_of(fixed_, ranks_);
    for (int64_t begin = 0; begin < state.count; begin += most) {
      const auto piece = [&](const at::Tensor& whole) {
        return whole.defined() ? whole.narrow(0, begin, std::min(most, state.count - begin)) : whole;
      };
      const AdamwState of_piece{piece(own), piece(state.master), piece(state.exp_avg),
                                piece(state.exp_avg_sq), piece(gradients[i])};
      if (state.is_offloaded()) offloaded.push_back({of_piece, update});
      else adamw(of_piece, update);
    }
  }
  if (!offloaded.empty()) {
    offloaded_->run(offloaded);
    for (const at::Tensor& gradient : gradients) gradient.zero_();
  }
  if (ranks_) {
    std::vector<at::Tensor> values;
    for (const State& state : states_) values.push_back(state.parameter->value);
    all_gather_(values, *ranks_, fixed_);
  }
  return report;
}

std::vector<Optimizer::Saved> Optimizer::saved() const {
  std::vector<Saved> all;
  for (const State& state : states_) {
    for (const Parameter::Part& part : state.parameter->parts) {
      const auto add = [&](const char* suffix, at::Tensor State::*tensor) {
        if ((state.*tensor).defined()) all.push_back({part.name + suffix, &state, tensor, &part});
      };
      add(".master", &State::master);
      add(".exp_avg", &State::exp_avg);
      add(".exp_avg_sq", &State::exp_avg_sq);
    }
  }
  return all;
}

OptimizerSnapshot Optimizer::snapshot(bool copies) const {
  OptimizerSnapshot snapshot{{}, num_steps_, num_skipped_};
  const auto is_first = [](const Communicator* group) { return !group || group->rank() == 0; };
  HostCopier copier;
  for (const Saved& saved : saved()) {
    const Parameter& parameter = *saved.state->parameter;
    at::Tensor flat = saved.state->*saved.tensor;
    if (ranks_) flat = all_gather(flat, parameter.value.numel(), *ranks_, fixed_);
    at::Tensor part =
        flat.view(parameter.value.sizes()).narrow(0, saved.part->begin, saved.part->end - saved.part->begin);
    if (tensor_ranks_ && is_first(ranks_)) part = gather_pieces(part, parameter, *saved.part, *tensor_ranks_);
    // The whole state never lies on the device a second time.
    else if (copies || ranks_) part = copier.copy(part);
    if (is_first(ranks_) && is_first(tensor_ranks_)) add_pieces(snapshot.tensors, saved.name, part);
  }
  if (stages_ && is_first(ranks_) && is_first(tensor_ranks_)) {
    const NamedTensors own = std::exchange(snapshot.tensors, {});
    gather_to_first_stage(own, *stages_, [&](const std::string& name, const at::Tensor& tensor) {
      snapshot.tensors.emplace_back(name, tensor);
    });
  }
  return snapshot;
}

void OptimizerSnapshot::save(const fs::path& directory) const {
  write_safetensors(directory / kFile, tensors, {},
                    {{"format", kOptimizerFormat},
                     {"num_steps", std::to_string(num_steps)},
                     {"num_skipped", std::to_string(num_skipped)}});
}

void Optimizer::load(const fs::path& directory) {
  const SafetensorsFile file(directory / kFile);
  const auto format = file.metadata().find("format");
  if (format == file.metadata().end() || format->second != kOptimizerFormat)
    throw UserError(str(file.path().string(), ": metadata 'format': got ",
                        format == file.metadata().end() ? "nothing" : quoted(format->second), "; expected ",
                        kOptimizerFormat, ": the file was not written by this version of Bough's optimizer"));
  const int64_t num_steps = read_count(file, "num_steps");
  const int64_t num_skipped = read_count(file, "num_skipped");
  if (num_skipped > num_steps)
    throw UserError(str(file.path().string(), ": got num_skipped ", num_skipped, " and num_steps ", num_steps,
                        "; expected at most num_steps: the file is damaged; use another checkpoint"));
  const std::vector<Saved> all = saved();
  for (const Saved& each : all)
    check_tensor(file, each.name, unsharded_sizes(*each.state->parameter, *each.part),
                 (each.state->*each.tensor).scalar_type());
  std::set<std::string> names;
  for (const Saved& each : all) names.insert(each.name);
  // A checkpoint of a pipeline has the tensors of all stages, this rank's optimizer only those of its stage.
  if (stages_ ? file.entries().size() < names.size() : file.entries().size() != names.size())
    throw UserError(str(file.path().string(), ": got ", file.entries().size(), " tensors; expected the ",
                        names.size(), " of this model: resume with the model and dtype of the run"));

  for (const Saved& each : all) {
    const State& state = *each.state;
    const at::Tensor& value = state.parameter->value;
    const int64_t row = value.numel() / std::max<int64_t>(1, value.size(0));
    const int64_t first = each.part->begin * row;
    const int64_t begin = std::max(first, state.begin);
    const int64_t end = std::min(each.part->end * row, state.begin + state.count);
    if (begin < end)
      (state.*each.tensor)
          .narrow(0, begin - state.begin, end - begin)
          .copy_(own_piece(file.tensor(each.name), *state.parameter, *each.part)
                     .reshape(-1)
                     .narrow(0, begin - first, end - begin));
  }
  std::vector<at::Tensor> rounded;
  for (const State& state : states_) {
    if (!state.master.defined()) continue;
    state.own(state.parameter->value).copy_(state.master);
    rounded.push_back(state.parameter->value);
  }
  if (ranks_) all_gather_(rounded, *ranks_, fixed_);
  num_steps_ = num_steps;
  num_skipped_ = num_skipped;
}

std::vector<at::Tensor*> Optimizer::state_tensors() {
  std::vector<at::Tensor*> tensors;
  for (State& state : states_)
    for (at::Tensor* tensor : {&state.master, &state.exp_avg, &state.exp_avg_sq})
      if (tensor->defined()) tensors.push_back(tensor);
  return tensors;
}

void Optimizer::check_integrity() const {
  BOUGH_CHECK(num_skipped_ >= 0 && num_skipped_ <= num_steps_, num_skipped_, " skipped of ", num_steps_,
              " steps");
  for (const State& state : states_) {
    const Parameter& p = *state.parameter;
    const auto acc = accumulator_type(p.value.scalar_type());
    const at::Device device = settings_.offload.value_or(false) ? at::Device(at::kCPU) : p.value.device();
    const auto fits = [&](const at::Tensor& x) {
      return x.defined() && x.scalar_type() == acc && x.device() == device && x.dim() == 1 &&
             x.size(0) == state.count;
    };
    BOUGH_CHECK(!p.parts.empty() && p.main_grad.defined() && p.main_grad.scalar_type() == acc &&
                    p.main_grad.device() == p.value.device() && p.main_grad.sizes() == p.value.sizes() &&
                    fits(state.exp_avg) && fits(state.exp_avg_sq),
                p.parts.empty() ? "a parameter has no name" : p.parts.front().name,
                ": gradient or moments have the wrong size, dtype or device");
    BOUGH_CHECK(state.master.defined() == (acc != p.value.scalar_type()), p.parts.front().name,
                ": only weights below accumulator precision have a master copy");
    BOUGH_CHECK(!state.master.defined() ||
                    (fits(state.master) &&
                     state.here(state.own(p.value)).equal(state.master.to(p.value.scalar_type()))),
                p.parts.front().name, ": the value is not the rounded master copy: other code changed it");
  }
}

}  // namespace bough
