#include "comm/communicator.h"

#include <dlfcn.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <limits>
#include <map>
#include <thread>

#include "base/build_id.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/mutex.h"
#include "base/run_time_library.h"

namespace bough {

int64_t size_of(Element element) {
  switch (element) {
    case Element::kFloat: return 4;
    case Element::kDouble:
    case Element::kInt64: return 8;
    case Element::kByte: return 1;
  }
  return 0;
}

namespace {
template <class T>
void sum_parts_of(const std::vector<const void*>& parts, int64_t count, T* into) {
  std::vector<T> total(static_cast<size_t>(count), T{0});
  for (const void* part : parts) {
    const T* const values = static_cast<const T*>(part);
    for (int64_t i = 0; i < count; ++i) total[static_cast<size_t>(i)] += values[i];
  }
  std::copy(total.begin(), total.end(), into);
}
}  // namespace

void sum_parts(const std::vector<const void*>& parts, int64_t count, Element element, void* into) {
  switch (element) {
    case Element::kFloat: return sum_parts_of(parts, count, static_cast<float*>(into));
    case Element::kDouble: return sum_parts_of(parts, count, static_cast<double*>(into));
    case Element::kInt64: return sum_parts_of(parts, count, static_cast<int64_t*>(into));
    case Element::kByte: BOUGH_CHECK(false, "bytes are not summed");
  }
}

std::string name_of(Collective::Kind kind) {
  constexpr const char* kNames[] = {"all-reduce", "reduce-scatter", "all-gather", "all-to-all",
                                    "broadcast",  "barrier",        "send",       "receive"};
  return kNames[static_cast<int>(kind)];
}

namespace {

double bytes_of(const Collective& collective, double ranks) {
  const auto bytes = static_cast<double>(collective.count * size_of(collective.element));
  switch (collective.kind) {
    case Collective::Kind::kAllReduce: return 2 * bytes * (ranks - 1) / ranks;
    case Collective::Kind::kReduceScatter:
    case Collective::Kind::kAllGather:
    case Collective::Kind::kAllToAll: return bytes * (ranks - 1);
    case Collective::Kind::kBroadcast: return bytes * (ranks - 1) / ranks;
    case Collective::Kind::kSend: return bytes;
    case Collective::Kind::kReceive:
    case Collective::Kind::kBarrier: return 0;
  }
  return 0;
}

}  // namespace

void Communicator::run(const Collective& collective) {
  finish(*begin(collective), collective);
}

void Communicator::finish(PendingCollective& pending, const Collective& collective) {
  bytes_sent_ += bytes_of(collective, static_cast<double>(size()));
  const auto start = std::chrono::steady_clock::now();
  // Short collectives end while this loop spins. A longer wait yields the CPU core to other ranks' threads.
  for (int64_t polls = 0; !pending.is_done(); ++polls) {
    if (polls < 1000) continue;
    check_abort();
    if (seconds_since(start) > deadline_seconds_)
      throw IoError(str("rank ", rank(), " of ", size(), " waited ", deadline_seconds_, " s in ",
                        name_of(collective.kind), " of ", collective.count,
                        " elements: another rank has died or hangs; see the end of each rank's log"));
    if (polls < 2000) std::this_thread::yield();
    else std::this_thread::sleep_for(std::chrono::microseconds(polls < 20'000 ? 50 : 500));
  }
}

void Communicator::all_reduce(std::span<double> values) {
  run({.kind = Collective::Kind::kAllReduce,
       .send = values.data(),
       .receive = values.data(),
       .count = std::ssize(values),
       .element = Element::kDouble});
}

void Communicator::all_reduce(std::span<float> values) {
  run({.kind = Collective::Kind::kAllReduce,
       .send = values.data(),
       .receive = values.data(),
       .count = std::ssize(values),
       .element = Element::kFloat});
}

void Communicator::barrier() {
  run({});
}

std::string Communicator::broadcast(const std::string& text, int64_t root) {
  auto length = std::ssize(text);
  run({.kind = Collective::Kind::kBroadcast,
       .receive = &length,
       .count = 1,
       .element = Element::kInt64,
       .root = root});
  std::string result = rank() == root ? text : std::string(static_cast<size_t>(length), '\0');
  run({.kind = Collective::Kind::kBroadcast, .receive = result.data(), .count = length, .root = root});
  return result;
}

std::string Communicator::await_broadcast() {
  const double deadline = deadline_seconds_;
  deadline_seconds_ = std::numeric_limits<double>::infinity();
  std::string text = broadcast("");
  deadline_seconds_ = deadline;
  return text;
}

std::vector<std::string> Communicator::all_gather(const std::string& text) {
  const int64_t own = std::ssize(text);
  std::vector<int64_t> lengths(static_cast<size_t>(size()));
  run({.kind = Collective::Kind::kAllGather,
       .send = &own,
       .receive = lengths.data(),
       .count = 1,
       .element = Element::kInt64});
  std::vector<std::string> texts;
  for (int64_t r = 0; r < size(); ++r) {
    texts.push_back(r == rank() ? text
                                : std::string(static_cast<size_t>(lengths[static_cast<size_t>(r)]), '\0'));
    run({.kind = Collective::Kind::kBroadcast,
         .receive = texts.back().data(),
         .count = std::ssize(texts.back()),
         .root = r});
  }
  return texts;
}

namespace {

// State shared by the threads of one group of ranks. Each collective, identified by its number, stores the
// input of every rank. The last rank to arrive computes the result for all ranks, in rank order.
class Meeting {
 public:
  explicit Meeting(int64_t size) : size_(size) {}

  struct Call {
    std::vector<Collective> given;
    int64_t num_arrived = 0, num_left = 0;
    bool is_done = false;
  };

  void arrive(uint64_t number, int64_t rank, const Collective& collective) {
    const MutexLock lock(mutex_);
    Call& call = calls_[number];
    call.given.resize(static_cast<size_t>(size_));
    call.given[static_cast<size_t>(rank)] = collective;
    if (++call.num_arrived < size_) return;
    compute(call.given);
    call.is_done = true;
  }

  bool is_done(uint64_t number) {
    const MutexLock lock(mutex_);
    return calls_.at(number).is_done;
  }

  void leave(uint64_t number) {
    const MutexLock lock(mutex_);
    if (++calls_.at(number).num_left == size_) calls_.erase(number);
  }

  // A point-to-point message. It is done when both the sender and the receiver have posted it.
  struct Message {
    Collective given;
    bool is_done = false;
  };

  std::shared_ptr<Message> meet(int64_t rank, const Collective& given) {
    const MutexLock lock(mutex_);
    const bool sends = given.kind == Collective::Kind::kSend;
    auto& [sent, expected] = messages_[sends ? std::pair(rank, given.root) : std::pair(given.root, rank)];
    const auto own = std::make_shared<Message>(Message{.given = given});
    auto& others = sends ? expected : sent;
    if (others.empty()) {
      (sends ? sent : expected).push_back(own);
      return own;
    }
    const std::shared_ptr<Message> other = others.front();
    others.pop_front();
    const Collective &from = sends ? given : other->given, &to = sends ? other->given : given;
    BOUGH_CHECK(from.count == to.count && from.element == to.element, "got a message of ", from.count,
                " elements, expected ", to.count);
    const int64_t bytes = from.count * size_of(from.element);
    if (bytes > 0) std::memcpy(to.receive, from.send, static_cast<size_t>(bytes));
    own->is_done = other->is_done = true;
    return own;
  }

  bool is_done(const Message& message) {
    const MutexLock lock(mutex_);
    return message.is_done;
  }

  // Returns the Meeting of the subgroup of a color in the split() whose collective has this number. The first
  // rank that asks for it creates it.
  std::shared_ptr<Meeting> part(uint64_t number, int64_t color, int64_t size) {
    const MutexLock lock(mutex_);
    std::shared_ptr<Meeting>& found = parts_[{number, color}];
    if (!found) found = std::make_shared<Meeting>(size);
    return found;
  }

 private:
  // Sums all ranks' send buffers, starting at element `offset`.
  static void sum(const std::vector<Collective>& given, int64_t offset, void* into) {
    const Collective& first = given[0];
    std::vector<const void*> parts;
    for (const Collective& each : given)
      parts.push_back(static_cast<const char*>(each.send) + offset * size_of(first.element));
    sum_parts(parts, first.count, first.element, into);
  }

  static void compute(const std::vector<Collective>& given) {
    const Collective& first = given[0];
    for (size_t r = 0; r < given.size(); ++r)
      BOUGH_CHECK(given[r].kind == first.kind && given[r].count == first.count &&
                      given[r].element == first.element && given[r].root == first.root,
                  "rank ", r, " calls ", name_of(given[r].kind), " of ", given[r].count,
                  " elements, rank 0 calls ", name_of(first.kind), " of ", first.count);
    const int64_t bytes = first.count * size_of(first.element);
    const auto at = [](const void* buffer, int64_t offset) {
      return static_cast<const char*>(buffer) + offset;
    };
    const auto copy = [&](void* to, int64_t offset, const void* from) {
      if (bytes > 0) std::memcpy(static_cast<char*>(to) + offset, from, static_cast<size_t>(bytes));
    };
    using Kind = Collective::Kind;
    switch (first.kind) {
      case Kind::kAllReduce: {
        std::vector<char> total(static_cast<size_t>(bytes));
        sum(given, 0, total.data());
        for (const Collective& each : given) copy(each.receive, 0, total.data());
        return;
      }
      case Kind::kReduceScatter:
        for (size_t r = 0; r < given.size(); ++r)
          sum(given, static_cast<int64_t>(r) * first.count, given[r].receive);
        return;
      case Kind::kAllGather:
        for (const Collective& to : given)
          for (size_t r = 0; r < given.size(); ++r)
            copy(to.receive, static_cast<int64_t>(r) * bytes, given[r].send);
        return;
      case Kind::kAllToAll:
        for (size_t to = 0; to < given.size(); ++to)
          for (size_t r = 0; r < given.size(); ++r)
            copy(given[to].receive, static_cast<int64_t>(r) * bytes,
                 at(given[r].send, static_cast<int64_t>(to) * bytes));
        return;
      case Kind::kBroadcast:
        for (size_t r = 0; r < given.size(); ++r)
          if (static_cast<int64_t>(r) != first.root)
            copy(given[r].receive, 0, given[static_cast<size_t>(first.root)].receive);
        return;
      case Kind::kBarrier:
      case Kind::kSend:
      case Kind::kReceive: return;
    }
  }

  // Messages between one pair of ranks that only the sender or only the receiver has posted.
  struct Waiting {
    std::deque<std::shared_ptr<Message>> sent, expected;
  };

  const int64_t size_;
  Mutex mutex_;
  std::map<uint64_t, Call> calls_ GUARDED_BY(mutex_);
  std::map<std::pair<int64_t, int64_t>, Waiting> messages_ GUARDED_BY(mutex_);  // key: (sender, receiver)
  std::map<std::pair<uint64_t, int64_t>, std::shared_ptr<Meeting>> parts_ GUARDED_BY(mutex_);
};

class ThreadCommunicator final : public Communicator {
 public:
  ThreadCommunicator(std::shared_ptr<Meeting> meeting, int64_t rank, int64_t size)
      : meeting_(std::move(meeting)), rank_(rank), size_(size) {}

  int64_t rank() const override { return rank_; }
  int64_t size() const override { return size_; }

  std::unique_ptr<PendingCollective> begin(const Collective& collective) override {
    class Pending final : public PendingCollective {
     public:
      Pending(Meeting& meeting, uint64_t number) : meeting_(meeting), number_(number) {}
      ~Pending() override { meeting_.leave(number_); }
      bool is_done() override { return meeting_.is_done(number_); }

     private:
      Meeting& meeting_;
      const uint64_t number_;
    };
    class PendingMessage final : public PendingCollective {
     public:
      PendingMessage(Meeting& meeting, std::shared_ptr<Meeting::Message> message)
          : meeting_(meeting), message_(std::move(message)) {}
      bool is_done() override { return meeting_.is_done(*message_); }

     private:
      Meeting& meeting_;
      const std::shared_ptr<Meeting::Message> message_;
    };
    if (collective.kind == Collective::Kind::kSend || collective.kind == Collective::Kind::kReceive)
      return std::make_unique<PendingMessage>(*meeting_, meeting_->meet(rank_, collective));
    const uint64_t number = num_calls_++;
    meeting_->arrive(number, rank_, collective);
    return std::make_unique<Pending>(*meeting_, number);
  }

  std::unique_ptr<Communicator> split(int64_t color) override {
    std::vector<int64_t> colors(static_cast<size_t>(size_));
    const uint64_t number = num_calls_;
    run({.kind = Collective::Kind::kAllGather,
         .send = &color,
         .receive = colors.data(),
         .count = 1,
         .element = Element::kInt64});
    const auto size = std::count(colors.begin(), colors.end(), color);
    const auto rank = std::count(colors.begin(), colors.begin() + rank_, color);
    return std::make_unique<ThreadCommunicator>(meeting_->part(number, color, size), rank, size);
  }

 private:
  const std::shared_ptr<Meeting> meeting_;
  const int64_t rank_, size_;
  uint64_t num_calls_ = 0;
};

}  // namespace

std::vector<std::unique_ptr<Communicator>> thread_communicators(int64_t size) {
  BOUGH_CHECK(size > 0, "a group has size=", size, ", expected at least 1 rank");
  const auto meeting = std::make_shared<Meeting>(size);
  std::vector<std::unique_ptr<Communicator>> ranks;
  for (int64_t r = 0; r < size; ++r) ranks.push_back(std::make_unique<ThreadCommunicator>(meeting, r, size));
  return ranks;
}

std::unique_ptr<Communicator> single_communicator() {
  return std::move(thread_communicators(1)[0]);
}

bool is_mpi_rank() {
  const bool by_torchrun = std::getenv("TORCHELASTIC_RUN_ID");
  return !by_torchrun && (std::getenv("OMPI_COMM_WORLD_SIZE") || std::getenv("PMIX_RANK"));
}

namespace {
constexpr const char* kMpiLibrary = "libbough_mpi.so";
constexpr const char* kNcclLibrary = "libbough_nccl.so";
}  // namespace

bool has_mpi_library() {
  return !find_run_time_library(kMpiLibrary).empty();
}

std::unique_ptr<Communicator> mpi_communicator() {
  const std::filesystem::path path = find_run_time_library(kMpiLibrary);
  if (path.empty())
    throw UserError(
        str("several ranks: ", kMpiLibrary,
            " is neither beside the program nor in its lib folder. Only a build with Open MPI has it: "
            "install libopenmpi-dev and build again, use --launcher processes, or use one rank"));
  // MPI's own plug-ins look up libmpi's symbols in the process.
  void* const library = open_run_time_library(
      {.path = path,
       .build_id = build_id(),
       .purpose = "several ranks",
       .remedy = "install Open MPI's libraries (openmpi-bin, libopenmpi3), or use --launcher processes",
       .rebuild = "bough and bough_mpi"});
  auto* const make = reinterpret_cast<Communicator* (*)()>(dlsym(library, "bough_mpi_communicator"));
  BOUGH_CHECK(make, kMpiLibrary, " has no function bough_mpi_communicator");
  return std::unique_ptr<Communicator>(make());
}

std::filesystem::path find_nccl_library() {
  return find_run_time_library(kNcclLibrary);
}

std::unique_ptr<Communicator> nccl_communicator(std::unique_ptr<Communicator> host,
                                                const std::filesystem::path& path) {
  if (path.empty() && host->size() == 1) return host;
  if (path.empty())
    throw UserError(str("several ranks on GPUs: ", kNcclLibrary,
                        " is neither beside the program nor in its lib folder, got ", host->size(),
                        " ranks; build the target bough_cuda, which brings it, with the package "
                        "nvidia-nccl-cu13 installed, or use one rank or device cpu"));
  void* const library =
      open_run_time_library({.path = path,
                             .build_id = build_id(),
                             .purpose = "several ranks on GPUs",
                             .remedy = "install a CUDA build of PyTorch with NCCL, or use one rank",
                             .rebuild = "bough and bough_nccl"});
  auto* const make =
      reinterpret_cast<Communicator* (*)(Communicator*)>(dlsym(library, "bough_nccl_communicator"));
  BOUGH_CHECK(make, kNcclLibrary, " has no function bough_nccl_communicator");
  return std::unique_ptr<Communicator>(make(host.release()));
}

}  // namespace bough
