// libbough_nccl.so: collectives between GPUs through NCCL (communicator.h). The library is opened at run
// time, after the CUDA library. It uses the CUDA runtime and the NCCL of the process. Each rank has one GPU,
// its current device.
//
// Collectives on host buffers are passed to `host`, the group from which this one was made. The ranks also
// exchange NCCL's unique id through `host`.
//
// Collectives on device buffers run on the legacy default stream, where PyTorch computes. A collective
// therefore starts after the kernels that fill its buffers. Kernels that read the buffers later wait for the
// collective.
//
// Messages (kSend, kReceive) have a stream of their own, so a rank can compute while its message waits for
// the receiver. A message starts after the kernels that were enqueued on the default stream before it. After
// the host has waited for a message, its data can be used at once.
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <chrono>
#include <cstring>
#include <exception>
#include <thread>

#include "base/clock.h"
#include "base/error.h"
#include "comm/communicator.h"

namespace bough {

namespace {

ncclDataType_t type_of(Element element) {
  switch (element) {
    case Element::kFloat: return ncclFloat32;
    case Element::kDouble: return ncclFloat64;
    case Element::kInt64: return ncclInt64;
    case Element::kByte: return ncclUint8;
  }
  return ncclUint8;
}

void check(cudaError_t code, const char* what) {
  if (code != cudaSuccess) throw IoError(str("NCCL: ", what, ": ", cudaGetErrorString(code)));
}

class NcclCommunicator final : public Communicator {
 public:
  explicit NcclCommunicator(std::unique_ptr<Communicator> host) : host_(std::move(host)) {
    ncclUniqueId id;
    std::string text(sizeof id, '\0');
    if (rank() == 0) {
      expect(ncclGetUniqueId(&id), "creating the id");
      std::memcpy(text.data(), &id, sizeof id);
    }
    text = host_->broadcast(text);
    BOUGH_CHECK(text.size() == sizeof id, "got an id of ", text.size(), " bytes");
    std::memcpy(&id, text.data(), sizeof id);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;  // in blocking mode, a dead rank would hold the other ranks in a call forever
    expect(ncclCommInitRankConfig(&comm_, static_cast<int>(size()), id, static_cast<int>(rank()), &config),
           "creating a group");
    settle("creating a group");
  }
  ~NcclCommunicator() override {
    if (messages_) cudaStreamDestroy(messages_);
    if (!comm_) return;
    // ncclCommDestroy waits for the other ranks. In a group that failed, they no longer answer.
    if (is_broken_ || std::uncaught_exceptions() > 0) ncclCommAbort(comm_);
    else ncclCommDestroy(comm_);
  }

  int64_t rank() const override { return host_->rank(); }
  int64_t size() const override { return host_->size(); }
  bool takes_device_buffers() const override { return true; }

  std::unique_ptr<PendingCollective> begin(const Collective& c) override {
    if (!c.on_device || c.kind == Collective::Kind::kBarrier) return host_->begin(c);
    const std::string name = name_of(c.kind);
    cudaStream_t stream = kStream;
    if (c.kind == Collective::Kind::kSend || c.kind == Collective::Kind::kReceive) {
      if (!messages_)
        check(cudaStreamCreateWithFlags(&messages_, cudaStreamNonBlocking), "creating a stream");
      stream = messages_;
      follow(kStream, stream);
    }
    expect(enqueue(c, stream), name.c_str());
    settle(name.c_str());
    return std::make_unique<Pending>(*this, stream);
  }

  std::unique_ptr<Communicator> split(int64_t color) override {
    return std::make_unique<NcclCommunicator>(host_->split(color));
  }

 private:
  static constexpr cudaStream_t kStream = nullptr;  // the legacy default stream

  class Pending final : public PendingCollective {
   public:
    Pending(NcclCommunicator& group, cudaStream_t stream) : group_(group) {
      check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "using an event");
      check(cudaEventRecord(event_, stream), "using an event");
    }
    ~Pending() override { cudaEventDestroy(event_); }
    bool is_done() override {
      const cudaError_t code = cudaEventQuery(event_);
      if (code == cudaSuccess) return true;
      if (code != cudaErrorNotReady) check(code, "a collective");
      group_.look_for_errors("a collective");
      return false;
    }

   private:
    NcclCommunicator& group_;
    cudaEvent_t event_ = nullptr;
  };

  // Kernels enqueued on `later` from now on start after the kernels already enqueued on `earlier`.
  static void follow(cudaStream_t earlier, cudaStream_t later) {
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "using an event");
    check(cudaEventRecord(event, earlier), "using an event");
    check(cudaStreamWaitEvent(later, event, 0), "using an event");
    cudaEventDestroy(event);  // CUDA frees the event when it completes
  }

  ncclResult_t enqueue(const Collective& c, cudaStream_t stream) {
    using Kind = Collective::Kind;
    const auto count = static_cast<size_t>(c.count);
    const ncclDataType_t type = type_of(c.element);
    switch (c.kind) {
      case Kind::kAllReduce: return ncclAllReduce(c.send, c.receive, count, type, ncclSum, comm_, stream);
      case Kind::kReduceScatter:
        return ncclReduceScatter(c.send, c.receive, count, type, ncclSum, comm_, stream);
      case Kind::kAllGather: return ncclAllGather(c.send, c.receive, count, type, comm_, stream);
      case Kind::kBroadcast:
        return ncclBroadcast(c.receive, c.receive, count, type, static_cast<int>(c.root), comm_, stream);
      case Kind::kAllToAll: {
        const auto bytes = static_cast<size_t>(c.count * size_of(c.element));
        ncclResult_t worst = ncclGroupStart();
        for (int64_t r = 0; r < size(); ++r) {
          const size_t at = static_cast<size_t>(r) * bytes;
          const auto note = [&](ncclResult_t code) {
            if (code != ncclSuccess && code != ncclInProgress) worst = code;
          };
          note(ncclSend(static_cast<const char*>(c.send) + at, count, type, static_cast<int>(r), comm_,
                        stream));
          note(ncclRecv(static_cast<char*>(c.receive) + at, count, type, static_cast<int>(r), comm_, stream));
        }
        const ncclResult_t end = ncclGroupEnd();
        return worst == ncclSuccess ? end : worst;
      }
      case Kind::kSend: return ncclSend(c.send, count, type, static_cast<int>(c.root), comm_, stream);
      case Kind::kReceive: return ncclRecv(c.receive, count, type, static_cast<int>(c.root), comm_, stream);
      case Kind::kBarrier: break;
    }
    return ncclInvalidUsage;
  }

  void expect(ncclResult_t code, const char* what) {
    if (code == ncclSuccess || code == ncclInProgress) return;
    is_broken_ = true;
    throw IoError(str("NCCL: ", what, ", ", size(), " ranks: ", ncclGetErrorString(code),
                      comm_ ? str(" (", ncclGetLastError(comm_), ")") : "",
                      "; every rank needs its own GPU. NCCL_DEBUG=INFO prints details"));
  }
  ncclResult_t look_for_errors(const char* what) {
    ncclResult_t state = ncclSuccess;
    expect(ncclCommGetAsyncError(comm_, &state), what);
    expect(state, what);
    return state;
  }
  // Waits until a nonblocking NCCL call has finished.
  void settle(const char* what) {
    const auto start = std::chrono::steady_clock::now();
    while (look_for_errors(what) == ncclInProgress) {
      if (seconds_since(start) > deadline()) {
        is_broken_ = true;
        throw IoError(str("rank ", rank(), " waited ", deadline(), " s for the other ranks in NCCL: ", what));
      }
      std::this_thread::yield();
    }
  }

  const std::unique_ptr<Communicator> host_;
  ncclComm_t comm_ = nullptr;
  cudaStream_t messages_ = nullptr;
  bool is_broken_ = false;
};

}  // namespace

}  // namespace bough

extern "C" bough::Communicator* bough_nccl_communicator(bough::Communicator* host) {
  return new bough::NcclCommunicator(std::unique_ptr<bough::Communicator>(host));
}
