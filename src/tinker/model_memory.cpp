#include "tinker/model_memory.h"

#include <algorithm>

#include "base/error.h"
#include "base/format.h"
#include "base/memory.h"
#include "models/lora.h"
#include "tinker/samplers.h"
#include "train/pass_memory.h"

namespace bough {

namespace {

constexpr int64_t kMostSamplerBytes = int64_t{4} << 30;  // of an engine on a CPU, as without a service

std::string text(int64_t bytes) {
  return format_bytes(static_cast<double>(bytes));
}

int64_t all_elements(const Model& base) {
  int64_t elements = 0;
  const std::unique_ptr<Model> shared = base.share();
  for (const Parameter* parameter : shared->parameters()) elements += parameter->value.numel();
  return elements;
}

}  // namespace

ModelNeed need_of(const Model& base, const LoraSettings& adapter) {
  const int64_t elements = adapter.enabled() ? count_adapter_elements(base, adapter) : all_elements(base);
  const auto element = static_cast<int64_t>(c10::elementSize(base.dtype()));
  const auto accumulator = static_cast<int64_t>(c10::elementSize(accumulator_type(base.dtype())));
  return {.weights = elements * element,
          .gradients = elements * accumulator,
          .optimizer = elements * accumulator * (element < accumulator ? 3 : 2),
          .sampler = adapter.enabled() ? 0 : elements * element};
}

ServiceMemory plan_memory(const TrainingServiceSettings& settings, const c10::Device& device, int64_t free) {
  const auto share = static_cast<int64_t>(kShareOfFreeMemory * static_cast<double>(free));
  const auto given = [](const Bytes& bytes, int64_t automatic) {
    return bytes.is_auto() ? automatic : bytes.count;
  };
  const int64_t sampler = share / 4 / static_cast<int64_t>(Samplers::kMostEngines);
  return {.free = free,
          .models = given(settings.model_memory, share / 4),
          .passes = given(settings.memory, share / 2),
          .sampler = given(settings.rollout.kv_memory,
                           device.is_cpu() ? std::min(kMostSamplerBytes, sampler) : sampler),
          .on_host = device.is_cpu()};
}

int64_t parking_space(const std::filesystem::path& folder, bool on_host) {
  if (on_host) return static_cast<int64_t>(std::filesystem::space(folder).available);
  return static_cast<int64_t>(kShareOfFreeMemory * static_cast<double>(host_memory().available));
}

std::string why_no_memory(const ModelNeed& need, const LoraSettings& adapter, const ServiceMemory& memory,
                          const ModelsHeld& held) {
  const std::string needs =
      str("the model needs ", text(need.bytes()), " (", adapter.enabled() ? "adapter " : "weights ",
          text(need.weights), ", gradients ", text(need.gradients), ", optimizer ", text(need.optimizer),
          need.sampler > 0 ? str(", a sampler's weights ", text(need.sampler)) : "", ")");
  if (need.bytes() > memory.models) {
    std::string remedy = "train an adapter instead, or raise model_memory";
    if (adapter.enabled()) {
      const int64_t of_rank = need.bytes() / adapter.rank;
      remedy =
          str(memory.models >= of_rank ? str("a rank of at most ", memory.models / of_rank, " fits; ") : "",
              "fewer modules (train_unembed, train_mlp, train_attn) or a larger model_memory help, too");
    }
    return str(needs, ", but models in training have ", text(memory.models), " (model_memory; ",
               text(memory.free), " were free when the service started, of which ", text(memory.passes),
               " are for training passes and ", Samplers::kMostEngines, " times ", text(memory.sampler),
               " for samplers): ", remedy);
  }
  const int64_t to_park = held.bytes + need.bytes() - memory.models;
  if (to_park <= held.parking) return "";
  return str(needs, ", and ", held.count, " others hold ", text(held.bytes), ", but memory has ",
             text(memory.models), " (model_memory) and ", held.place, " has ", text(held.parking),
             " for models that wait: finish sessions, or use a smaller rank or fewer modules");
}

}  // namespace bough
