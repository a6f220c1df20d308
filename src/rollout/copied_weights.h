// Weights for an engine that generates while its model is trained. The engine has a model of its own, and a
// snapshot lies between the two.
//
//   trained model ──publish(): copy──▶ snapshot ──take(): swap or copy──▶ generating model
//      trainer's thread                  mutex_                engine's thread
//
// publish() holds the lock while it copies. take() only tries the lock, so the engine never waits: a
// publication that is being written is taken one pass later. publish() waits at most while take() swaps
// pointers or, in place, copies tensors. publish() computes checksums of the trained weights. take() computes
// them of the generating weights and compares. A checksum takes about as long as one read of the weights.
//
// Memory, besides the trained model: on a CPU the snapshot and the generating model, each with a copy of the
// changing parameters. On a GPU the snapshot is in pinned host memory, so only the generating model takes
// memory of the device.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

#include "base/mutex.h"
#include "engine/engine.h"
#include "kernels/common/host_snapshot.h"
#include "models/model.h"

namespace bough {

// The parameters that change between two publications. kTrained: Model::trained_parameters(), which are only
// the adapters if the model has adapters. kAll: all parameters, for a base model that is trained beside its
// adapters. Both: also frozen adapters, which another model trains.
enum class Changing { kTrained, kAll };
std::vector<Parameter*> changing_parameters(Model& model, Changing changing);

// Makes a model with the same weights. The changing parameters are copied. All other parameters use the same
// tensors as `model`.
std::unique_ptr<Model> copy_of(const Model& model, Changing changing = Changing::kTrained);

// Checksum of the tensor's bits. Different bits have the same checksum only by rare chance.
uint64_t checksum_of(const at::Tensor& tensor);

class CopiedWeights final : public WeightChannel {
 public:
  // Both models must outlive this object. `generating` is copy_of(trained, changing). in_place: take() copies
  // into the generating model's tensors and does not replace them, because a quantized copy or a CUDA graph
  // has kept their addresses. Must be true on a GPU.
  CopiedWeights(const Model& trained, Model& generating, bool in_place,
                Changing changing = Changing::kTrained);
  // With the snapshot in memory from `allocate`, as on a GPU. For tests.
  CopiedWeights(const Model& trained, Model& generating, Changing changing,
                const std::function<at::Tensor(int64_t)>& allocate, int64_t piece_bytes);

  void publish(int32_t version) override;
  // Throws InternalError if the engine's weights are not those that were published.
  std::optional<WeightUpdate> take() override;
  bool has_new() const override { return has_new_.load(); }

 private:
  void collect(Model& generating, Changing changing);

  const Model& generating_;
  const bool in_place_;
  std::vector<const Parameter*> trained_;
  std::unique_ptr<Model> trained_view_;  // owns the parameters that trained_ points to
  std::vector<Parameter*> parameters_;   // of the generating model, in the same order
  Mutex mutex_;
  std::vector<at::Tensor> snapshot_ GUARDED_BY(mutex_);       // empty if the snapshot is in on_host_
  std::unique_ptr<PinnedPieces> on_host_ GUARDED_BY(mutex_);  // parameters one after another
  std::vector<uint64_t> checksums_ GUARDED_BY(mutex_);        // of the tensors that snapshot_ was copied from
  int32_t version_ GUARDED_BY(mutex_) = -1;
  std::atomic<bool> has_new_ = false;
};

}  // namespace bough
