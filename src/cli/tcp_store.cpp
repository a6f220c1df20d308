#include "cli/tcp_store.h"

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <charconv>
#include <cstdlib>
#include <cstring>

#include "base/error.h"

namespace bough {

namespace {

int64_t number_of(const char* name, int64_t least, int64_t most) {
  const char* const text = std::getenv(name);
  if (!text) throw UserError(str(name, ": is missing beside RANK and WORLD_SIZE; expected a number"));
  int64_t value = 0;
  const auto [end, code] = std::from_chars(text, text + std::strlen(text), value);
  if (code != std::errc() || *end != 0 || value < least || value > most)
    throw UserError(str(name, ": got ", quoted(std::string(text)), ", expected ", least, " to ", most));
  return value;
}

c10d::TCPStoreOptions options_of(uint16_t port, bool is_server, double seconds) {
  c10d::TCPStoreOptions options;
  options.port = port;
  options.isServer = is_server;
  options.waitWorkers = false;  // a rank that never comes is the first collective's to wait for
  options.timeout = std::chrono::milliseconds(static_cast<int64_t>(1000 * seconds));
  return options;
}

// What torch throws as what the ranks throw.
template <class Work>
auto in_store(const std::string& where, const Work& work) {
  try {
    return work();
  } catch (const c10::Error& error) {
    throw IoError(str("the store at ", where, ": ", quoted(std::string(error.what_without_backtrace()), 300),
                      ": the process that holds it has died, or cannot be reached"));
  }
}

class TcpStore final : public KeyValueStore {
 public:
  TcpStore(const StoreEnvironment& environment, double seconds)
      : environment_(environment), where_(str(environment.host, ":", environment.port)) {
    store_ = in_store(where_, [&] {
      return c10::make_intrusive<c10d::TCPStore>(
          environment_.host, options_of(environment_.port, environment_.rank.holds_store, seconds));
    });
  }

  void set(const std::string& key, const std::string& value) override {
    in_store(where_, [&] { store_->set(own(key), std::vector<uint8_t>(value.begin(), value.end())); });
  }
  bool has(const std::vector<std::string>& keys) override {
    std::vector<std::string> all;
    for (const std::string& key : keys) all.push_back(own(key));
    return in_store(where_, [&] { return store_->check(all); });
  }
  std::string get(const std::string& key) override {
    const std::vector<uint8_t> value = in_store(where_, [&] { return store_->get(own(key)); });
    return {value.begin(), value.end()};
  }
  int64_t add(const std::string& key, int64_t count) override {
    return in_store(where_, [&] { return store_->add(own(key), count); });
  }
  void erase(const std::string& key) override {
    in_store(where_, [&] { store_->deleteKey(own(key)); });
  }

 private:
  std::string own(const std::string& key) const { return str("bough/", environment_.attempt, "/", key); }

  const StoreEnvironment environment_;
  const std::string where_;
  c10::intrusive_ptr<c10d::TCPStore> store_;
};

class OwnStore final : public HeldStore {
 public:
  OwnStore() : store_(c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options_of(0, true, 60))) {}
  uint16_t port() const override { return store_->getPort(); }

 private:
  const c10::intrusive_ptr<c10d::TCPStore> store_;
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
    throw UserError("MASTER_ADDR: is missing beside RANK and WORLD_SIZE; expected the host of rank 0");
  environment.host = host;
  environment.port = static_cast<uint16_t>(number_of("MASTER_PORT", 1, 65'535));
  const char* const agent = std::getenv("TORCHELASTIC_USE_AGENT_STORE");
  environment.rank.holds_store = environment.rank.rank == 0 && !(agent && std::strcmp(agent, "True") == 0);
  const char* const attempt = std::getenv("TORCHELASTIC_RESTART_COUNT");
  environment.attempt = attempt ? attempt : "0";
  return environment;
}

std::unique_ptr<KeyValueStore> connect_store(const StoreEnvironment& environment, double seconds) {
  return std::make_unique<TcpStore>(environment, seconds);
}

std::unique_ptr<Communicator> store_communicator(const StoreEnvironment& environment) {
  return store_communicator(connect_store(environment), environment.rank);
}

std::unique_ptr<HeldStore> hold_store() {
  return in_store("a free port", [] { return std::make_unique<OwnStore>(); });
}

}  // namespace bough
