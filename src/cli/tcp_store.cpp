#include "cli/tcp_store.h"

#include <arpa/inet.h>
#include <c10/util/Logging.h>
#include <sys/socket.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <type_traits>

#include "base/error.h"
#include "base/log.h"
#include "base/mutex.h"

namespace bough {

namespace {

int64_t number_of(const char* name, int64_t least, int64_t most) {
  const char* const text = std::getenv(name);
  if (!text) throw UserError(str(name, ": not set, but RANK and WORLD_SIZE are; expected a number"));
  int64_t value = 0;
  const auto [end, code] = std::from_chars(text, text + std::strlen(text), value);
  if (code != std::errc() || *end != 0 || value < least || value > most)
    throw UserError(str(name, ": got ", quoted(std::string(text)), ", expected ", least, " to ", most));
  return value;
}

// Seconds to wait for a store that does not exist yet: first kFirstSeconds, silently. Then ranks that do not
// hold the store log a warning and wait for kConnectSeconds more.
constexpr double kFirstSeconds = 10;
constexpr double kConnectSeconds = 300;

c10d::TCPStoreOptions options_of(uint16_t port, bool is_server, double seconds = kConnectSeconds) {
  c10d::TCPStoreOptions options;
  options.port = port;
  options.isServer = is_server;
  options.waitWorkers = false;  // the first collective call waits for missing ranks
  options.timeout = std::chrono::milliseconds(static_cast<int64_t>(1000 * seconds));
  return options;
}

// torch also logs the exceptions that it throws, with a stack trace per rank. 3: only fatal messages are
// logged.
void say_nothing_twice() {
  if (!std::getenv("TORCH_CPP_LOG_LEVEL")) FLAGS_caffe2_log_level = 3;
}

std::string reason_of(const c10::Error& error) {
  return quoted(std::string(error.what_without_backtrace()), 300);
}

// A TCPStore waits for an answer without limit and does not expose its socket. The time limit is therefore
// set on all sockets of this process that are connected to this port.
void answer_within(double seconds, uint16_t port) {
  const auto microseconds = static_cast<int64_t>(1e6 * seconds);
  const timeval limit = {.tv_sec = microseconds / 1'000'000, .tv_usec = microseconds % 1'000'000};
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", ignored)) {
    const int socket = std::atoi(entry.path().filename().c_str());
    sockaddr_in6 peer = {};  // the port of an IPv4 address has the same offset
    socklen_t length = sizeof peer;
    if (getpeername(socket, reinterpret_cast<sockaddr*>(&peer), &length) != 0) continue;
    if ((peer.sin6_family != AF_INET && peer.sin6_family != AF_INET6) || ntohs(peer.sin6_port) != port)
      continue;
    for (const int direction : {SO_RCVTIMEO, SO_SNDTIMEO})
      setsockopt(socket, SOL_SOCKET, direction, &limit, sizeof limit);
  }
}

class TcpStore final : public KeyValueStore {
 public:
  explicit TcpStore(const StoreEnvironment& environment)
      : prefix_(str("bough/", environment.attempt, "/")),
        where_(str(environment.host, ":", environment.port)) {
    say_nothing_twice();
    std::string reason = connect(environment, kFirstSeconds);
    if (!reason.empty() && !environment.rank.holds_store) {
      log_warning(str("rank ", environment.rank.rank, ": no store at ", where_,
                      " yet (MASTER_ADDR, MASTER_PORT): ", reason, "; retrying for ", kConnectSeconds, " s"));
      reason = connect(environment, kConnectSeconds);
    }
    if (!reason.empty())
      throw UserError(str("MASTER_ADDR, MASTER_PORT: no store at ", where_, ": ", reason,
                          "; expected the address of rank 0's host and a port that is free there; check "
                          "that rank 0 was started"));
    const double seconds = environment.rank.silence_seconds;
    store_->setTimeout(std::chrono::milliseconds(static_cast<int64_t>(1000 * seconds)));
    answer_within(seconds, environment.port);
  }

  void set(const std::string& key, const std::string& value) override {
    ask([&](auto& store) { store.set(own(key), std::vector<uint8_t>(value.begin(), value.end())); });
  }
  bool has(const std::string& key) override {
    return ask([&](auto& store) { return store.check({own(key)}); });
  }
  std::vector<std::string> get(const std::vector<std::string>& keys) override {
    std::vector<std::string> all, values;
    for (const std::string& key : keys) all.push_back(own(key));
    for (const std::vector<uint8_t>& value : ask([&](auto& store) { return store.multiGet(all); }))
      values.emplace_back(value.begin(), value.end());
    return values;
  }
  int64_t add(const std::string& key, int64_t count) override {
    return ask([&](auto& store) { return store.add(own(key), count); });
  }
  void erase(const std::string& key) override {
    ask([&](auto& store) { store.deleteKey(own(key)); });
  }

 private:
  // Returns the reason of a failure, or "".
  std::string connect(const StoreEnvironment& environment, double seconds) {
    const MutexLock lock(mutex_);
    try {
      store_ = c10::make_intrusive<c10d::TCPStore>(
          environment.host, options_of(environment.port, environment.rank.holds_store, seconds));
      return "";
    } catch (const c10::Error& error) {
      return reason_of(error);
    }
  }

  std::string own(const std::string& key) const { return prefix_ + key; }

  // Makes one request at a time, like torch's own store. After a failure it makes no more requests, because
  // the answer to the failed request may still arrive.
  template <class Work>
  std::invoke_result_t<Work, c10d::TCPStore&> ask(const Work& work) {
    const MutexLock lock(mutex_);
    try {
      if (failure_.empty()) return work(*store_);
    } catch (const c10::Error& error) {
      failure_ = str("the store at ", where_, ": ", reason_of(error),
                     ": the process that holds it has died, is stopped, or cannot be reached");
    }
    throw IoError(failure_);
  }

  const std::string prefix_, where_;
  Mutex mutex_;
  c10::intrusive_ptr<c10d::TCPStore> store_ GUARDED_BY(mutex_);
  std::string failure_ GUARDED_BY(mutex_);  // why the connection ended, or ""
};

// Returns a socket that listens only on this machine's loopback address, at any port. torch's own sockets
// listen on all addresses.
int listen_to_own() {
  const int listening = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (bind(listening, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 &&
      listen(listening, SOMAXCONN) == 0)
    return listening;
  throw IoError(str("cannot get a free port of 127.0.0.1: ", std::strerror(errno)));
}

uint16_t port_of(int socket) {
  sockaddr_in address = {};
  socklen_t length = sizeof address;
  getsockname(socket, reinterpret_cast<sockaddr*>(&address), &length);
  return ntohs(address.sin_port);
}

class OwnStore final : public HeldStore {
 public:
  explicit OwnStore(int socket) : port_(port_of(socket)) {
    c10d::TCPStoreOptions options = options_of(port_, /*is_server=*/true);
    options.masterListenFd = socket;
    store_ = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  }
  uint16_t port() const override { return port_; }

 private:
  const uint16_t port_;
  c10::intrusive_ptr<c10d::TCPStore> store_;
};

}  // namespace

std::optional<StoreEnvironment> store_environment() {
  constexpr int64_t kMost = 1'000'000;
  if (!std::getenv("RANK") || !std::getenv("WORLD_SIZE")) return {};
  StoreEnvironment environment;
  environment.rank.size = number_of("WORLD_SIZE", 1, kMost);
  environment.rank.rank = number_of("RANK", 0, environment.rank.size - 1);
  if (environment.rank.size == 1) return {};
  const char* const host = std::getenv("MASTER_ADDR");
  if (!host || *host == 0)
    throw UserError("MASTER_ADDR: not set, but RANK and WORLD_SIZE are; expected the host of rank 0");
  environment.host = host;
  environment.port = static_cast<uint16_t>(number_of("MASTER_PORT", 1, 65'535));
  const char* const agent = std::getenv("TORCHELASTIC_USE_AGENT_STORE");
  environment.rank.holds_store = environment.rank.rank == 0 && !(agent && std::strcmp(agent, "True") == 0);
  const char* const attempt = std::getenv("TORCHELASTIC_RESTART_COUNT");
  environment.attempt = attempt ? attempt : "0";
  return environment;
}

std::unique_ptr<Communicator> store_communicator(const StoreEnvironment& environment) {
  return store_communicator(std::make_unique<TcpStore>(environment), environment.rank);
}

std::unique_ptr<HeldStore> hold_store() {
  const int socket = listen_to_own();
  try {
    return std::make_unique<OwnStore>(socket);
  } catch (const c10::Error& error) {
    throw IoError(
        str("cannot create the store for the ranks at 127.0.0.1:", port_of(socket), ": ", reason_of(error)));
  }
}

}  // namespace bough
