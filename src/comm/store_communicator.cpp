#include "comm/store_communicator.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <map>
#include <optional>
#include <thread>

#include "base/clock.h"
#include "base/error.h"
#include "base/mutex.h"

namespace bough {

namespace {

using Time = std::chrono::steady_clock::time_point;

// Maximum size of a value. Stores refuse larger values (TCPStore: above 8 MiB).
constexpr int64_t kMostBytes = int64_t{4} << 20;
constexpr auto kHeartbeat = std::chrono::milliseconds(500);
// Pause between two polls of the store: the time waited so far, divided by kWaitedOverPause. So the number of
// polls grows slowly with the wait. The pause is at most kLongestPause.
constexpr int64_t kWaitedOverPause = 16;
constexpr auto kLongestPause = std::chrono::milliseconds(10);
// When the rank that holds the store ends without an error, it keeps the store until the other ranks have
// ended, but at most this long. Live ranks may still read values from the store.
constexpr double kGoodbyeSeconds = 60;

constexpr const char* kGone = "gone";
constexpr const char* kFailed = "failed";

// Owns the store and tracks which ranks are alive. All communicators of a process share one Members object.
class Members {
 public:
  Members(std::unique_ptr<KeyValueStore> store, const StoreRank& rank)
      : rank_(rank),
        store_(std::move(store)),
        others_(static_cast<size_t>(rank.size)),
        thread_([this] { run(); }) {}

  ~Members() {
    {
      const MutexLock lock(mutex_);
      is_ending_ = true;
    }
    changed_.notify_all();
    thread_.join();
    try {
      store_->set(key_of(rank_.rank), std::uncaught_exceptions() > 0 ? kFailed : kGone);
      if (rank_.holds_store && std::uncaught_exceptions() == 0) await_others();
    } catch (const std::exception&) {  // the store may be gone together with other ranks
    }
  }
  Members(const Members&) = delete;
  Members& operator=(const Members&) = delete;

  KeyValueStore& store() { return *store_; }

  // Throws if a rank is dead.
  void check() const {
    const MutexLock lock(mutex_);
    if (!failure_.empty()) throw IoError(failure_);
  }

 private:
  struct Other {
    std::string said;           // the last value seen in the rank's key alive/RANK
    std::optional<Time> since;  // when `said` was first seen; nullopt if the rank has said nothing yet
  };

  static std::string key_of(int64_t rank) { return str("alive/", rank); }

  void run() {
    MutexLock lock(mutex_);
    for (int64_t count = 0; !is_ending_; ++count) {
      lock.unlock();
      std::string failure;
      try {
        store_->set(key_of(rank_.rank), std::to_string(count));
        failure = check_abort();
      } catch (const std::exception& error) {
        failure = error.what();
      }
      lock.lock();
      if (!failure.empty() && failure_.empty()) failure_ = failure;
      const Time next = std::chrono::steady_clock::now() + kHeartbeat;
      while (!is_ending_ && changed_.wait_until(mutex_, next)) {
      }
    }
  }

  // Returns what is wrong with the other ranks, or "".
  std::string check_abort() {
    std::vector<int64_t> ranks;
    std::vector<std::string> keys;
    for (int64_t rank = 0; rank < rank_.size; ++rank) {
      const Other& other = others_[static_cast<size_t>(rank)];
      if (rank == rank_.rank || other.said == kGone || (!other.since && !store_->has(key_of(rank)))) continue;
      ranks.push_back(rank);
      keys.push_back(key_of(rank));
    }
    if (keys.empty()) return "";
    const std::vector<std::string> said = store_->get(keys);
    const Time now = std::chrono::steady_clock::now();
    for (size_t i = 0; i < ranks.size(); ++i) {
      Other& other = others_[static_cast<size_t>(ranks[i])];
      if (said[i] != other.said || !other.since) other = {said[i], now};
      const std::string who = str("rank ", ranks[i], " of ", rank_.size);
      if (other.said == kFailed) return str(who, " has failed");
      if (other.said != kGone &&
          std::chrono::duration<double>(now - *other.since).count() > rank_.silence_seconds)
        return str(who, " has said nothing for ", rank_.silence_seconds,
                   " s: the process has died or is stopped");
    }
    return "";
  }

  void await_others() {
    const auto start = std::chrono::steady_clock::now();
    const auto is_gone = [](const Other& other) { return other.said == kGone || !other.since; };
    do {
      if (!check_abort().empty()) return;
      const int64_t gone = std::ranges::count_if(others_, is_gone);
      if (gone == rank_.size) return;  // this rank is counted too: its own entry never has a `since`
      std::this_thread::sleep_for(kLongestPause);
    } while (seconds_since(start) < kGoodbyeSeconds);
  }

  const StoreRank rank_;
  const std::unique_ptr<KeyValueStore> store_;
  std::vector<Other> others_;  // by rank; used by thread_, then by the destructor
  mutable Mutex mutex_;
  CondVar changed_;
  std::string failure_ GUARDED_BY(mutex_);
  bool is_ending_ GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last member, because it uses the members above
};

class StoreCommunicator final : public Communicator {
 public:
  StoreCommunicator(std::shared_ptr<Members> members, std::string prefix, int64_t rank, int64_t size)
      : members_(std::move(members)), prefix_(std::move(prefix)), rank_(rank), size_(size) {}

  int64_t rank() const override { return rank_; }
  int64_t size() const override { return size_; }

  std::unique_ptr<PendingCollective> begin(const Collective& collective) override {
    return std::make_unique<Pending>(*this, prefix_of(collective), collective);
  }

  std::unique_ptr<Communicator> split(int64_t color) override {
    std::vector<int64_t> colors(static_cast<size_t>(size_));
    const std::string prefix = str(prefix_, "/", num_calls_, ".", color);
    run({.kind = Collective::Kind::kAllGather,
         .send = &color,
         .receive = colors.data(),
         .count = 1,
         .element = Element::kInt64});
    const auto of_color = [&](int64_t end) {
      return std::count(colors.begin(), colors.begin() + end, color);
    };
    return std::make_unique<StoreCommunicator>(members_, prefix, of_color(rank_), of_color(size_));
  }

 private:
  using Kind = Collective::Kind;

  // Data to write to the store (from `from`) or to read from it (into `into`). Piece i has the key `key`.i.
  struct Message {
    std::string key;
    const char* from = nullptr;
    char* into = nullptr;
    int64_t bytes = 0;  // if read: bytes that are still missing
  };

  // Collectives are numbered per group. Messages are numbered per pair of ranks, because the other ranks of
  // the group do not take part in them.
  std::string prefix_of(const Collective& collective) {
    const int64_t other = collective.root;
    if (collective.kind == Kind::kSend) return str(prefix_, "/m/", other, ".", num_sent_[other]++, "/");
    if (collective.kind == Kind::kReceive)
      return str(prefix_, "/m/", rank_, ".", num_received_[other]++, "/");
    return str(prefix_, "/", num_calls_++, "/");
  }

  class Pending final : public PendingCollective {
   public:
    Pending(StoreCommunicator& group, std::string prefix, const Collective& collective)
        : group_(group), prefix_(std::move(prefix)), c_(collective) {
      bytes_ = c_.kind == Kind::kBarrier ? 1 : c_.count * size_of(c_.element);
      if (c_.kind == Kind::kAllReduce || c_.kind == Kind::kReduceScatter)
        heard_.resize(static_cast<size_t>(bytes_ * group_.size_));
      for (int64_t other = 0; other < group_.size_; ++other) list(other);
      copy_own();
      for (const Message& message : said_)
        for (int64_t at = 0; at < message.bytes; at += kMostBytes)
          store().set(piece_of(message.key, at),
                      std::string(message.from + at, static_cast<size_t>(std::min(kMostBytes, bytes_ - at))));
      if (wanted_.empty()) finish();
    }

    bool is_done() override {
      if (done_) return true;
      const Time now = std::chrono::steady_clock::now();
      if (now < next_look_) return false;
      while (!wanted_.empty()) {
        if (!hear(wanted_.back())) {
          group_.members_->check();
          const auto pause = (now - start_) / kWaitedOverPause;
          next_look_ = std::chrono::steady_clock::now() + std::min<Time::duration>(pause, kLongestPause);
          return false;
        }
        wanted_.pop_back();
      }
      finish();
      return true;
    }

   private:
    KeyValueStore& store() { return group_.members_->store(); }
    static std::string piece_of(const std::string& key, int64_t at) { return str(key, ".", at / kMostBytes); }
    std::string key_to(int64_t from, int64_t to) const { return str(prefix_, from, ">", to); }
    bool is_message() const { return c_.kind == Kind::kSend || c_.kind == Kind::kReceive; }
    bool is_to_all() const {
      return c_.kind != Kind::kReduceScatter && c_.kind != Kind::kAllToAll && !is_message();
    }
    const char* sent(int64_t part) const { return static_cast<const char*>(c_.send) + part * bytes_; }
    char* received(int64_t part) const { return static_cast<char*>(c_.receive) + part * bytes_; }

    // Adds what this rank sends to rank `other` to said_, and what it receives from `other` to wanted_.
    void list(int64_t other) {
      if (bytes_ == 0 || other == group_.rank_) return;
      const bool is_root = group_.rank_ == c_.root;
      const auto want = [&](int64_t from, const std::string& key, char* into) {
        wanted_.push_back({.key = key, .into = into, .bytes = bytes_});
      };
      switch (c_.kind) {
        case Kind::kSend:
          if (other == c_.root)
            said_.push_back({.key = key_to(group_.rank_, other), .from = sent(0), .bytes = bytes_});
          return;
        case Kind::kReceive:
          if (other == c_.root) want(other, key_to(other, group_.rank_), received(0));
          return;
        case Kind::kBroadcast:
          if (!is_root && other == c_.root) want(other, str(prefix_, other), received(0));
          if (is_root && said_.empty())
            said_.push_back({.key = str(prefix_, group_.rank_), .from = received(0), .bytes = bytes_});
          return;
        case Kind::kReduceScatter:
        case Kind::kAllToAll:
          said_.push_back({.key = key_to(group_.rank_, other), .from = sent(other), .bytes = bytes_});
          want(other, key_to(other, group_.rank_),
               c_.kind == Kind::kAllToAll ? received(other) : heard_.data() + other * bytes_);
          return;
        case Kind::kAllReduce:
        case Kind::kAllGather:
        case Kind::kBarrier:
          if (said_.empty())
            said_.push_back({.key = str(prefix_, group_.rank_),
                             .from = c_.kind == Kind::kBarrier ? "!" : sent(0),
                             .bytes = bytes_});
          want(other, str(prefix_, other),
               c_.kind == Kind::kBarrier     ? &mark_
               : c_.kind == Kind::kAllGather ? received(other)
                                             : heard_.data() + other * bytes_);
          return;
      }
    }

    // Copies the data that this rank sends to itself.
    void copy_own() {
      if (bytes_ == 0) return;
      const auto copy = [&](char* into, const char* from) {
        if (into != from) std::memcpy(into, from, static_cast<size_t>(bytes_));
      };
      const int64_t rank = group_.rank_;
      if (c_.kind == Kind::kAllReduce) copy(heard_.data() + rank * bytes_, sent(0));
      if (c_.kind == Kind::kReduceScatter) copy(heard_.data() + rank * bytes_, sent(rank));
      if (c_.kind == Kind::kAllGather) copy(received(rank), sent(0));
      if (c_.kind == Kind::kAllToAll) copy(received(rank), sent(rank));
    }

    // Reads the next pieces of the message. Returns true if all pieces have been read.
    bool hear(Message& message) {
      for (; message.bytes > 0; message.bytes -= std::min(kMostBytes, message.bytes)) {
        const int64_t at = bytes_ - message.bytes;
        const std::string key = piece_of(message.key, at);
        if (!store().has(key)) return false;
        const std::string piece = store().get({key})[0];
        BOUGH_CHECK(std::ssize(piece) == std::min(kMostBytes, message.bytes), name_of(c_.kind), " of ",
                    c_.count, " elements: another rank sent ", piece.size(), " bytes");
        std::memcpy(message.into + at, piece.data(), piece.size());
        if (!is_to_all()) store().erase(key);
      }
      return true;
    }

    void finish() {
      done_ = true;
      if (bytes_ == 0) return;
      if (!heard_.empty()) {
        std::vector<const void*> parts;
        for (int64_t rank = 0; rank < group_.size_; ++rank) parts.push_back(heard_.data() + rank * bytes_);
        sum_parts(parts, c_.count, c_.element, c_.receive);
      }
      const bool is_root = c_.kind == Kind::kBroadcast && group_.rank_ == c_.root;
      if (!is_to_all() || is_root || group_.size_ == 1) return;
      const int64_t readers = group_.size_ - (c_.kind == Kind::kBroadcast ? 1 : 0);
      const std::string read = prefix_ + "read";
      if (readers > 1 && store().add(read, 1) < readers) return;
      for (int64_t rank = 0; rank < group_.size_; ++rank)
        for (int64_t at = 0; at < bytes_; at += kMostBytes)
          if (c_.kind != Kind::kBroadcast || rank == c_.root) store().erase(piece_of(str(prefix_, rank), at));
      if (readers > 1) store().erase(read);
    }

    StoreCommunicator& group_;
    const std::string prefix_;
    const Collective c_;
    int64_t bytes_ = 0;  // size of each message
    std::vector<Message> said_, wanted_;
    std::vector<char> heard_;  // [size, bytes_], the inputs of a sum
    char mark_ = 0;
    bool done_ = false;
    const Time start_ = std::chrono::steady_clock::now();
    Time next_look_ = start_;
  };

  const std::shared_ptr<Members> members_;
  const std::string prefix_;
  const int64_t rank_, size_;
  uint64_t num_calls_ = 0;
  std::map<int64_t, uint64_t> num_sent_, num_received_;  // messages by peer rank
};

}  // namespace

std::unique_ptr<Communicator> store_communicator(std::unique_ptr<KeyValueStore> store,
                                                 const StoreRank& rank) {
  BOUGH_CHECK(rank.rank >= 0 && rank.rank < rank.size, "rank ", rank.rank, " of ", rank.size);
  return std::make_unique<StoreCommunicator>(std::make_shared<Members>(std::move(store), rank), "all",
                                             rank.rank, rank.size);
}

}  // namespace bough
