#include "rollout/published_weights.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "base/json.h"
#include "base/large_pages.h"

namespace bough {

namespace {

constexpr int64_t kAlignment = 64;  // a cache line
// Two buckets in transfer at once: one travels while both sides prepare the next.
constexpr size_t kBucketsOnTheirWay = 2;
constexpr auto kPoll = std::chrono::microseconds(20);

struct Bucket {
  at::Tensor bytes;
  Collective collective;
};

std::vector<Bucket> cut(const at::Tensor& bytes) {
  std::vector<Bucket> buckets;
  for (int64_t begin = 0; begin < bytes.numel(); begin += kBucketBytes) {
    Bucket& bucket = buckets.emplace_back();
    bucket.bytes = bytes.narrow(0, begin, std::min(kBucketBytes, bytes.numel() - begin));
    bucket.collective = {.kind = Collective::Kind::kBroadcast,
                         .receive = bucket.bytes.mutable_data_ptr(),
                         .count = bucket.bytes.numel()};
  }
  return buckets;
}

std::vector<uint64_t> broadcast(std::vector<uint64_t> sums, Communicator& ranks) {
  ranks.run({.kind = Collective::Kind::kBroadcast,
             .receive = sums.data(),
             .count = std::ssize(sums),
             .element = Element::kInt64});
  return sums;
}

}  // namespace

int64_t FlatTensors::end_of(size_t view) const {
  return views[view].storage_offset() * views[view].element_size() +
         static_cast<int64_t>(views[view].nbytes());
}

namespace {
// Returns the byte offset of each parameter, then the total size.
std::vector<int64_t> begins_of(const std::vector<Parameter*>& parameters) {
  std::vector<int64_t> begins = {0};
  for (const Parameter* parameter : parameters)
    begins.push_back(begins.back() + (static_cast<int64_t>(parameter->value.nbytes()) + kAlignment - 1) /
                                         kAlignment * kAlignment);
  return begins;
}
}  // namespace

int64_t num_flat_bytes(const std::vector<Parameter*>& parameters) {
  return begins_of(parameters).back();
}

FlatTensors lay_out(const std::vector<Parameter*>& parameters, const at::Tensor& bytes) {
  const std::vector<int64_t> begins = begins_of(parameters);
  BOUGH_CHECK(bytes.numel() == begins.back(), "got ", bytes.numel(), " bytes, expected ", begins.back());
  FlatTensors flat{.bytes = bytes, .views = {}};
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& value = parameters[i]->value;
    flat.views.push_back(flat.bytes.narrow(0, begins[i], static_cast<int64_t>(value.nbytes()))
                             .view(value.scalar_type())
                             .view(value.sizes()));
  }
  return flat;
}

SharedBytes::SharedBytes(int64_t bytes) : descriptor_(memfd_create("bough weights", MFD_CLOEXEC)) {
  if (descriptor_ < 0 || ftruncate(descriptor_, bytes) != 0)
    throw IoError(str("cannot allocate ", bytes, " bytes of shared memory: ", std::strerror(errno)));
  map(bytes, PROT_READ | PROT_WRITE);
}

SharedBytes::SharedBytes(const std::string& path, int64_t bytes)
    : descriptor_(open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
  if (descriptor_ < 0) throw IoError(str(path, ": ", std::strerror(errno)));
  map(bytes, PROT_READ);
}

void SharedBytes::map(int64_t bytes, int protection) {
  begin_ = mmap(nullptr, static_cast<size_t>(bytes), protection, MAP_SHARED, descriptor_, 0);
  if (begin_ == MAP_FAILED) {
    const int code = errno;
    close(descriptor_);
    throw IoError(str("cannot map ", bytes, " bytes of shared memory: ", std::strerror(code)));
  }
  ask_for_large_pages(begin_, static_cast<size_t>(bytes));
  bytes_ = at::from_blob(begin_, {bytes}, at::kByte);
}

SharedBytes::~SharedBytes() {
  munmap(begin_, bytes_.nbytes());
  close(descriptor_);
}

std::string SharedBytes::path() const {
  return str("/proc/", getpid(), "/fd/", descriptor_);
}

std::string host_identity() {
  std::string boot, space;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  std::error_code ignored;
  return str(boot, " ", std::filesystem::read_symlink("/proc/self/ns/pid", ignored).string(), " ", geteuid());
}

PublicationRanks::PublicationRanks(std::unique_ptr<Communicator> group, const std::string& host)
    : all(std::move(group)) {
  const std::vector<std::string> hosts = all->all_gather(host);
  leader = std::ranges::find(hosts, host) - hosts.begin();
  leaders = all->split(is_leader() ? 0 : 1);
}

// ---- Rank 0

PublishedWeights::PublishedWeights(const Model& trained, PublicationRanks& ranks, bool waits,
                                   Changing changing)
    : waits_(waits),
      ranks_(ranks),
      trained_view_(trained.share()),
      trained_(changing_parameters(*trained_view_, changing)),
      buffers_(num_flat_bytes(trained_)),
      thread_([this] { run(); }) {
  BOUGH_CHECK(ranks.all->rank() == 0, "weights are published by rank 0, got rank ", ranks.all->rank());
}

PublishedWeights::~PublishedWeights() {
  give_up();
}

void PublishedWeights::give_up() {
  {
    const MutexLock lock(mutex_);
    if (!is_ending_) gives_up_.store(true);
    is_ending_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void PublishedWeights::check() const {
  if (failure_) std::rethrow_exception(failure_);
}

void PublishedWeights::publish(int32_t version) {
  size_t spare = 0;
  {
    MutexLock lock(mutex_);
    while (sending_ >= 0 && !failure_) changed_.wait(mutex_);
    check();
    copied_.store(0);
    begin_ = std::chrono::steady_clock::now();
    sending_ = version;
    arrived_ = -1;
    may_copy_ = false;
    changed_.notify_all();
    while (!may_copy_ && !failure_) changed_.wait(mutex_);
    check();
    spare = spare_;
  }
  const at::NoGradGuard no_grad;
  const FlatTensors flat = lay_out(trained_, buffers_[spare].bytes());
  for (size_t i = 0; i < trained_.size(); ++i) {
    flat.views[i].copy_(trained_[i]->value);
    copied_.store(flat.end_of(i));
  }
  copied_.store(flat.bytes.numel());
  if (!waits_) return;
  MutexLock lock(mutex_);
  while (sending_ >= 0 && !failure_) changed_.wait(mutex_);
  check();
}

std::optional<WeightUpdate> PublishedWeights::take() {
  const MutexLock lock(mutex_);
  check();
  if (arrived_ < 0) return std::nullopt;
  taken_ = std::exchange(arrived_, -1);
  spare_ = 1 - spare_;
  return WeightUpdate{.version = taken_, .model = nullptr};
}

bool PublishedWeights::has_new() const {
  const MutexLock lock(mutex_);
  return arrived_ >= 0;
}

PublishedWeights::Report PublishedWeights::take_report() {
  const MutexLock lock(mutex_);
  return std::exchange(report_, {});
}

void PublishedWeights::end() {
  {
    const MutexLock lock(mutex_);
    is_ending_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
  const MutexLock lock(mutex_);
  check();
}

void PublishedWeights::run() {
  Communicator& all = *ranks_.all;
  try {
    const auto abort_check = [this] {
      if (gives_up_.load()) throw IoError("the publication of weights is given up: the run has ended");
    };
    for (Communicator* group : {ranks_.all.get(), ranks_.leaders.get()}) group->set_abort_check(abort_check);
    all.all_gather(Json(buffers_.paths()).dump());
    MutexLock lock(mutex_);
    while (true) {
      while (!is_ending_ && sending_ < 0) changed_.wait(mutex_);
      abort_check();
      if (sending_ < 0) break;
      const std::string header = str(sending_, " ", taken_);
      lock.unlock();
      all.broadcast(header);
      all.barrier();  // every engine now has the version that was taken, so the spare buffer is free
      lock.lock();
      may_copy_ = true;
      const at::Tensor bytes = buffers_[spare_].bytes();
      changed_.notify_all();
      lock.unlock();
      send(bytes);
      all.barrier();
      lock.lock();
      ++report_.publications;
      report_.bytes += static_cast<double>(bytes.numel());
      report_.seconds += seconds_since(begin_);
      arrived_ = std::exchange(sending_, -1);
      changed_.notify_all();
    }
    all.broadcast("");
  } catch (...) {
    const MutexLock lock(mutex_);
    failure_ = std::current_exception();
    changed_.notify_all();
  }
}

// Sends `bytes` to the other hosts while publish() still copies into the buffer. Returns when all bytes are
// copied and sent.
void PublishedWeights::send(const at::Tensor& bytes) {
  Communicator& hosts = *ranks_.leaders;
  const auto await_copied = [&](int64_t end) {
    while (copied_.load() < end) {
      hosts.check_abort();
      std::this_thread::sleep_for(kPoll);
    }
  };
  if (hosts.size() == 1) return await_copied(bytes.numel());
  std::deque<std::pair<std::unique_ptr<PendingCollective>, Collective>> on_their_way;
  const auto finish = [&] {
    hosts.finish(*on_their_way.front().first, on_their_way.front().second);
    on_their_way.pop_front();
  };
  std::vector<uint64_t> sums;
  int64_t end = 0;
  for (const Bucket& bucket : cut(bytes)) {
    end += bucket.bytes.numel();
    await_copied(end);
    if (on_their_way.size() == kBucketsOnTheirWay) finish();
    on_their_way.emplace_back(hosts.begin(bucket.collective), bucket.collective);
    sums.push_back(checksum_of(bucket.bytes));
  }
  while (!on_their_way.empty()) finish();
  broadcast(std::move(sums), hosts);
}

// ---- Engine ranks

ReceivedWeights::ReceivedWeights(PublicationRanks& ranks, int64_t bytes)
    : ranks_(ranks), buffers_(ranks.is_leader() ? std::make_unique<HostBuffers>(bytes) : nullptr) {
  BOUGH_CHECK(ranks.all->rank() > 0, "rank 0 publishes weights and receives none");
}

BufferedVersion ReceivedWeights::arrived() const {
  const MutexLock lock(mutex_);
  return arrived_;
}

BufferedVersion ReceivedWeights::held() const {
  const MutexLock lock(mutex_);
  return held_;
}

void ReceivedWeights::hold(const BufferedVersion& version) {
  const MutexLock lock(mutex_);
  held_ = version;
  arrived_ = {};
}

std::string ReceivedWeights::path(const BufferedVersion& version) const {
  const MutexLock lock(mutex_);
  return paths_.at(version.buffer);
}

void ReceivedWeights::receive() {
  Communicator& all = *ranks_.all;
  const std::vector<std::string> of_all = all.all_gather(buffers_ ? Json(buffers_->paths()).dump() : "");
  {
    const MutexLock lock(mutex_);
    paths_ = Json::parse(of_all.at(static_cast<size_t>(ranks_.leader))).get<std::vector<std::string>>();
  }
  while (true) {
    const std::string header = all.await_broadcast();
    if (header.empty()) return;
    int32_t version = -1, taken = -1;
    std::istringstream(header) >> version >> taken;
    size_t spare = 0;
    while (true) {
      {
        const MutexLock lock(mutex_);
        if (held_.version >= taken) {
          arrived_ = {};
          spare = 1 - held_.buffer;
          break;
        }
      }
      all.check_abort();
      std::this_thread::sleep_for(kPoll);
    }
    all.barrier();
    if (buffers_) receive_buckets(version, (*buffers_)[spare].bytes());
    {
      const MutexLock lock(mutex_);
      arrived_ = {version, spare};
    }
    all.barrier();  // comes last: after this barrier rank 0 relies on arrived_
  }
}

void ReceivedWeights::receive_buckets(int32_t version, const at::Tensor& bytes) {
  Communicator& hosts = *ranks_.leaders;
  const std::vector<Bucket> buckets = cut(bytes);
  std::vector<uint64_t> sums(buckets.size());
  std::vector<std::unique_ptr<PendingCollective>> pending(buckets.size());
  for (size_t next = 0, done = 0; done < buckets.size(); ++done) {
    for (; next < buckets.size() && next < done + kBucketsOnTheirWay; ++next)
      pending[next] = hosts.begin(buckets[next].collective);
    hosts.finish(*pending[done], buckets[done].collective);
    pending[done].reset();
    sums[done] = checksum_of(buckets[done].bytes);
  }
  const std::vector<uint64_t> sent = broadcast(std::vector<uint64_t>(sums.size()), hosts);
  for (size_t i = 0; i < sums.size(); ++i)
    BOUGH_CHECK(sums[i] == sent[i], "publication of version ", version, ": bucket ", i, " of ", sums.size(),
                " differs from the bytes that rank 0 sent");
}

// ---- The engine's process

MappedWeights::MappedWeights(Model& generating, bool in_place, Changing changing)
    : generating_(generating), in_place_(in_place), parameters_(changing_parameters(generating, changing)) {}

int64_t MappedWeights::num_bytes() const {
  return num_flat_bytes(parameters_);
}

WeightUpdate MappedWeights::take(int32_t version, const std::string& path) {
  std::unique_ptr<SharedBytes>& buffer = buffers_[path];
  if (!buffer) buffer = std::make_unique<SharedBytes>(path, num_bytes());
  const at::NoGradGuard no_grad;
  const FlatTensors flat = lay_out(parameters_, buffer->bytes());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (in_place_) parameters_[i]->value.copy_(flat.views[i]);
    else parameters_[i]->value = flat.views[i];
  }
  return {.version = version, .model = &generating_};
}

}  // namespace bough
