// Communication between the ranks of a process group, here called "group". Ranks are processes, or threads of
// one process. All ranks make the same collective calls in the same order, as in MPI. Buffers are plain
// memory; this interface does not use torch.
//
// Threads: a communicator belongs to one thread. A collective is begun, then polled until it is done.
// Errors: a rank that died or hangs would block the other ranks forever. A call that waits therefore throws
// IoError after a deadline. The message names the collective and the rank that waited. After that, no rank
// can use the group.
// Sums: the order of the terms does not depend on timing, and every rank gets the same bits.
//
// A message is a kSend of one rank and a kReceive of another rank. Messages from rank a to rank b arrive in
// the order in which they were sent. A message may start only after earlier sends and receives of the same
// rank in the same group. It never waits for messages of another group.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace bough {

enum class Element { kFloat, kDouble, kInt64, kByte };
int64_t size_of(Element element);  // bytes
// into[i] = the sum of parts[p][i] over all p, for i < count. The sum starts at zero and follows the order of
// the parts. `into` may be one of the parts. Throws InternalError for kByte.
void sum_parts(const std::vector<const void*>& parts, int64_t count, Element element, void* into);

struct Collective {
  enum class Kind {
    kAllReduce,      // receive[count] = sum over ranks of send[count]; send == receive is allowed
    kReduceScatter,  // receive[count] = sum over ranks of send[rank * count ..]
    kAllGather,      // receive[size * count] = every rank's send[count], in rank order
    kAllToAll,       // receive[r * count ..] = rank r's send[this rank * count ..]
    kBroadcast,      // receive[count] = root's receive[count]
    kBarrier,
    kSend,     // sends send[count] to rank `root`
    kReceive,  // receive[count] = the message from rank `root`, sent with the same count
  };
  Kind kind = Kind::kBarrier;
  const void* send = nullptr;
  void* receive = nullptr;
  int64_t count = 0;  // elements, as above
  Element element = Element::kByte;
  int64_t root = 0;
  bool on_device = false;  // buffers on the GPU (needs takes_device_buffers()); else in host memory
};
std::string name_of(Collective::Kind kind);  // "all-reduce"

// A collective that has begun. Its buffers must live until it is done.
class PendingCollective {
 public:
  virtual ~PendingCollective() = default;
  virtual bool is_done() = 0;  // does not wait
};

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int64_t rank() const = 0;
  virtual int64_t size() const = 0;
  virtual bool takes_device_buffers() const { return false; }
  virtual std::unique_ptr<PendingCollective> begin(const Collective& collective) = 0;
  // Returns a new group: the ranks that pass the same color as this rank, in rank order. A collective call.
  virtual std::unique_ptr<Communicator> split(int64_t color) = 0;

  // Seconds that a call waits before it throws IoError. Infinity: no limit.
  void set_deadline(double seconds) { deadline_seconds_ = seconds; }
  double deadline() const { return deadline_seconds_; }
  // Bytes that this rank has sent, computed as the lower bound for each collective if all ranks send equally
  // much. For a buffer of B bytes (Collective::count) and N ranks: all-reduce 2 B (N - 1) / N;
  // reduce-scatter, all-gather and all-to-all B (N - 1); broadcast B (N - 1) / N; send B.
  double bytes_sent() const { return bytes_sent_; }
  // Sets the abort check. Calls that wait run this function again and again. If it throws, the wait ends, and
  // the group cannot be used afterwards. check_abort() runs the function once.
  void set_abort_check(std::function<void()> abort_check) { abort_check_ = std::move(abort_check); }
  void check_abort() const {
    if (abort_check_) abort_check_();
  }
  // Begins the collective and waits until it is done. Throws IoError after the deadline.
  void run(const Collective& collective);
  // Waits until `pending`, the result of begin(collective), is done. Several collectives may be pending.
  void finish(PendingCollective& pending, const Collective& collective);

  void all_reduce(std::span<double> values);
  void all_reduce(std::span<float> values);
  void barrier();
  // Returns the root's text on every rank. Other ranks' texts are ignored.
  std::string broadcast(const std::string& text, int64_t root = 0);
  // Waits without a deadline for the next broadcast of rank 0, and returns its text.
  std::string await_broadcast();
  // Returns all ranks' texts, in rank order.
  std::vector<std::string> all_gather(const std::string& text);

 private:
  double deadline_seconds_ = 600;
  double bytes_sent_ = 0;
  std::function<void()> abort_check_;
};

// A group of this process alone.
std::unique_ptr<Communicator> single_communicator();

// A group of threads of this process, for tests and experiments without MPI. The thread that acts as rank r
// uses element r of the result.
std::vector<std::unique_ptr<Communicator>> thread_communicators(int64_t size);

// The group of all ranks that mpirun or srun started. Opens libbough_mpi.so; throws UserError if the library
// is missing (has_mpi_library()) or cannot be opened. A rank must destroy the communicator before its process
// ends. Otherwise the rank counts as dead, and the launcher ends all ranks.
std::unique_ptr<Communicator> mpi_communicator();
bool has_mpi_library();  // whether libbough_mpi.so is beside the program or in ../lib
// Returns a group of the same ranks as `host` that also takes GPU buffers, through NCCL. A collective call.
// Call it after CUDA has been initialized. Opens libbough_nccl.so. If this build has no such library, returns
// a `host` of one rank, and throws UserError for several ranks: gradients through host memory would be many
// times slower. Throws UserError if the library cannot be opened.
std::filesystem::path find_nccl_library();  // empty if it is neither beside the program nor in ../lib
std::unique_ptr<Communicator> nccl_communicator(std::unique_ptr<Communicator> host,
                                                const std::filesystem::path& path = find_nccl_library());
// Returns whether mpirun, or srun with PMIx, started this process as a rank. False for torchrun's workers,
// even if mpirun or srun started torchrun and the workers inherit their environment variables.
bool is_mpi_rank();

}  // namespace bough
