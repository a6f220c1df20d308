// Publication of weights to engines in other processes. Rank 0's trainer publishes while the engines
// generate.
//
//   trained model ──copy──▶ spare buffer ═══ buckets ═══▶ spare buffer ── mapped ──▶ generating model
//    publish(),              of rank 0's host;           one on each other        MappedWeights::take(),
//    trainer's thread        its engines map             host; its engines        in the engine's process,
//                            it                          map it                   between two passes
//
// Engines on rank 0's host map the buffer that publish() fills. Buckets leave for the other hosts while
// publish() still copies later ones. Generation continues until all buckets have arrived on every host. Only
// then does take() on rank 0 return the publication. So engines only exchange pointers, and never wait for a
// transfer. Each bucket has a checksum, and a mismatch throws InternalError. The messages of one publication,
// on a communicator that nothing else uses:
//
//   header      the version, and the version that rank 0 took last. An engine rank enters a barrier when its
//               engine has the version taken last. Then nobody uses the spare buffer. Rank 0 copies into it
//   buckets     kBucketBytes each, in the order of parameters, then all checksums. Only between hosts
//   barrier     every host has all bytes
//
// Each host has two buffers in host memory, whatever the device. One has the version that the host's engines
// have, so that a restarted engine process can load it. The other is the spare buffer. On a CPU the buffers
// are the weights of all engines of the host. Engines on a GPU copy the weights there. If only adapters are
// trained, only adapters are sent.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "comm/communicator.h"
#include "engine/engine.h"
#include "models/model.h"
#include "rollout/copied_weights.h"

namespace bough {

// Large enough that the fixed cost of a collective is small beside the transfer. Small enough that a bucket's
// checksum is computed while the next bucket travels.
inline constexpr int64_t kBucketBytes = int64_t{32} << 20;

// Tensors one after another in a buffer in host memory, each at a multiple of 64 bytes.
struct FlatTensors {
  at::Tensor bytes;                   // [num_bytes]
  std::vector<at::Tensor> views;      // with the shapes and dtypes of the parameters
  int64_t end_of(size_t view) const;  // offset in bytes of the end of the view
};
int64_t num_flat_bytes(const std::vector<Parameter*>& parameters);
// Returns views of `bytes` [num_flat_bytes(parameters)], one per parameter. Copies nothing.
FlatTensors lay_out(const std::vector<Parameter*>& parameters, const at::Tensor& bytes);

// Memory that another process of the same user can map, without a file on disk. The constructors throw
// IoError.
class SharedBytes {
 public:
  explicit SharedBytes(int64_t bytes);                  // new memory, zeros
  SharedBytes(const std::string& path, int64_t bytes);  // maps another process's memory, read only
  ~SharedBytes();
  SharedBytes(const SharedBytes&) = delete;
  SharedBytes& operator=(const SharedBytes&) = delete;

  at::Tensor bytes() const { return bytes_; }  // [bytes], valid while this object lives
  std::string path() const;                    // another process can open it while this object lives

 private:
  void map(int64_t bytes, int protection);

  int descriptor_ = -1;
  void* begin_ = nullptr;
  at::Tensor bytes_;
};

// The two publication buffers of a host.
struct HostBuffers {
  explicit HostBuffers(int64_t bytes) : first(bytes), second(bytes) {}
  const SharedBytes& operator[](size_t buffer) const { return buffer == 0 ? first : second; }
  std::vector<std::string> paths() const { return {first.path(), second.path()}; }

  const SharedBytes first, second;
};

// Returns a text that is equal in processes that can map each other's memory: same kernel, PID namespace,
// user.
std::string host_identity();

// Rank 0 and the engine ranks. The first rank of each host is its leader, which exchanges bytes with other
// hosts.
struct PublicationRanks {
  // `group`: the communicator of these ranks. `host`: equal on ranks of one host. Collective call of all
  // ranks.
  explicit PublicationRanks(std::unique_ptr<Communicator> group, const std::string& host = host_identity());
  bool is_leader() const { return leader == all->rank(); }

  const std::unique_ptr<Communicator> all;
  int64_t leader = 0;                     // rank in `all` of this host's leader
  std::unique_ptr<Communicator> leaders;  // of all hosts' leaders; other ranks do not use it
};

class PublishedWeights final : public WeightChannel {
 public:
  // Rank 0's side. Model and ranks must outlive this object. waits: publish() returns only when the weights
  // have arrived at every engine rank, for a trainer that has nothing else to do.
  PublishedWeights(const Model& trained, PublicationRanks& ranks, bool waits,
                   Changing changing = Changing::kTrained);
  ~PublishedWeights() override;  // calls give_up() if end() was not called

  // Waits until the previous publication has arrived and the engines have the version that was taken last.
  // Then copies the weights. If the sending thread ended with an exception, rethrows it.
  void publish(int32_t version) override;
  std::optional<WeightUpdate> take() override;  // with `model` nullptr: engine ranks have the models
  bool has_new() const override;

  void end();      // finishes the current publication; the other ranks' receive() returns
  void give_up();  // aborts the current publication: publish() throws IoError

  // Sums over the publications that have arrived since the last call. Seconds count from the start of
  // publish() to the arrival.
  struct Report {
    int64_t publications = 0;
    double bytes = 0, seconds = 0;
  };
  Report take_report();

 private:
  void run();
  void send(const at::Tensor& bytes);
  void check() const REQUIRES(mutex_);  // rethrows the exception that ended the thread

  const bool waits_;
  PublicationRanks& ranks_;
  const std::unique_ptr<Model> trained_view_;
  const std::vector<Parameter*> trained_;
  const HostBuffers buffers_;
  std::atomic<int64_t> copied_ = 0;  // bytes of the current publication that are in its buffer
  std::atomic<bool> gives_up_ = false;

  mutable Mutex mutex_;
  CondVar changed_;
  int32_t sending_ GUARDED_BY(mutex_) = -1;
  int32_t arrived_ GUARDED_BY(mutex_) = -1;  // arrived and not taken; -1: none
  int32_t taken_ GUARDED_BY(mutex_) = -1;
  size_t spare_ GUARDED_BY(mutex_) = 0;       // the buffer without the version that was taken last
  bool may_copy_ GUARDED_BY(mutex_) = false;  // publish() may copy into the spare buffer
  std::chrono::steady_clock::time_point begin_ GUARDED_BY(mutex_);
  Report report_ GUARDED_BY(mutex_);
  bool is_ending_ GUARDED_BY(mutex_) = false;
  std::exception_ptr failure_ GUARDED_BY(mutex_);
  std::thread thread_;  // last member, because it uses the other members
};

// A version that has arrived, and the index of its buffer.
struct BufferedVersion {
  int32_t version = -1;  // -1: none
  size_t buffer = 1;
};

class ReceivedWeights {
 public:
  // An engine rank's side. bytes: size of a publication (MappedWeights::num_bytes()). `ranks` must outlive
  // this object.
  ReceivedWeights(PublicationRanks& ranks, int64_t bytes);

  void receive();                             // runs on its own thread until rank 0 calls end()
  BufferedVersion arrived() const;            // the version that arrived last and is not held
  BufferedVersion held() const;               // the version that the engine has
  void hold(const BufferedVersion& version);  // the engine has it now, and no longer its previous version
  // The path at which the engine's process maps the version's buffer.
  std::string path(const BufferedVersion& version) const;

 private:
  void receive_buckets(int32_t version, const at::Tensor& bytes);

  PublicationRanks& ranks_;
  const std::unique_ptr<HostBuffers> buffers_;  // nullptr if the rank is not its host's leader

  mutable Mutex mutex_;
  std::vector<std::string> paths_ GUARDED_BY(mutex_);
  BufferedVersion arrived_ GUARDED_BY(mutex_);
  BufferedVersion held_ GUARDED_BY(mutex_);
};

// In an engine's process: takes the publications that ReceivedWeights of its rank has received.
class MappedWeights {
 public:
  // in_place: the model's tensors keep their addresses (see CopiedWeights). The model must outlive this
  // object.
  MappedWeights(Model& generating, bool in_place, Changing changing = Changing::kTrained);

  int64_t num_bytes() const;  // of a publication
  // Makes the bytes at ReceivedWeights::path() the model's weights. Throws IoError if they cannot be mapped.
  WeightUpdate take(int32_t version, const std::string& path);

 private:
  Model& generating_;
  const bool in_place_;
  const std::vector<Parameter*> parameters_;
  std::map<std::string, std::unique_ptr<SharedBytes>> buffers_;  // by path
};

}  // namespace bough
