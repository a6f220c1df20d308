#include "env/reward_protocol.h"

#include <gtest/gtest.h>

#include "base/json.h"
#include "net/worker_protocol.h"

namespace bough {
namespace {

using Kind = WorkerReply::Kind;

TEST(WorkerProtocol, RequestIsOneLineOfJson) {
  Problem problem{
      "3", "", {}, "#### 4", {{"prompt", "raw"}, {"completion", "c"}, {"level", 2}, {"answer", 4}}};
  const std::string line = encode_request(9, {"two\nlines", "cut \xE2\x82", &problem});
  ASSERT_EQ(line.find('\n'), std::string::npos);
  const Json json = Json::parse(line);
  EXPECT_EQ(json, Json({{"id", 9},
                        {"prompt", "two\nlines"},
                        {"completion", "cut \xEF\xBF\xBD"},
                        {"answer", 4},
                        {"fields", {{"level", 2}}}}));
}

TEST(WorkerProtocol, AnswerComesFromTheProblemIfTheRecordHasNone) {
  Problem problem{"3", "", {}, "4", {{"Solution", "4"}}};
  const Json json = Json::parse(encode_request(0, {"", "", &problem}));
  EXPECT_EQ(json["answer"], "4");
  EXPECT_EQ(json["fields"], Json({{"Solution", "4"}}));
}

TEST(WorkerProtocol, ReadsReplies) {
  EXPECT_EQ(parse_reply(R"({"ready": true})").kind, Kind::ready);
  const WorkerReply refused = parse_reply(R"({"ready": false, "error": "no file"})");
  EXPECT_EQ(refused.kind, Kind::refused);
  EXPECT_EQ(refused.message, "no file");
  const WorkerReply reward = parse_reply(R"({"id": 7, "reward": -0.5})");
  EXPECT_EQ(reward.kind, Kind::reward);
  EXPECT_EQ(reward.id, 7);
  EXPECT_EQ(reward.reward, -0.5);
  EXPECT_EQ(parse_reply(R"({"id": 7, "reward": 1})").reward, 1);
  const WorkerReply failure = parse_reply(R"({"id": 8, "error": "ValueError: x"})");
  EXPECT_EQ(failure.kind, Kind::failure);
  EXPECT_EQ(failure.id, 8);
  EXPECT_EQ(failure.message, "ValueError: x");
}

TEST(WorkerProtocol, InvalidRepliesAreMalformed) {
  for (const char* line :
       {"", "hello", "[]", "7", "null", "{}", R"({"id": 7})", R"({"id": "7", "reward": 1})",
        R"({"id": 7, "reward": NaN})", R"({"id": 7, "reward": 1e999})", R"({"reward": 1})",
        R"({"id": 7, "error": 3})", R"({"ready": 1})", R"({"ready": false})", R"({"id": 7, "reward": 1} x)",
        "\xFF", R"({"id": 1.5, "reward": 1})"}) {
    const WorkerReply reply = parse_reply(line);
    EXPECT_EQ(reply.kind, Kind::malformed) << line;
    EXPECT_FALSE(reply.message.empty());
  }
}

TEST(WorkerProtocol, ARewardThatIsNotFiniteFailsItsCall) {
  for (const char* line :
       {R"({"id": 7, "reward": null})", R"({"id": 7, "reward": "1"})", R"({"id": 7, "reward": [1]})"}) {
    const WorkerReply reply = parse_reply(line);
    EXPECT_EQ(reply.kind, Kind::failure) << line;
    EXPECT_EQ(reply.id, 7);
    EXPECT_NE(reply.message.find("expected a finite number"), std::string::npos) << reply.message;
  }
}

TEST(WorkerProtocol, AnEndpointMayLeaveOutTheId) {
  const WorkerReply reply = parse_reply(R"({"reward": 0.25})", /*needs_id=*/false);
  EXPECT_EQ(reply.kind, Kind::reward);
  EXPECT_FALSE(reply.id);
  EXPECT_EQ(parse_reply(R"({"id": "7", "reward": 1})", false).kind, Kind::malformed)
      << "but not get it wrong";
}

TEST(WorkerProtocol, MessagesAreBounded) {
  std::string text(999, 'x');
  for (int i = 0; i < 1'000'000; ++i) text += "é";
  const WorkerReply reply = parse_reply(dump_line({{"id", 1}, {"error", text}}));
  EXPECT_EQ(reply.message, std::string(999, 'x') + "…") << "cut between characters";
  EXPECT_EQ(shortened("short"), "short");
}

}  // namespace
}  // namespace bough
