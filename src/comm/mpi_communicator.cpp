// libbough_mpi.so: the communicator of all ranks that mpirun or srun started (communicator.h). Bough opens
// the library at run time, so nothing else depends on MPI.
#define OMPI_SKIP_MPICXX 1  // the deprecated C++ bindings would have to be linked
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>

#include <algorithm>
#include <exception>

#include "base/error.h"
#include "base/mutex.h"
#include "comm/communicator.h"

namespace bough {

namespace {

MPI_Datatype type_of(Element element) {
  switch (element) {
    case Element::kFloat: return MPI_FLOAT;
    case Element::kDouble: return MPI_DOUBLE;
    case Element::kInt64: return MPI_INT64_T;
    case Element::kByte: return MPI_BYTE;
  }
  return MPI_BYTE;
}

// Each communicator has its own thread, but only one thread at a time may call MPI (MPI_THREAD_SERIALIZED).
// begin() and is_done() hold this mutex and never wait for other ranks. split() and the destructor do not
// take it, because they wait for other ranks. Call them only while no other thread of the process uses MPI.
Mutex mpi_mutex;

// MPI counts have type int. Longer buffers are sent in pieces of at most this many elements.
constexpr int64_t kMostElements = int64_t{1} << 28;

class MpiPending final : public PendingCollective {
 public:
  void add(MPI_Request request) { requests_.push_back(request); }
  bool is_done() override {
    const MutexLock lock(mpi_mutex);
    int done = 0;
    MPI_Testall(static_cast<int>(requests_.size()), requests_.data(), &done, MPI_STATUSES_IGNORE);
    return done != 0;
  }

 private:
  std::vector<MPI_Request> requests_;
};

class MpiCommunicator final : public Communicator {
 public:
  explicit MpiCommunicator(MPI_Comm comm) : comm_(comm) {
    MPI_Comm_rank(comm, &rank_);
    MPI_Comm_size(comm, &size_);
  }
  ~MpiCommunicator() override {
    if (std::uncaught_exceptions() > 0) return;  // other ranks may wait for this rank, so it must look dead
    if (comm_ == MPI_COMM_WORLD) MPI_Finalize();
    else MPI_Comm_free(&comm_);
  }

  int64_t rank() const override { return rank_; }
  int64_t size() const override { return size_; }

  std::unique_ptr<PendingCollective> begin(const Collective& c) override {
    const MutexLock lock(mpi_mutex);
    auto pending = std::make_unique<MpiPending>();
    const MPI_Datatype type = type_of(c.element);
    const auto start = [&](auto&& call) {
      MPI_Request request = MPI_REQUEST_NULL;
      const int code = call(&request);
      BOUGH_CHECK(code == MPI_SUCCESS, "MPI: ", name_of(c.kind), " of ", c.count,
                  " elements failed with error ", code);
      pending->add(request);
    };
    using Kind = Collective::Kind;
    if (c.kind == Kind::kBarrier) {
      start([&](MPI_Request* request) { return MPI_Ibarrier(comm_, request); });
      return pending;
    }
    if (c.kind == Kind::kSend || c.kind == Kind::kReceive) {
      constexpr int kTag = 0;
      for (int64_t at = 0; at < c.count; at += kMostElements) {
        const int count = static_cast<int>(std::min(kMostElements, c.count - at));
        const int64_t offset = at * size_of(c.element);
        start([&](MPI_Request* request) {
          return c.kind == Kind::kSend ? MPI_Isend(static_cast<const char*>(c.send) + offset, count, type,
                                                   static_cast<int>(c.root), kTag, comm_, request)
                                       : MPI_Irecv(static_cast<char*>(c.receive) + offset, count, type,
                                                   static_cast<int>(c.root), kTag, comm_, request);
        });
      }
      return pending;
    }
    if (c.kind == Kind::kAllReduce || c.kind == Kind::kBroadcast) {
      for (int64_t at = 0; at < c.count; at += kMostElements) {
        const int count = static_cast<int>(std::min(kMostElements, c.count - at));
        const int64_t offset = at * size_of(c.element);
        char* const receive = static_cast<char*>(c.receive) + offset;
        if (c.kind == Kind::kBroadcast) {
          start([&](MPI_Request* request) {
            return MPI_Ibcast(receive, count, type, static_cast<int>(c.root), comm_, request);
          });
          continue;
        }
        const bool in_place = c.send == c.receive;
        const void* const send = in_place ? MPI_IN_PLACE : static_cast<const char*>(c.send) + offset;
        start([&](MPI_Request* request) {
          return MPI_Iallreduce(send, receive, count, type, MPI_SUM, comm_, request);
        });
      }
      return pending;
    }
    BOUGH_CHECK(c.count <= kMostElements, name_of(c.kind), " of ", c.count,
                " elements per rank, the limit is ", kMostElements);
    const int count = static_cast<int>(c.count);
    start([&](MPI_Request* request) {
      switch (c.kind) {
        case Kind::kReduceScatter:
          return MPI_Ireduce_scatter_block(c.send, c.receive, count, type, MPI_SUM, comm_, request);
        case Kind::kAllGather:
          return MPI_Iallgather(c.send, count, type, c.receive, count, type, comm_, request);
        default: return MPI_Ialltoall(c.send, count, type, c.receive, count, type, comm_, request);
      }
    });
    return pending;
  }

  std::unique_ptr<Communicator> split(int64_t color) override {
    MPI_Comm part = MPI_COMM_NULL;
    MPI_Comm_split(comm_, static_cast<int>(color), rank_, &part);
    return std::make_unique<MpiCommunicator>(part);
  }

 private:
  MPI_Comm comm_;
  int rank_ = 0, size_ = 1;
};

}  // namespace

}  // namespace bough

extern "C" bough::Communicator* bough_mpi_communicator() {
  int initialized = 0;
  MPI_Initialized(&initialized);
  if (!initialized) {
    int provided = 0;
    MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided);
  }
  return new bough::MpiCommunicator(MPI_COMM_WORLD);
}
