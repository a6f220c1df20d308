// Weights of engines in processes of their own: rank 0's trainer publishes them over a communicator that
// nothing else uses, while the engines generate.
//
//   trained model ──copy──▶ snapshot ══ buckets ══▶ spare buffer ──exchanged──▶ generating model
//    publish(),              a thread of rank 0's    receive(), a thread         take(), between
//    trainer's thread                                of each engine rank         two passes
//
// Buckets leave while the rest is still being copied, and generation goes on until all have arrived on every
// rank: only then is there something to take on rank 0, so that engine ranks exchange pointers and never wait
// for bytes. A bucket's checksum comes after it; what differs ends the run. Of a publication:
//
//   header      version, and the version that rank 0 took last: an engine rank lets the spare buffer alone
//               until it has exchanged that one
//   buckets     kBucketBytes each, in the order of parameters
//   checksums   one a bucket; then a barrier
//
// Memory beside the model: a copy of what changes on rank 0, a spare one on each engine rank; in the host's
// memory, whatever the device. Where adapters are trained these are all that is sent.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "dist/communicator.h"
#include "models/model.h"
#include "rollout/copied_weights.h"
#include "rollout/engine.h"

namespace bough {

// Large enough that what a collective costs by itself is little beside it, small enough that a bucket is
// checked while the next one travels.
inline constexpr int64_t kBucketBytes = int64_t{32} << 20;

// Tensors one after the other in a buffer of the host's, each at a multiple of 64 bytes.
struct FlatTensors {
  at::Tensor bytes;               // [num_bytes]
  std::vector<at::Tensor> views;  // of the shapes and types they were laid out for
  int64_t end_of(size_t view) const;
};
FlatTensors lay_out(const std::vector<Parameter*>& parameters);

class PublishedWeights final : public WeightChannel {
 public:
  // Rank 0's. Model and group must outlive it. waits: publish() returns when every engine rank has the
  // weights, for a trainer that has nothing to do meanwhile.
  PublishedWeights(const Model& trained, Communicator& engines, bool waits,
                   Changing changing = Changing::kTrained);
  ~PublishedWeights() override;  // without end() what is on its way is given up

  // Waits for the publication before this one, if it is still on its way.
  void publish(int32_t version) override;
  std::optional<WeightUpdate> take() override;  // names no model: the engine ranks have it
  bool has_new() const override;

  void end();  // the other ranks' receive() returns

  // Of publications that have arrived since the last call; seconds from publish() on.
  struct Report {
    int64_t publications = 0;
    double bytes = 0, seconds = 0;
  };
  Report take_report();

 private:
  void run();
  void send(int32_t version, int32_t taken);
  void check() const;  // rethrows what ended the thread; mutex_ held

  const bool waits_;
  Communicator& engines_;
  std::unique_ptr<Model> trained_view_;
  std::vector<Parameter*> trained_;
  const FlatTensors snapshot_;
  std::atomic<int64_t> copied_ = 0;  // bytes of the snapshot that are there
  std::atomic<bool> gives_up_ = false;

  mutable std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  int32_t sending_ = -1, arrived_ = -1, taken_ = -1;  // arrived_: and not taken
  std::chrono::steady_clock::time_point begin_;
  Report report_;
  bool is_ending_ = false;
  std::exception_ptr failure_;
  std::thread thread_;  // last: it uses the others
};

class ReceivedWeights final : public WeightChannel {
 public:
  // An engine rank's. in_place: the model's tensors keep their addresses (CopiedWeights says why).
  ReceivedWeights(Model& generating, Communicator& publisher, bool in_place,
                  Changing changing = Changing::kTrained);

  void receive();                          // on a thread of its own, until rank 0 ends
  void publish(int32_t version) override;  // is rank 0's
  std::optional<WeightUpdate> take() override;
  bool has_new() const override;

 private:
  Model& generating_;
  Communicator& publisher_;
  const bool in_place_;
  const std::vector<Parameter*> parameters_;
  FlatTensors spare_, held_tensors_;  // what is received into; what the model has, empty where in_place

  mutable std::mutex mutex_;  // of what follows
  int32_t arrived_ = -1, held_ = -1;
};

}  // namespace bough
