#include "env/environment_http.h"

#include <map>
#include <set>

#include "base/mutex.h"
#include "env/env_test_util.h"

namespace bough {
namespace {

class HttpEnvironmentTest : public EpisodeTest {
 protected:
  HttpEnvironmentTest() {
    settings_.type = "http";
    settings_.retries = 2;
  }
  std::unique_ptr<Environment> connect(const Endpoint& endpoint) {
    settings_.url = endpoint.url("/env");
    return make_environment(settings_);
  }
};

// Counts down from the problem's answer. Keeps all requests.
class Countdown {
 public:
  Endpoint::Handler handler() {
    return [this](const Endpoint::Connection& connection) {
      const Json& request = connection.request;
      const std::string method = request.at("method"), episode = request.at("episode");
      Json reply = {{"id", request.at("id")}};
      std::string word;
      {
        const MutexLock lock(mutex_);
        if (method == "reset") {
          left_[episode] = std::stoi(request.at("problem").at("answer").get<std::string>());
          reply["messages"] = str("from ", left_[episode]);
        } else if (method == "close") {
          left_.erase(episode);
        } else {
          word = request.at("action").at("content");
          ++steps_[word];
          reply.update({{"messages", std::to_string(--left_.at(episode))}, {"reward", 0.5}});
          reply["done"] = left_.at(episode) == 0;
        }
      }
      if (word == "hang") return connection.wait_for_end();
      if (word == "busy" && steps(word) < 3) return connection.answer("", "503 Service Unavailable");
      if (word == "broken") return connection.answer("oops", "500 Internal Server Error");
      if (word == "gone") return;  // closes the connection without an answer
      if (word == "garbage") return connection.answer("what?");
      if (word == "huge") {
        connection.send("HTTP/1.1 200 OK\r\nContent-Length: 100000000\r\n\r\n");
        const std::string part(1 << 20, 'x');
        for (int i = 0; i < 100 && connection.send(part); ++i) {
        }
        return;
      }
      if (word == "error") reply = {{"error", "no such thing"}};
      connection.answer(reply.dump());
    };
  }
  int64_t steps(const std::string& word) {
    const MutexLock lock(mutex_);
    return steps_[word];
  }
  size_t num_open() {
    const MutexLock lock(mutex_);
    return left_.size();
  }

 private:
  Mutex mutex_;
  std::map<std::string, int> left_ GUARDED_BY(mutex_);
  std::map<std::string, int64_t> steps_ GUARDED_BY(mutex_);
};

TEST_F(HttpEnvironmentTest, HoldsConversationsSideBySide) {
  Countdown countdown;
  Endpoint endpoint(countdown.handler());
  auto environment = connect(endpoint);
  const uint64_t first = begin(*environment, problem(2)), second = begin(*environment, problem(9));
  std::map<uint64_t, std::string> opened;
  for (int i = 0; i < 2; ++i) {
    const EpisodeReply reply = wait();
    ASSERT_EQ(reply.failure, EpisodeFailure::kNone) << reply.message;
    opened[reply.episode] = reply.observation.messages[0]["content"];
  }
  EXPECT_EQ(opened[first], "from 2");
  EXPECT_EQ(opened[second], "from 9");
  environment->step(first, says("x"));
  EXPECT_EQ(wait().observation.messages[0]["content"], "1");
  environment->step(first, says("x"));
  EXPECT_TRUE(wait().observation.done);
  environment->end(first);
  environment->step(second, says("x"));
  EXPECT_EQ(wait().observation.messages[0]["content"], "8");
  for (int i = 0; i < 20; ++i) EXPECT_EQ(say(*environment, "x").observation.reward, 0.5);
  EXPECT_EQ(countdown.num_open() > 0, true);
  environment.reset();
  EXPECT_EQ(countdown.num_open(), 0u) << "the endpoint is told of the end of all";
}

TEST_F(HttpEnvironmentTest, AFailureEndsOnlyItsConversation) {
  settings_.timeout_seconds = 3;
  Countdown countdown;
  Endpoint endpoint(countdown.handler());
  const auto environment = connect(endpoint);
  const uint64_t bystander = begin(*environment, problem(100));
  wait();
  using enum EpisodeFailure;
  const struct {
    const char* word;
    EpisodeFailure failure;
    const char* message;
    int64_t steps;
  } kFaults[] = {{"hang", kTimeout, "no answer within 3 s", 1},
                 {"broken", kCrash, "the endpoint answered 500 Internal Server Error: 'oops'", 1},
                 {"gone", kCrash, "closed the connection", 1},
                 {"garbage", kProtocol, "'what?', which is not a JSON object", 1},
                 {"huge", kProtocol, "longer than 1048576 bytes", 1},
                 {"error", kError, "no such thing", 1},
                 {"busy", kNone, "", 3}};
  for (const auto& [word, failure, message, steps] : kFaults) {
    const EpisodeReply reply = say(*environment, word);
    EXPECT_STREQ(failure_name(reply.failure), failure_name(failure)) << word << ": " << reply.message;
    EXPECT_NE(reply.message.find(message), std::string::npos) << word << ": " << reply.message;
    EXPECT_EQ(countdown.steps(word), steps) << word << ": only what came to nothing is tried again";
    environment->step(bystander, says("x"));
    EXPECT_EQ(wait().failure, kNone);
  }
}

TEST_F(HttpEnvironmentTest, OpeningIsTriedAgain) {
  std::atomic<int> num_resets = 0;
  Mutex mutex;
  std::set<std::string> episodes;
  Endpoint endpoint([&](const Endpoint::Connection& connection) {
    if (connection.request.at("method") == "reset") {
      const MutexLock lock(mutex);
      episodes.insert(connection.request.at("episode"));
      if (++num_resets == 1) return;
      if (num_resets == 2) return connection.answer("", "500 Internal Server Error");
    }
    connection.answer("{}");
  });
  const auto environment = connect(endpoint);
  begin(*environment, problem(1));
  EXPECT_EQ(wait().failure, EpisodeFailure::kNone);
  EXPECT_EQ(num_resets, 3);
  EXPECT_EQ(episodes.size(), 1u) << "as the same conversation";
}

TEST_F(HttpEnvironmentTest, AnEndpointThatIsGoneFailsAndMayComeBack) {
  Countdown countdown;
  auto endpoint = std::make_unique<Endpoint>(countdown.handler());
  const uint16_t port = endpoint->port();
  settings_.retries = 0;
  const auto environment = connect(*endpoint);
  endpoint.reset();
  begin(*environment, problem(1));
  const EpisodeReply reply = wait();
  EXPECT_EQ(reply.failure, EpisodeFailure::kCrash);
  EXPECT_NE(reply.message.find("no connection"), std::string::npos) << reply.message;
  environment->end(reply.episode);
  endpoint = std::make_unique<Endpoint>(countdown.handler(), port);
  EXPECT_EQ(say(*environment, "x").failure, EpisodeFailure::kNone);
}

TEST_F(HttpEnvironmentTest, WrongSettingsAreNamed) {
  settings_.url = "https://example.org/env";
  EXPECT_NE(error_of().find("environment.url: got 'https://example.org/env': https is not supported"),
            std::string::npos)
      << error_of();
  settings_.url = "";
  EXPECT_NE(error_of().find("environment.url is missing"), std::string::npos) << error_of();
  settings_ = {.type = "guess", .server = "run"};
  EXPECT_NE(error_of().find("environment.server: got 'run' with type 'guess'"), std::string::npos)
      << error_of();
}

}  // namespace
}  // namespace bough
