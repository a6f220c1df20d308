#include "train/optimizer.h"

#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <numbers>

#include "base/error.h"
#include "kernels/adamw/adamw.h"

namespace bough {

double Schedule::learning_rate(int64_t step) const {
  BOUGH_CHECK(step >= 0, "step ", step);
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
constexpr const char* kFormat = "bough-adamw-1";

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
            "; expected a count: the file is damaged or of another program, use another checkpoint"));
  return value;
}

void check_tensor(const SafetensorsFile& file, const std::string& name, const at::Tensor& expected) {
  const auto found = file.entries().find(name);
  // bough:: because c10, whose types are among the arguments, has a str of its own.
  const std::string remedy = "; resume with the model and dtype that the run was started with";
  if (found == file.entries().end())
    throw UserError(bough::str(file.path().string(), ": got no tensor ", quoted(name), "; expected shape ",
                               expected.sizes(), remedy));
  const auto& entry = found->second;
  if (at::IntArrayRef(entry.shape) != expected.sizes() || entry.dtype != expected.scalar_type())
    throw UserError(bough::str(file.path().string(), ": tensor ", quoted(name), ": got ",
                               c10::toString(entry.dtype), " ", at::IntArrayRef(entry.shape), ", expected ",
                               c10::toString(expected.scalar_type()), " ", expected.sizes(), remedy));
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

Optimizer::Optimizer(Model& model, const OptimizerSettings& settings, int64_t total_steps)
    : Optimizer(model.trained_parameters(), settings, total_steps) {}

Optimizer::Optimizer(const std::vector<Parameter*>& parameters, const OptimizerSettings& settings,
                     int64_t total_steps)
    : settings_(settings), schedule_(make_schedule(settings, total_steps)) {
  BOUGH_CHECK(total_steps >= 0, "total_steps ", total_steps);
  for (Parameter* parameter : parameters) {
    const at::ScalarType acc = accumulator_type(parameter->value.scalar_type());
    if (!parameter->main_grad.defined())
      parameter->main_grad = at::zeros_like(parameter->value, parameter->value.options().dtype(acc));
    State state{.parameter = parameter, .decayed = parameter->value.dim() > 1};
    if (acc != parameter->value.scalar_type()) state.master = parameter->value.to(acc);
    state.exp_avg = at::zeros_like(parameter->main_grad);
    state.exp_avg_sq = at::zeros_like(parameter->main_grad);
    states_.push_back(std::move(state));
  }
  check_integrity();
}

double Optimizer::gradient_norm() const {
  double sum = 0;
  // From a device at once: it is waited for once, not for every parameter.
  std::vector<at::Tensor> squares;
  for (const State& state : states_) squares.push_back(sum_of_squares(state.parameter->main_grad));
  const at::Tensor on_host =
      squares.empty() ? at::zeros({0}, at::kDouble) : at::stack(squares).to(at::kCPU, at::kDouble);
  for (int64_t i = 0; i < on_host.numel(); ++i) sum += on_host.const_data_ptr<double>()[i];
  return std::sqrt(sum);
}

Optimizer::Report Optimizer::step() {
  Report report{.grad_norm = gradient_norm(), .lr = schedule_.learning_rate(num_steps_), .skipped = false};
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
  for (const State& state : states_) {
    update.weight_decay = state.decayed ? settings_.weight_decay : 0.0;
    adamw({state.parameter->value, state.master, state.exp_avg, state.exp_avg_sq, state.parameter->main_grad},
          update);
  }
  return report;
}

NamedTensors Optimizer::named_state() const {
  NamedTensors tensors;
  for (const State& state : states_)
    for (const Parameter::Part& part : state.parameter->parts) {
      const auto add = [&](const char* suffix, const at::Tensor& whole) {
        if (whole.defined())
          tensors.emplace_back(part.name + suffix, whole.narrow(0, part.begin, part.end - part.begin));
      };
      add(".master", state.master);
      add(".exp_avg", state.exp_avg);
      add(".exp_avg_sq", state.exp_avg_sq);
    }
  return tensors;
}

OptimizerSnapshot Optimizer::snapshot(bool copies) const {
  OptimizerSnapshot snapshot{named_state(), num_steps_, num_skipped_};
  if (copies)
    for (auto& [name, tensor] : snapshot.tensors) tensor = tensor.clone();
  return snapshot;
}

void OptimizerSnapshot::save(const fs::path& directory) const {
  write_safetensors(directory / kFile, tensors, {},
                    {{"format", kFormat},
                     {"num_steps", std::to_string(num_steps)},
                     {"num_skipped", std::to_string(num_skipped)}});
}

void Optimizer::load(const fs::path& directory) {
  const SafetensorsFile file(directory / kFile);
  const auto format = file.metadata().find("format");
  if (format == file.metadata().end() || format->second != kFormat)
    throw UserError(str(file.path().string(), ": metadata 'format': got ",
                        format == file.metadata().end() ? "nothing" : quoted(format->second), "; expected ",
                        kFormat, ": the file was not written by this version of Bough's optimizer"));
  const int64_t num_steps = read_count(file, "num_steps");
  const int64_t num_skipped = read_count(file, "num_skipped");
  if (num_skipped > num_steps)
    throw UserError(str(file.path().string(), ": got ", num_skipped, " skipped of ", num_steps,
                        " steps; expected no more than all: the file is damaged, use another checkpoint"));
  const NamedTensors tensors = named_state();
  for (const auto& [name, tensor] : tensors) check_tensor(file, name, tensor);
  if (file.entries().size() != tensors.size())
    throw UserError(str(file.path().string(), ": got ", file.entries().size(), " tensors; expected the ",
                        tensors.size(), " of this model: resume with the model and dtype of the run"));

  for (const auto& [name, tensor] : tensors) tensor.copy_(file.tensor(name));
  for (const State& state : states_)
    if (state.master.defined()) state.parameter->value.copy_(state.master);
  num_steps_ = num_steps;
  num_skipped_ = num_skipped;
}

void Optimizer::check_integrity() const {
  BOUGH_CHECK(num_skipped_ >= 0 && num_skipped_ <= num_steps_, num_skipped_, " skipped of ", num_steps_);
  for (const State& state : states_) {
    const Parameter& p = *state.parameter;
    const auto acc = accumulator_type(p.value.scalar_type());
    const auto fits = [&](const at::Tensor& x) {
      return x.defined() && x.sizes() == p.value.sizes() && x.scalar_type() == acc &&
             x.device() == p.value.device();
    };
    BOUGH_CHECK(!p.parts.empty() && fits(p.main_grad) && fits(state.exp_avg) && fits(state.exp_avg_sq),
                p.parts.empty() ? "a parameter without a name" : p.parts.front().name);
    BOUGH_CHECK(state.master.defined() == (acc != p.value.scalar_type()), p.parts.front().name);
    BOUGH_CHECK(!state.master.defined() ||
                    (fits(state.master) && p.value.equal(state.master.to(p.value.scalar_type()))),
                p.parts.front().name, ": the value is not the rounded master; who changed it?");
  }
}

}  // namespace bough
