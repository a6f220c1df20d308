// Weights of an engine that generates while its model is being trained: a model of its own, and a snapshot
// between the two.
//
//   trained model ──publish(): copy──▶ snapshot ──take(): exchanged──▶ generating model
//      trainer's thread                  mutex_        engine's thread
//
// publish() holds the lock while it copies; take() only tries it, so that the engine never waits: a
// publication that is being written is taken one pass later. The trainer waits at most for an exchange of
// pointers (where the tensors must stay in place, for a copy on the device). Memory: two more copies of the
// weights. publish() takes a checksum of what it copied from, take() one of what the engine then has: about
// what reading the weights once takes, as a decoding pass does.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "base/mutex.h"
#include "engine/engine.h"
#include "models/model.h"

namespace bough {

// What changes between two publications: what is trained of the model (adapters, where there are any), or,
// where what stands under its adapters is trained as another model, all of it.
enum class Changing { kTrained, kAll };
std::vector<Parameter*> changing_parameters(Model& model, Changing changing);

// Makes a model with the same weights, what changes of them in tensors of its own.
std::unique_ptr<Model> copy_of(const Model& model, Changing changing = Changing::kTrained);

// Of the tensor's elements in their order: equal for equal bits, another one for almost all others.
uint64_t checksum_of(const at::Tensor& tensor);

class CopiedWeights final : public WeightChannel {
 public:
  // Both models must outlive this object; `generating` is copy_of(trained, changing). in_place: the
  // generating model's tensors keep their addresses (a quantized copy or a CUDA graph reads them there).
  CopiedWeights(const Model& trained, Model& generating, bool in_place,
                Changing changing = Changing::kTrained);

  void publish(int32_t version) override;
  // InternalError where the engine's weights are not those that were published.
  std::optional<WeightUpdate> take() override;
  bool has_new() const override { return has_new_.load(); }

 private:
  const Model& generating_;
  const bool in_place_;
  std::vector<const Parameter*> trained_;
  std::unique_ptr<Model> trained_view_;  // has the parameters that trained_ points to
  std::vector<Parameter*> parameters_;   // of the generating model, in the same order
  Mutex mutex_;
  std::vector<at::Tensor> snapshot_ GUARDED_BY(mutex_);
  std::vector<uint64_t> checksums_ GUARDED_BY(mutex_);  // of the tensors that snapshot_ was copied from
  int32_t version_ GUARDED_BY(mutex_) = -1;
  std::atomic<bool> has_new_ = false;
};

}  // namespace bough
