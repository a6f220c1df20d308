#include "rollout/published_weights.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <sstream>
#include <utility>

#include "base/clock.h"
#include "base/error.h"

namespace bough {

namespace {

constexpr int64_t kAlignment = 64;  // a cache line
// Two on their way at once: one travels while both sides prepare the next.
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

FlatTensors lay_out(const std::vector<Parameter*>& parameters) {
  int64_t size = 0;
  std::vector<int64_t> begins;
  for (const Parameter* parameter : parameters) {
    begins.push_back(size);
    size += (static_cast<int64_t>(parameter->value.nbytes()) + kAlignment - 1) / kAlignment * kAlignment;
  }
  FlatTensors flat{.bytes = at::zeros({size}, at::kByte), .views = {}};
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& value = parameters[i]->value;
    flat.views.push_back(flat.bytes.narrow(0, begins[i], static_cast<int64_t>(value.nbytes()))
                             .view(value.scalar_type())
                             .view(value.sizes()));
  }
  return flat;
}

// ---- Rank 0.

PublishedWeights::PublishedWeights(const Model& trained, Communicator& engines, bool waits, Changing changing)
    : waits_(waits),
      engines_(engines),
      trained_view_(trained.share()),
      trained_(changing_parameters(*trained_view_, changing)),
      snapshot_(lay_out(trained_)),
      thread_([this] { run(); }) {
  BOUGH_CHECK(engines.rank() == 0, "rank ", engines.rank(), " receives");
}

PublishedWeights::~PublishedWeights() {
  {
    const std::lock_guard lock(mutex_);
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
  const auto is_free = [this] { return sending_ < 0 || failure_; };
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, is_free);
    check();
    copied_.store(0);
    begin_ = std::chrono::steady_clock::now();
    sending_ = version;
    arrived_ = -1;
  }
  changed_.notify_all();
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < trained_.size(); ++i) {
    snapshot_.views[i].copy_(trained_[i]->value);
    copied_.store(snapshot_.end_of(i));
  }
  copied_.store(snapshot_.bytes.numel());
  if (!waits_) return;
  std::unique_lock lock(mutex_);
  changed_.wait(lock, is_free);
  check();
}

std::optional<WeightUpdate> PublishedWeights::take() {
  const std::lock_guard lock(mutex_);
  check();
  if (arrived_ < 0) return std::nullopt;
  taken_ = std::exchange(arrived_, -1);
  return WeightUpdate{.version = taken_, .model = nullptr};
}

bool PublishedWeights::has_new() const {
  const std::lock_guard lock(mutex_);
  return arrived_ >= 0;
}

PublishedWeights::Report PublishedWeights::take_report() {
  const std::lock_guard lock(mutex_);
  return std::exchange(report_, {});
}

void PublishedWeights::end() {
  {
    const std::lock_guard lock(mutex_);
    is_ending_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
  check();
}

void PublishedWeights::run() {
  try {
    engines_.set_watch([this] {
      if (gives_up_.load()) throw IoError("a publication of weights is given up: the run has ended");
    });
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return is_ending_ || sending_ >= 0; });
      if (gives_up_.load()) return;
      if (sending_ < 0) break;
      const int32_t version = sending_, taken = taken_;
      lock.unlock();
      send(version, taken);
      lock.lock();
      ++report_.publications;
      report_.bytes += static_cast<double>(snapshot_.bytes.numel());
      report_.seconds += seconds_since(begin_);
      arrived_ = std::exchange(sending_, -1);
      changed_.notify_all();
    }
    engines_.broadcast("");
  } catch (...) {
    const std::lock_guard lock(mutex_);
    failure_ = std::current_exception();
    changed_.notify_all();
  }
}

void PublishedWeights::send(int32_t version, int32_t taken) {
  engines_.broadcast(str(version, " ", taken));
  std::deque<std::pair<std::unique_ptr<PendingCollective>, Collective>> on_their_way;
  const auto finish = [&] {
    engines_.finish(*on_their_way.front().first, on_their_way.front().second);
    on_their_way.pop_front();
  };
  std::vector<uint64_t> sums;
  int64_t end = 0;
  for (const Bucket& bucket : cut(snapshot_.bytes)) {
    end += bucket.bytes.numel();
    while (copied_.load() < end) {
      engines_.look();
      std::this_thread::sleep_for(kPoll);
    }
    if (on_their_way.size() == kBucketsOnTheirWay) finish();
    on_their_way.emplace_back(engines_.begin(bucket.collective), bucket.collective);
    sums.push_back(checksum_of(bucket.bytes));
  }
  while (!on_their_way.empty()) finish();
  broadcast(std::move(sums), engines_);
  engines_.barrier();
}

// ---- Engine ranks.

ReceivedWeights::ReceivedWeights(Model& generating, Communicator& publisher, bool in_place, Changing changing)
    : generating_(generating),
      publisher_(publisher),
      in_place_(in_place),
      parameters_(changing_parameters(generating, changing)),
      spare_(lay_out(parameters_)) {
  BOUGH_CHECK(publisher.rank() > 0, "rank 0 publishes");
  if (in_place) return;
  held_tensors_ = lay_out(parameters_);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    held_tensors_.views[i].copy_(parameters_[i]->value);
    parameters_[i]->value = held_tensors_.views[i];
  }
}

void ReceivedWeights::publish(int32_t version) {
  BOUGH_CHECK(false, "rank ", publisher_.rank(), " publishes version ", version);
}

bool ReceivedWeights::has_new() const {
  const std::lock_guard lock(mutex_);
  return arrived_ >= 0;
}

void ReceivedWeights::receive() {
  while (true) {
    const std::string header = publisher_.await_broadcast();
    if (header.empty()) return;
    int32_t version = -1, taken = -1;
    std::istringstream(header) >> version >> taken;
    at::Tensor bytes;
    while (!bytes.defined()) {
      {
        const std::lock_guard lock(mutex_);
        if (held_ >= taken) {
          arrived_ = -1;
          bytes = spare_.bytes;
        }
      }
      if (bytes.defined()) break;
      publisher_.look();
      std::this_thread::sleep_for(kPoll);
    }
    const std::vector<Bucket> buckets = cut(bytes);
    std::vector<uint64_t> sums(buckets.size());
    std::vector<std::unique_ptr<PendingCollective>> pending(buckets.size());
    for (size_t next = 0, done = 0; done < buckets.size(); ++done) {
      for (; next < buckets.size() && next < done + kBucketsOnTheirWay; ++next)
        pending[next] = publisher_.begin(buckets[next].collective);
      publisher_.finish(*pending[done], buckets[done].collective);
      pending[done].reset();
      sums[done] = checksum_of(buckets[done].bytes);
    }
    const std::vector<uint64_t> sent = broadcast(std::vector<uint64_t>(sums.size()), publisher_);
    for (size_t i = 0; i < sums.size(); ++i)
      BOUGH_CHECK(sums[i] == sent[i], "publication of version ", version, ": bucket ", i, " of ", sums.size(),
                  " is not what rank 0 sent");
    {
      const std::lock_guard lock(mutex_);
      arrived_ = version;
    }
    publisher_.barrier();  // last: what rank 0 has been told of is there to take
  }
}

std::optional<WeightUpdate> ReceivedWeights::take() {
  const std::lock_guard lock(mutex_);
  if (arrived_ < 0) return std::nullopt;
  const at::NoGradGuard no_grad;
  if (in_place_) {
    for (size_t i = 0; i < parameters_.size(); ++i) parameters_[i]->value.copy_(spare_.views[i]);
  } else {
    for (size_t i = 0; i < parameters_.size(); ++i) parameters_[i]->value = spare_.views[i];
    std::swap(spare_, held_tensors_);
  }
  held_ = std::exchange(arrived_, -1);
  return WeightUpdate{.version = held_, .model = &generating_};
}

}  // namespace bough
