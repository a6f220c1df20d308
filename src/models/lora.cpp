#include "models/lora.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <functional>
#include <map>
#include <set>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "models/adapter_config.h"
#include "models/checkpoint.h"
#include "models/safetensors.h"
#include "models/tensor_parallel.h"

namespace bough {

namespace {

namespace fs = std::filesystem;

constexpr const char* kConfigFile = "adapter_config.json";
constexpr const char* kWeightsFile = "adapter_model.safetensors";
constexpr std::string_view kWeight = ".weight";

constexpr std::string_view kHead = "lm_head";
constexpr std::string_view kAllLinear = "all-linear";

// In model.layers.0.self_attn.q_proj.weight, the module is the text before .weight. Its last part is q_proj.
// A tied lm_head is the embedding's matrix. Its adapter is that of the module lm_head, as in PEFT.
std::string module_of(const Parameter::Part& part) {
  BOUGH_CHECK(part.name.ends_with(kWeight), part.name);
  if (part.name == "model.embed_tokens.weight") return std::string(kHead);
  return part.name.substr(0, part.name.size() - kWeight.size());
}
std::string last_part(const std::string& module) {
  return module.substr(module.rfind('.') + 1);
}
std::string file_name(const std::string& module, const char* which) {
  return "base_model.model." + module + ".lora_" + which + ".weight";
}

// Adds uninitialised adapters to those modules of the matrix for which `is_wanted` is true. `rank`: of the
// adapters. `num_ranks`: tensor ranks over which the matrix is sharded. If its rows are sharded, every rank
// has all of A. If its columns are sharded, every rank has all of B.
void attach(Parameter& matrix, int64_t rank, double scale, int64_t num_ranks,
            const std::function<bool(const std::string& module)>& is_wanted) {
  matrix.adapter.clear();
  matrix.adapter_slices.clear();
  Parameter a, b;
  int64_t rows = 0;
  for (const Parameter::Part& part : matrix.parts) {
    const std::string module = module_of(part);
    if (!is_wanted(module)) continue;
    const auto index = static_cast<int64_t>(matrix.adapter_slices.size());
    matrix.adapter_slices.push_back({part.begin, part.end});
    a.parts.push_back({file_name(module, "A"), index * rank, (index + 1) * rank});
    b.parts.push_back({file_name(module, "B"), rows, rows + part.end - part.begin});
    if (num_ranks > 1) {
      const bool by_columns = part.dimension == 1;
      Parameter::Part &piece = (by_columns ? a : b).parts.back(), &copied = (by_columns ? b : a).parts.back();
      piece.dimension = part.dimension;
      piece.first = part.first;
      piece.whole = part.whole;
      piece.copies = part.copies;
      copied.copies = num_ranks;
      piece.sums_copies = copied.sums_copies = true;
    }
    rows += part.end - part.begin;
  }
  if (matrix.adapter_slices.empty()) return;
  const auto options = matrix.value.options();
  a.value =
      at::empty({static_cast<int64_t>(matrix.adapter_slices.size()) * rank, matrix.value.size(1)}, options);
  b.value = at::empty({rows, rank}, options);
  matrix.adapter = {std::move(a), std::move(b)};
  matrix.adapter_scale = scale;
}

struct AdapterElements {
  int64_t all = 0, of_head = 0;
};

AdapterElements attach_to(Model& model, int64_t rank, double scale,
                          const std::function<bool(const std::string& module)>& is_wanted) {
  const int64_t num_ranks = model.tensor_ranks() ? model.tensor_ranks()->size() : 1;
  if (num_ranks > 1 && model.config().fused_projections)
    throw UserError(
        "lora: got tensor parallelism for a model with fused projections (qkv_proj); expected ranks that "
        "share the batch");
  for (Parameter* parameter : model.parameters()) parameter->main_grad.reset();
  AdapterElements elements;
  for (Parameter* matrix : model.adaptable_matrices()) {
    if (matrix->quantized())
      throw UserError("lora: got a model with quantized matrices; expected matrices in fp32, bf16 or fp64");
    attach(*matrix, rank, scale, num_ranks, is_wanted);
    for (const Parameter& parameter : matrix->adapter) {
      elements.all += parameter.value.numel();
      if (matrix == &model.head()) elements.of_head += parameter.value.numel();
    }
  }
  return elements;
}

// Attaches adapters to `model`, and to `all` in order to count the adapter elements of all layers. `all`: the
// model itself, or for a pipeline stage a model with the layers of all stages.
void attach_all(Model& model, Model& all, int64_t rank, double scale,
                const std::function<bool(const std::string& module)>& is_wanted) {
  AdapterElements elements = attach_to(model, rank, scale, is_wanted);
  if (&all != &model) elements = attach_to(all, rank, scale, is_wanted);
  model.set_adapter_elements(elements.all, elements.of_head);
}

// For a pipeline stage (pipeline_stage.h): returns a model with the layers of all stages, without memory.
// With tensor ranks, it has this rank's shards of these layers.
std::unique_ptr<Model> all_layers(const Model& model) {
  return make_model(model.unsharded_config(), model.dtype(), at::kMeta, {.tensor = model.tensor_ranks()});
}

std::set<std::string> modules_of(const std::vector<Parameter*>& matrices) {
  std::set<std::string> modules;
  for (const Parameter* matrix : matrices)
    for (const Parameter::Part& part : matrix->parts) modules.insert(module_of(part));
  return modules;
}

std::set<std::string> modules_of(Model& model) {
  return modules_of(model.adaptable_matrices());
}

// As in PEFT, a target names a module by its last parts.
bool is_named(const std::string& module, const std::string& target) {
  return module == target || module.ends_with("." + target);
}

void refuse_experts(Model& model, const std::string& target) {
  for (const std::string& module : modules_of(model.expert_matrices()))
    if (is_named(module, target))
      throw UserError(str("lora.targets: got ", quoted(target), ", which names matrices of experts (", module,
                          "), and experts have no adapters; expected all-linear (the matrices outside the "
                          "experts), or modules of attention such as q_proj"));
}

bool is_wanted(const std::string& module, const std::vector<LoraTarget>& targets) {
  return std::ranges::any_of(targets, [&](const LoraTarget& target) {
    return target.name == kAllLinear ? module != kHead : is_named(module, target.name);
  });
}

// `all`: the model itself, or for a pipeline stage all layers. Random numbers are generated for all layers,
// so that a stage's values equal the unsharded model's.
void initialise_adapter(Model& model, Model& all, uint64_t seed) {
  std::map<std::string, Parameter*> own;
  for (Parameter* matrix : model.adaptable_matrices())
    if (!matrix->adapter.empty()) own[matrix->adapter[0].parts[0].name] = matrix;
  auto generator = at::detail::createCPUGenerator(seed);
  for (Parameter* matrix : all.adaptable_matrices()) {
    if (matrix->adapter.empty()) continue;
    const Parameter& a = matrix->adapter[0];
    // If the columns are sharded, each rank takes its columns of the same random matrix.
    const Parameter::Part& part = a.parts[0];
    const int64_t columns = unsharded_sizes(a, part)[1];
    const double bound = 1 / std::sqrt(static_cast<double>(columns));
    const auto uniform =
        at::rand({a.value.size(0), columns}, generator, at::TensorOptions().dtype(at::kFloat));
    const auto found = own.find(part.name);
    if (found == own.end()) continue;
    const int64_t first = part.dimension == 1 ? part.first : 0;
    found->second->adapter[0].value.copy_(
        uniform.mul_(2 * bound).sub_(bound).narrow(1, first, a.value.size(1)));
    found->second->adapter[1].value.zero_();
  }
}

// ---- files ----

void check_entry(const SafetensorsFile& file, const std::string& name, int64_t rows, int64_t columns) {
  const auto found = file.entries().find(name);
  const std::vector<int64_t> expected = {rows, columns};
  if (found == file.entries().end())
    throw UserError(bough::str(file.path().string(), ": got no tensor ", quoted(name), "; expected shape ",
                               at::IntArrayRef(expected)));
  if (found->second.shape != expected || !at::isFloatingType(found->second.dtype))
    throw UserError(bough::str(file.path().string(), ": tensor ", quoted(name), ": got ",
                               c10::toString(found->second.dtype), " ", at::IntArrayRef(found->second.shape),
                               ", expected ", at::IntArrayRef(expected),
                               " of a floating-point type: the adapter belongs to another model"));
}

// PEFT stores the base's lm_head beside an adapter of the lm_head. Throws UserError unless the model has the
// same matrix, in the type of the model or of the file.
void check_base_of_head(const SafetensorsFile& file, const std::string& name, const Model& model) {
  if (!model.stage().is_last()) return;
  const Parameter& head = model.head();
  const std::vector<int64_t> sizes = unsharded_sizes(head, head.parts[0]);
  check_entry(file, name, sizes[0], sizes[1]);
  const at::Tensor stored = own_piece(file.tensor(name), head, head.parts[0]).to(head.value.device());
  if (!stored.to(head.value.scalar_type()).equal(head.value) &&
      !head.value.to(stored.scalar_type()).equal(stored))
    throw UserError(str(file.path().string(), ": ", quoted(name),
                        ": got a matrix that differs from the model's lm_head; expected an adapter of this "
                        "model. If its lm_head was trained, load PEFT's model and merge the adapter there"));
}

}  // namespace

void LoraSettings::check() const {
  if (dropout != 0)
    throw UserError(
        str("lora.dropout: got ", dropout,
            "; expected 0: dropout makes the trainer's log-probabilities differ from the engine's"));
  if (rank > 0 && targets.empty())
    throw UserError("lora.targets: got none; expected all-linear, or names of modules such as q_proj");
}

bool has_adapter(const Model& model) {
  return model.adapter_elements() > 0;
}

void add_adapter(Model& model, const LoraSettings& settings, uint64_t seed) {
  settings.check();
  if (!settings.path.empty()) {
    load_adapter(settings.path, model);
    return;
  }
  BOUGH_CHECK(settings.rank > 0, "lora.rank is 0");
  const std::unique_ptr<Model> of_all = model.ranks().stages ? all_layers(model) : nullptr;
  Model& all_of_them = of_all ? *of_all : model;
  const std::set<std::string> modules = modules_of(all_of_them);
  std::set<std::string> short_names;
  for (const std::string& module : modules) short_names.insert(last_part(module));
  for (const LoraTarget& target : settings.targets) {
    if (target.name == kAllLinear) continue;
    refuse_experts(all_of_them, target.name);
    const bool is_there = std::any_of(modules.begin(), modules.end(), [&](const std::string& module) {
      return is_named(module, target.name);
    });
    if (is_there) continue;
    std::string names;
    for (const std::string& name : short_names) names += (names.empty() ? "" : ", ") + name;
    throw UserError(str("lora.targets: got ", quoted(target.name),
                        ", which the model does not have; expected all-linear, or some of ", names));
  }
  const double scale = settings.alpha / static_cast<double>(settings.rank);
  attach_all(model, all_of_them, settings.rank, scale,
             [&](const std::string& module) { return is_wanted(module, settings.targets); });
  initialise_adapter(model, all_of_them, seed);
}

int64_t count_adapter_elements(const Model& model, const LoraSettings& settings) {
  const std::unique_ptr<Model> shared = model.share();
  int64_t elements = 0;
  for (const Parameter* matrix : shared->adaptable_matrices())
    for (const Parameter::Part& part : matrix->parts)
      if (is_wanted(module_of(part), settings.targets))
        elements += settings.rank * (matrix->value.size(1) + part.end - part.begin);
  return elements;
}

void set_adapted_modules(Model& model, const std::vector<std::string>& modules, int64_t rank, double scale) {
  const std::set<std::string> there = modules_of(model), wanted(modules.begin(), modules.end());
  for (const std::string& module : wanted)
    if (!there.contains(module))
      throw UserError(str("adapter: got the module ", quoted(module),
                          ", which the model does not have, or which is not a linear layer of its decoder"));
  attach_all(model, model, rank, scale, [&](const std::string& module) { return wanted.contains(module); });
}

void freeze_adapter(Model& model) {
  for (Parameter* matrix : model.adaptable_matrices()) {
    if (matrix->adapter.empty()) continue;
    BOUGH_CHECK(matrix->frozen_adapter.empty(), "the model already has a frozen adapter");
    Parameter& frozen = matrix->frozen_adapter.emplace_back();
    frozen.adapter = std::exchange(matrix->adapter, {});
    frozen.adapter_slices = std::exchange(matrix->adapter_slices, {});
    frozen.adapter_scale = std::exchange(matrix->adapter_scale, 1);
    for (Parameter& parameter : frozen.adapter) parameter.main_grad.reset();
  }
  model.set_adapter_elements(0, 0);
}

std::vector<Parameter*> frozen_adapters(Model& model) {
  std::vector<Parameter*> parameters;
  for (Parameter* matrix : model.adaptable_matrices())
    for (Parameter& frozen : matrix->frozen_adapter)
      for (Parameter& parameter : frozen.adapter) parameters.push_back(&parameter);
  return parameters;
}

std::unique_ptr<Model> without_last_adapter(const Model& model) {
  auto shared = model.share();
  for (Parameter* matrix : shared->adaptable_matrices()) {
    matrix->adapter.clear();
    matrix->adapter_slices.clear();
  }
  shared->set_adapter_elements(0, 0);
  return shared;
}

std::unique_ptr<Model> without_adapter(const Model& model) {
  auto shared = without_last_adapter(model);
  for (Parameter* matrix : shared->adaptable_matrices()) matrix->frozen_adapter.clear();
  return shared;
}

void merge_adapter(Model& model) {
  const at::NoGradGuard no_grad;
  // The embedding has no adapter, so a tied lm_head gets values of its own.
  if (const Parameter& head = model.head(); !head.adapter.empty() || !head.frozen_adapter.empty())
    model.untie_head();
  for (Parameter* matrix : model.adaptable_matrices()) {
    const auto type = accumulator_type(matrix->value.scalar_type());
    const auto merge = [&](const Parameter& adapted) {
      BOUGH_CHECK(!matrix->quantized(), "cannot merge an adapter into a quantized matrix");
      const Parameter &a = adapted.adapter[0], &b = adapted.adapter[1];
      for (size_t i = 0; i < adapted.adapter_slices.size(); ++i) {
        const auto& slice = adapted.adapter_slices[i];
        auto rows = matrix->value.narrow(0, slice.begin, slice.end - slice.begin);
        const auto product = at::mm(b.part_value(b.parts[i]).to(type), a.part_value(a.parts[i]).to(type));
        rows.copy_(rows.to(type) + product * adapted.adapter_scale);
      }
    };
    for (const Parameter& frozen : matrix->frozen_adapter) merge(frozen);
    if (!matrix->adapter.empty()) merge(*matrix);
    matrix->adapter.clear();
    matrix->adapter_slices.clear();
    matrix->frozen_adapter.clear();
  }
  model.set_adapter_elements(0, 0);
}

std::vector<std::pair<std::string, at::Tensor>> adapter_tensors(Model& model) {
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  for (Parameter* matrix : model.adaptable_matrices())
    for (const Parameter& parameter : matrix->adapter)
      for (const Parameter::Part& part : parameter.parts)
        tensors.emplace_back(part.name, parameter.part_value(part));
  return tensors;
}

void save_adapter(const fs::path& directory, Model& model, const std::string& base) {
  std::set<std::string> modules, targets;
  int64_t rank = 0;
  double scale = 1;
  for (Parameter* matrix : model.adaptable_matrices()) {
    if (matrix->adapter.empty()) continue;
    rank = matrix->adapter[1].value.size(1);
    scale = matrix->adapter_scale;
    for (const Parameter::Part& part : matrix->adapter[0].parts) {
      const size_t begin = std::string_view("base_model.model.").size();
      modules.insert(part.name.substr(begin, part.name.rfind(".lora_A") - begin));
    }
  }
  BOUGH_CHECK(rank > 0, "the model has no adapter");
  for (const std::string& module : modules) targets.insert(last_part(module));
  // If only some layers have an adapter on the module, every module is named in full.
  for (const std::string& module : modules_of(model))
    if (targets.contains(last_part(module)) && !modules.contains(module)) {
      targets = modules;
      break;
    }
  make_directories(directory);
  AtomicFile weights(directory / kWeightsFile), text(directory / kConfigFile);
  write_safetensors(weights, adapter_tensors(model));
  text.write(dump_pretty(write_adapter_config({.rank = rank, .scale = scale}, targets, base)));
  weights.commit();
  text.commit();
}

void load_adapter(const fs::path& directory, Model& model) {
  const at::NoGradGuard no_grad;
  const AdapterConfig config = read_adapter_config(directory / kConfigFile);
  const SafetensorsFile file(directory / kWeightsFile);
  // The tensors say which modules have an adapter, because target_modules may be a pattern.
  std::map<std::string, std::vector<int64_t>> sizes;
  const std::unique_ptr<Model> of_all = model.ranks().stages ? all_layers(model) : nullptr;
  Model& all_of_them = of_all ? *of_all : model;
  for (Parameter* matrix : all_of_them.adaptable_matrices())
    for (const Parameter::Part& part : matrix->parts) {
      sizes[module_of(part)] = unsharded_sizes(*matrix, part);
    }
  std::set<std::string> wanted;
  std::set<std::string> names;
  for (const auto& [module, shape] : sizes) {
    const std::string a = file_name(module, "A"), b = file_name(module, "B");
    if (!file.entries().contains(a) && !file.entries().contains(b)) continue;
    check_entry(file, a, config.rank, shape[1]);
    check_entry(file, b, shape[0], config.rank);
    wanted.insert(module);
    names.insert({a, b});
  }
  const std::string base_of_head = str("base_model.model.", kHead, ".base_layer.weight");
  if (wanted.contains(std::string(kHead)) && file.entries().contains(base_of_head)) {
    check_base_of_head(file, base_of_head, model);
    names.insert(base_of_head);
  }
  for (const auto& [name, entry] : file.entries())
    if (!names.contains(name))
      throw UserError(
          str(file.path().string(), ": got tensor ", quoted(name),
              "; expected only adapters of linear modules in this model's layers (experts have none), or of "
              "lm_head"));
  if (wanted.empty())
    throw UserError(str(file.path().string(), ": got no tensors; expected adapters of this model's modules"));
  if (!has_adapter(model)) {
    const auto is_wanted = [&](const std::string& module) { return wanted.contains(module); };
    attach_all(model, all_of_them, config.rank, config.scale, is_wanted);
  } else {
    size_t num_present = 0;
    bool is_same = true;
    for (const Parameter* matrix : model.adaptable_matrices())
      for (const Parameter& parameter : matrix->adapter)
        for (const Parameter::Part& part : parameter.parts) {
          ++num_present;
          is_same = is_same && names.contains(part.name) &&
                    file.entries().at(part.name).shape == unsharded_sizes(parameter, part);
        }
    const std::set<std::string> own = modules_of(model);
    const auto num_own =
        std::ranges::count_if(wanted, [&](const auto& module) { return own.contains(module); });
    is_same = is_same && num_present == 2 * static_cast<size_t>(num_own);
    for (Parameter* matrix : model.adaptable_matrices())
      is_same = is_same && (matrix->adapter.empty() ||
                            std::abs(matrix->adapter_scale - config.scale) <= 1e-9 * std::abs(config.scale));
    if (!is_same)
      throw UserError(str(directory.string(),
                          ": got an adapter with other modules, rank or alpha than the model's; expected the "
                          "run's adapter: resume with the settings that the run was started with"));
  }
  for (Parameter* matrix : model.adaptable_matrices())
    for (Parameter& parameter : matrix->adapter)
      for (const Parameter::Part& part : parameter.parts)
        parameter.part_value(part).copy_(own_piece(file.tensor(part.name), parameter, part));
}

}  // namespace bough
