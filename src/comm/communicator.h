// What several processes, or threads of one, say to each other: ranks of a group that make the same
// collective calls in the same order (MPI's terms). Over plain buffers, so that torch is not seen here.
//
// A communicator belongs to one thread. A collective is begun, polled and done; a call that waits polls with
// a deadline, since a rank that died or hangs would keep all others for ever: IoError then names the
// collective and the rank that waited. After it the group is of no more use.
//
// Sums are in the same order whatever the timing, and every rank gets the same bits.
//
// A message is a call of two ranks: what one sends another, in turn, it receives in turn. Messages of one
// group may wait for each other, whichever way they go; those of two groups never do.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace bough {

enum class Element { kFloat, kDouble, kInt64, kByte };
int64_t size_of(Element element);  // bytes
// into[count] = the sum of the parts, from zero on in their order, which is every reduction's. It may be one
// of them. InternalError: bytes are not summed.
void sum_parts(const std::vector<const void*>& parts, int64_t count, Element element, void* into);

struct Collective {
  enum class Kind {
    kAllReduce,      // receive[count] = sum over ranks of send[count]; may be the same buffer
    kReduceScatter,  // receive[count] = sum over ranks of send[rank * count ..]
    kAllGather,      // receive[size * count] = every rank's send[count], in rank order
    kAllToAll,       // receive[r * count ..] = rank r's send[own rank * count ..]
    kBroadcast,      // receive[count] = root's receive[count]
    kBarrier,
    kSend,     // send[count] goes to the rank `root`
    kReceive,  // receive[count] = what `root` sends, of as many
  };
  Kind kind = Kind::kBarrier;
  const void* send = nullptr;
  void* receive = nullptr;
  int64_t count = 0;  // elements, as above
  Element element = Element::kByte;
  int64_t root = 0;
  bool on_device = false;  // buffers of this rank's GPU, where takes_device_buffers(); else the host's
};
std::string name_of(Collective::Kind kind);  // "all-reduce"

// A collective that was begun; its buffers must live until it is done.
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
  // The group of those that give the same color, ranked as here. A collective call.
  virtual std::unique_ptr<Communicator> split(int64_t color) = 0;

  // Infinite: it waits for ever, as for a rank that may have nothing to say for long.
  void set_deadline(double seconds) { deadline_seconds_ = seconds; }
  double deadline() const { return deadline_seconds_; }
  // Bytes that this rank has sent by the least that such collectives take, where all ranks send alike: of a
  // buffer of B bytes (Collective::count) on N ranks 2 B (N - 1) / N for an all-reduce, B (N - 1) for a
  // reduce-scatter, an all-gather and an all-to-all, B (N - 1) / N for a broadcast; B of a message.
  double bytes_sent() const { return bytes_sent_; }
  // Called now and then by who waits; it may throw, which ends the wait and the group.
  void set_watch(std::function<void()> watch) { watch_ = std::move(watch); }
  void look() const {
    if (watch_) watch_();
  }
  // Begins it and waits for its end.
  void run(const Collective& collective);
  // Waits for the end of one that was begun: several may be on their way at once.
  void finish(PendingCollective& pending, const Collective& collective);

  void all_reduce(std::span<double> values);
  void all_reduce(std::span<float> values);
  void barrier();
  // Of the root's length and content on every rank.
  std::string broadcast(const std::string& text, int64_t root = 0);
  // What rank 0 broadcasts next, whenever that is: there is no deadline.
  std::string await_broadcast();
  // Every rank's text, in rank order.
  std::vector<std::string> all_gather(const std::string& text);

 private:
  double deadline_seconds_ = 600;
  double bytes_sent_ = 0;
  std::function<void()> watch_;
};

// A group of this process alone.
std::unique_ptr<Communicator> single_communicator();

// A group of threads of this process, for tests and for what is tried without MPI: communicator r is for the
// thread that plays rank r.
std::vector<std::unique_ptr<Communicator>> thread_communicators(int64_t size);

// All ranks that mpirun or srun started, through libbough_mpi.so, which is opened for it. UserError where
// the library is missing (has_mpi_library()) or cannot be opened. Destroyed in order it says goodbye to the
// others; a rank that ends in any other way is taken for dead, and the starter ends all.
std::unique_ptr<Communicator> mpi_communicator();
bool has_mpi_library();  // in this build
// The same ranks, whose GPUs have collectives of their own by NCCL, through libbough_nccl.so: a call of all
// of them, after CUDA was made ready. Where this build has no such library it is `host`, with a warning;
// UserError where it cannot be opened.
std::unique_ptr<Communicator> nccl_communicator(std::unique_ptr<Communicator> host);
// Whether this process was started as a rank: by mpirun, or by srun with PMIx. torchrun's workers have their
// variables, too, where one of them started torchrun; they are not.
bool is_mpi_rank();

}  // namespace bough
