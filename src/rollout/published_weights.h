// Weights of engines in processes of their own: rank 0's trainer publishes them while the engines generate.
//
//   trained model ──copy──▶ spare buffer ═══ buckets ═══▶ spare buffer ── mapped ──▶ generating model
//    publish(),              rank 0's; engines           one on every other        MappedWeights::take(),
//    trainer's thread        of its host map             host; engines of          in the engine's process,
//                            it, too                     that host map it          between two passes
//
// Engines of rank 0's host have what it copied without another copy. To other hosts buckets leave while the
// rest is still being copied. Generation goes on until all have arrived on every host: only then is there
// something to take on rank 0, so that engines exchange pointers and never wait for bytes. A bucket's
// checksum comes after it; what differs ends the run. Of a publication, on a communicator that nothing else
// uses:
//
//   header      version, and the version that rank 0 took last: an engine rank answers (a barrier) when its
//               engine has that one, so that nobody uses the spare buffer; only then rank 0 copies
//   buckets     kBucketBytes each, in the order of parameters, and a checksum of each: between hosts
//   barrier     all of it is there
//
// Each host has two buffers, in the host's memory, whatever the device: what the engines have, so that
// another process can go on with it, and the spare one. On a CPU they are the engines' weights, of all
// engines of the host; other engines copy what they take. Where adapters are trained these are all that is
// sent.
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

// Large enough that what a collective costs by itself is little beside it, small enough that a bucket is
// checked while the next one travels.
inline constexpr int64_t kBucketBytes = int64_t{32} << 20;

// Tensors one after the other in a buffer of the host's, each at a multiple of 64 bytes.
struct FlatTensors {
  at::Tensor bytes;               // [num_bytes]
  std::vector<at::Tensor> views;  // of the shapes and types they were laid out for
  int64_t end_of(size_t view) const;
};
int64_t num_flat_bytes(const std::vector<Parameter*>& parameters);
// In `bytes` [num_flat_bytes()].
FlatTensors lay_out(const std::vector<Parameter*>& parameters, const at::Tensor& bytes);

// Bytes that this process and another one of its user's see: mapped memory without a file.
class SharedBytes {
 public:
  explicit SharedBytes(int64_t bytes);                  // zeros; IoError where there is no memory
  SharedBytes(const std::string& path, int64_t bytes);  // another process's, to read
  ~SharedBytes();
  SharedBytes(const SharedBytes&) = delete;
  SharedBytes& operator=(const SharedBytes&) = delete;

  at::Tensor bytes() const { return bytes_; }  // [bytes], while this object lives
  std::string path() const;                    // by which another process finds it, while this one lives

 private:
  void map(int64_t bytes, int protection);

  int descriptor_ = -1;
  void* begin_ = nullptr;
  at::Tensor bytes_;
};

// What a host has of publications.
struct HostBuffers {
  explicit HostBuffers(int64_t bytes) : first(bytes), second(bytes) {}
  const SharedBytes& operator[](size_t buffer) const { return buffer == 0 ? first : second; }
  std::vector<std::string> paths() const { return {first.path(), second.path()}; }

  const SharedBytes first, second;
};

// What processes have in common that see each other's memory: kernel, namespace of processes, user.
std::string host_identity();

// Rank 0 and the engine ranks, and of each host the first of them.
struct PublicationRanks {
  // Takes the group. A call of all its ranks.
  explicit PublicationRanks(std::unique_ptr<Communicator> group, const std::string& host = host_identity());
  bool leads() const { return leader == all->rank(); }

  const std::unique_ptr<Communicator> all;
  int64_t leader = 0;                     // of this rank's host, in `all`
  std::unique_ptr<Communicator> leaders;  // who does not lead has no use for it
};

class PublishedWeights final : public WeightChannel {
 public:
  // Rank 0's. Model and ranks must outlive it. waits: publish() returns when every engine rank has the
  // weights, for a trainer that has nothing to do meanwhile.
  PublishedWeights(const Model& trained, PublicationRanks& ranks, bool waits,
                   Changing changing = Changing::kTrained);
  ~PublishedWeights() override;  // without end() it gives up

  // Waits for the publication before this one, if it is still on its way, and for engines that are just
  // taking it.
  void publish(int32_t version) override;
  std::optional<WeightUpdate> take() override;  // names no model: the engine ranks have it
  bool has_new() const override;

  void end();      // the other ranks' receive() returns
  void give_up();  // what is on its way, and who waits for it: publish() throws IoError

  // Of publications that have arrived since the last call; seconds from publish() on.
  struct Report {
    int64_t publications = 0;
    double bytes = 0, seconds = 0;
  };
  Report take_report();

 private:
  void run();
  void send(const at::Tensor& bytes);
  void check() const REQUIRES(mutex_);  // rethrows what ended the thread

  const bool waits_;
  PublicationRanks& ranks_;
  const std::unique_ptr<Model> trained_view_;
  const std::vector<Parameter*> trained_;
  const HostBuffers buffers_;
  std::atomic<int64_t> copied_ = 0;  // bytes of the publication that are in its buffer
  std::atomic<bool> gives_up_ = false;

  mutable Mutex mutex_;
  CondVar changed_;
  int32_t sending_ GUARDED_BY(mutex_) = -1;
  int32_t arrived_ GUARDED_BY(mutex_) = -1;  // and not taken
  int32_t taken_ GUARDED_BY(mutex_) = -1;
  size_t spare_ GUARDED_BY(mutex_) = 0;       // the buffer that does not have the version taken last
  bool may_copy_ GUARDED_BY(mutex_) = false;  // into the spare buffer
  std::chrono::steady_clock::time_point begin_ GUARDED_BY(mutex_);
  Report report_ GUARDED_BY(mutex_);
  bool is_ending_ GUARDED_BY(mutex_) = false;
  std::exception_ptr failure_ GUARDED_BY(mutex_);
  std::thread thread_;  // last: it uses the others
};

// A publication that is there, and where.
struct BufferedVersion {
  int32_t version = -1;  // -1: there is none
  size_t buffer = 1;
};

class ReceivedWeights {
 public:
  // An engine rank's, of so many bytes a publication (MappedWeights::num_bytes()). The ranks must outlive it.
  ReceivedWeights(PublicationRanks& ranks, int64_t bytes);

  void receive();                             // on a thread of its own, until rank 0 ends
  BufferedVersion arrived() const;            // and not held
  BufferedVersion held() const;               // what the engine has
  void hold(const BufferedVersion& version);  // the engine has it, and no longer what it had before
  // By which the engine's process finds it, where there is one.
  std::string path(const BufferedVersion& version) const;

 private:
  void receive_buckets(int32_t version, const at::Tensor& bytes);

  PublicationRanks& ranks_;
  const std::unique_ptr<HostBuffers> buffers_;  // null: the host's first rank has them

  mutable Mutex mutex_;
  std::vector<std::string> paths_ GUARDED_BY(mutex_);
  BufferedVersion arrived_ GUARDED_BY(mutex_);
  BufferedVersion held_ GUARDED_BY(mutex_);
};

// The process of the engine has the publications that its rank received.
class MappedWeights {
 public:
  // in_place: the model's tensors keep their addresses (CopiedWeights says why). The model must outlive it.
  MappedWeights(Model& generating, bool in_place, Changing changing = Changing::kTrained);

  int64_t num_bytes() const;  // of a publication
  // What stands at ReceivedWeights::path() from now on. IoError where that cannot be mapped.
  WeightUpdate take(int32_t version, const std::string& path);

 private:
  Model& generating_;
  const bool in_place_;
  const std::vector<Parameter*> parameters_;
  std::map<std::string, std::unique_ptr<SharedBytes>> buffers_;  // by path
};

}  // namespace bough
