// A stand-in for libtorch_cuda: one device of type CUDA whose memory is the host's. Work runs at once, on the
// thread that queues it. host_order.h checks the order that streams and events give it.
//
// Environment variables: BOUGH_EMULATED_CUDA, without which there is no device; BOUGH_EMULATED_MEMORY, the
// bytes of the device; BOUGH_EMULATED_WITHHELD, how many of them no tensor gets (a GPU has a context there,
// workspaces of libraries and gaps between allocations); BOUGH_EMULATED_PEAK, a file to which the peak of the
// memory in use is written when the process ends.
#include "device.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>

#include "lock.h"
#include "memory.h"
#include "pinned_memory.h"
#include "recording.h"

namespace bough::emulation {
namespace {

constexpr size_t kDefaultBytes = size_t{384} << 20;  // an engine takes most of it and fills it
constexpr size_t kBlockBytes = 512;  // libtorch rounds up to a multiple

bool is_wanted() {
  return std::getenv("BOUGH_EMULATED_CUDA") != nullptr;
}

size_t bytes_of(const char* variable, size_t otherwise) {
  const char* const given = std::getenv(variable);
  return given ? std::strtoull(given, nullptr, 10) : otherwise;
}

class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  // Like libtorch's, the allocator refuses questions before the first tensor or lazyInitDevice().
  void initialise() { is_initialised_ = true; }
  c10::DataPtr allocate(size_t bytes) override {
    initialise();
    if (bytes == 0) return {nullptr, nullptr, &free, device()};
    const std::lock_guard lock(mutex_);
    const size_t rounded = (bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
    void* const data = pool_ == PoolId() ? allocate_block(bytes, rounded, pool_) : from_pool(rounded);
    stats_.allocated_bytes[0].increase(rounded);
    return {data, data, &free, device()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t /*pool*/) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    stream_uses(data.get(), static_cast<int>(stream.id()));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex /*device*/) override {
    check_initialised();
    const std::lock_guard lock(mutex_);
    return stats_;
  }
  void resetAccumulatedStats(c10::DeviceIndex /*device*/) override {
    const std::lock_guard lock(mutex_);
    stats_.allocated_bytes[0].reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex /*device*/) override {
    check_initialised();
    const std::lock_guard lock(mutex_);
    stats_.allocated_bytes[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex /*device*/) override {
    const std::lock_guard lock(mutex_);
    return {total_ - reserved(), total_};
  }

  PoolId new_pool() { return {0, ++last_pool_}; }
  void begin_pool(PoolId id) {
    const std::lock_guard lock(mutex_);
    Pool& pool = pools_[id];
    TORCH_CHECK(!pool.is_closed, "CUDA emulation: a graph is recorded into a closed memory pool");
    ++pool.num_users;
    pool_ = id;
  }
  void end_pool(PoolId id) {
    TORCH_CHECK(pool_ == id, "CUDA emulation: the thread does not allocate from this memory pool");
    pool_ = {};
  }
  void release_pool(PoolId id) {
    const std::lock_guard lock(mutex_);
    Pool& pool = pools_.at(id);
    if (--pool.num_users > 0) return;
    pool.is_closed = true;
    for (const auto& [bytes, data] : pool.unused) release(data);
    pool.unused.clear();
  }

 private:
  struct Block {
    size_t bytes;
    PoolId pool;
  };
  struct Pool {
    int64_t num_users = 0;
    bool is_closed = false;
    std::multimap<size_t, void*> unused;
  };

  static c10::Device device() { return {kType, 0}; }
  void check_initialised() const {
    TORCH_CHECK(is_initialised_, "Invalid device argument 0: did you call init? (emulated device)");
  }
  static void free(void* data);
  void free_block(void* data) {
    const std::lock_guard lock(mutex_);
    const Block& block = blocks_.at(data);
    stats_.allocated_bytes[0].decrease(block.bytes);
    if (block.pool == PoolId() || pools_.at(block.pool).is_closed) release(data);
    else pools_.at(block.pool).unused.emplace(block.bytes, data);
  }

  // The memory ends after `bytes`, of which `rounded` count.
  void* allocate_block(size_t bytes, size_t rounded, PoolId pool) {
    TORCH_CHECK_WITH(OutOfMemoryError, reserved() + rounded <= total_ - withheld_, "CUDA out of memory. Tried to allocate ",
                     rounded, " bytes; ", reserved(), " of ", total_, " are in use (emulated device)");
    void* const data = allocate_device_memory(bytes);
    blocks_[data] = {rounded, pool};
    stats_.reserved_bytes[0].increase(rounded);
    memory_allocated(data, bytes, MemoryKind::kDevice, current_stream());
    return data;
  }
  void* from_pool(size_t rounded) {
    auto& unused = pools_.at(pool_).unused;
    const auto found = unused.find(rounded);
    if (found == unused.end()) return allocate_block(rounded, rounded, pool_);
    void* const data = found->second;
    unused.erase(found);
    return data;
  }
  void release(void* data) {
    memory_freed(data);
    stats_.reserved_bytes[0].decrease(blocks_.at(data).bytes);
    blocks_.erase(data);
    free_device_memory(data);
  }
  size_t reserved() const { return static_cast<size_t>(stats_.reserved_bytes[0].current); }

  static thread_local PoolId pool_;  // of which the thread's allocations come
  const size_t total_ = bytes_of("BOUGH_EMULATED_MEMORY", kDefaultBytes);
  const size_t withheld_ = bytes_of("BOUGH_EMULATED_WITHHELD", 0);
  std::atomic<bool> is_initialised_ = false;
  Lock mutex_;
  std::unordered_map<void*, Block> blocks_;
  std::map<PoolId, Pool> pools_;
  std::atomic<uint64_t> last_pool_ = 0;
  c10::CachingDeviceAllocator::DeviceStats stats_;
};
thread_local PoolId DeviceAllocator::pool_;

// Never destroyed: tensors in static variables may outlive this file's variables.
DeviceAllocator& instance() {
  static auto* const allocator = new DeviceAllocator;
  return *allocator;
}
void DeviceAllocator::free(void* data) {
  if (data) instance().free_block(data);
}
REGISTER_ALLOCATOR(kType, &instance())

const struct PeakReport {
  ~PeakReport() {
    const char* const path = std::getenv("BOUGH_EMULATED_PEAK");
    std::FILE* const file = path && is_wanted() ? std::fopen(path, "w") : nullptr;
    if (!file) return;
    instance().initialise();
    std::fprintf(file, "%lld\n",
                 static_cast<long long>(instance().getDeviceStats(0).reserved_bytes[0].peak));
    std::fclose(file);
  }
} peak_report;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Device device() { return {kType, 0}; }
  static c10::Stream& current() {
    thread_local c10::Stream stream(c10::Stream::DEFAULT, device());
    return stream;
  }
  static int number(const c10::Stream& stream) { return static_cast<int>(stream.id()); }
  static Clock& clock(void* event) { return *static_cast<Clock*>(event); }

  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device /*to*/) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  void setDevice(c10::Device /*to*/) const override {}
  void uncheckedSetDevice(c10::Device /*to*/) const noexcept override {}
  c10::Stream getStream(c10::Device /*of*/) const override { return current(); }
  c10::Stream getDefaultStream(c10::Device /*of*/) const override {
    return c10::Stream(c10::Stream::DEFAULT, device());
  }
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool high_priority) const override {
    return getNewStream(of, high_priority ? -1 : 0);
  }
  c10::Stream getNewStream(c10::Device /*of*/, int priority) const override {
    static std::atomic<int> next[2];
    const int pool = priority < 0 ? 1 : 0, within = next[pool]++ % kPoolStreams;
    return c10::Stream(c10::Stream::UNSAFE, device(), 1 + pool * kPoolStreams + within);
  }
  c10::Stream exchangeStream(c10::Stream to) const override { return std::exchange(current(), to); }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex /*device*/,
              c10::EventFlag /*flag*/) const override {
    if (!*event) *event = new Clock;
    clock(*event) = clock_of(number(stream));
  }
  void destroyEvent(void* event, c10::DeviceIndex /*device*/) const noexcept override {
    delete static_cast<Clock*>(event);
  }
  void block(void* event, const c10::Stream& stream) const override {
    stream_waits(number(stream), clock(event));
  }
  bool queryEvent(void* event) const override {
    host_waits(clock(event));
    return true;
  }
  void synchronizeEvent(void* event) const override {
    refuse_in_capture("a wait for an event");
    host_waits(clock(event));
  }
  bool queryStream(const c10::Stream& stream) const override {
    host_waits_for_stream(number(stream));
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    refuse_in_capture("a wait for a stream");
    host_waits_for_stream(number(stream));
  }
  void synchronizeDevice(c10::DeviceIndex /*device*/) const override {
    refuse_in_capture("a wait for the device");
    host_waits_for_device();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return is_wanted() ? 1 : 0; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// Graphs enter and leave its pools, too. No memory comes from them.
class PinnedAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* const data = allocate_pinned_memory(bytes);
    return {data, data, &free_pinned_memory, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned_memory; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool record_event(void* /*data*/, void* /*context*/, c10::Stream /*stream*/) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
  void begin_allocate_to_pool(PoolId pool, std::function<bool(c10::Stream)> /*filter*/) override {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK(recording_.insert(pool).second, "beginAllocateToPool: already recording to mempool_id");
    ++num_users_[pool];
  }
  void end_allocate_to_pool(PoolId pool) override {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK(recording_.erase(pool), "endAllocatePool: not currently recording to mempool_id");
  }
  void release_pool(PoolId pool) override {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK(--num_users_.at(pool) >= 0, "CUDA emulation: a pool of pinned memory is released too often");
  }

 private:
  Lock mutex_;
  std::set<PoolId> recording_;
  std::map<PoolId, int64_t> num_users_;
};
PinnedAllocator& pinned_allocator() {
  static auto* const allocator = new PinnedAllocator;
  return *allocator;
}
const at::HostAllocatorRegistry<kType> pinned_registry(&pinned_allocator());

}  // namespace

c10::DeviceAllocator& allocator() {
  return instance();
}
int current_stream() {
  return Guard::number(Guard::current());
}
PoolId new_pool() {
  return instance().new_pool();
}
void begin_pool(PoolId pool) {
  instance().begin_pool(pool);
}
void end_pool(PoolId pool) {
  instance().end_pool(pool);
}
void release_pool(PoolId pool) {
  instance().release_pool(pool);
}

}  // namespace bough::emulation

// The registry demands this namespace.
namespace at {
struct EmulatedCudaHooks final : CUDAHooksInterface {
  explicit EmulatedCudaHooks(CUDAHooksArgs /*arguments*/) {}
  void init() const override { bough::emulation::instance().initialise(); }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return hasCUDA(); }
  bool hasCUDA() const override { return bough::emulation::is_wanted(); }
  bool hasPrimaryContext(DeviceIndex /*device*/) const override { return true; }
  DeviceIndex deviceCount() const override { return hasCUDA() ? 1 : 0; }
  int getNumGPUs() const override { return hasCUDA() ? 1 : 0; }
  DeviceIndex current_device() const override { return 0; }
  void setCurrentDevice(DeviceIndex /*device*/) const override {}
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex /*device*/) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex /*device*/) const override { return 0; }
  void deviceSynchronize(DeviceIndex /*device*/) const override { bough::emulation::host_waits_for_device(); }
  bool isPinnedPtr(const void* data) const override { return bough::emulation::is_pinned_memory(data); }
  Allocator* getPinnedMemoryAllocator() const override { return &bough::emulation::pinned_allocator(); }
  Allocator* getCUDADeviceAllocator() const override { return &bough::emulation::allocator(); }
};
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, EmulatedCudaHooks)
}  // namespace at
