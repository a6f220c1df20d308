#include "data/rollout_file.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <zstd.h>

#include <cfloat>
#include <cmath>
#include <csignal>
#include <cstring>
#include <fstream>
#include <limits>
#include <random>

#include "base/base_test_util.h"
#include "base/error.h"
#include "base/file.h"

namespace bough {
namespace {

namespace fs = std::filesystem;

class RolloutFile : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(::testing::TempDir()) /
              str("rollout_file_", ::testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  fs::path write(const std::string& name, const std::string& text) const {
    std::ofstream(folder_ / name, std::ios::binary) << text;
    return folder_ / name;
  }
  std::vector<Trajectory> read(const std::string& text, const RolloutReadOptions& options = {}) const {
    return read_rollouts(write("r.jsonl", text), options);
  }
  // The message of the UserError thrown when reading `text`.
  std::string refusal(const std::string& text, const RolloutReadOptions& options = {}) const {
    try {
      read(text, options);
    } catch (const UserError& error) {
      return error.what();
    }
    return "(accepted)";
  }

  fs::path folder_;
};

// Expects `message` to contain every one of the words.

const char* kGood =
    R"({"group": "a", "input_ids": [5, 6, 7], "loss_mask": [0, 1, 1], "logprobs": [0, -0.5, -1.25e-1], )"
    R"("reward": 1})";

// kGood with the value of one field replaced.
std::string with(const std::string& field, const std::string& value) {
  Json line = Json::parse(kGood);
  line[field] = "@";
  std::string text = line.dump();
  return text.replace(text.find("\"@\""), 3, value);
}
std::string without(const std::string& field) {
  Json line = Json::parse(kGood);
  line.erase(field);
  return line.dump();
}

TEST_F(RolloutFile, ReadsEveryField) {
  const auto rollouts =
      read(R"({"group": "gr\u00fc\u00df", "input_ids": [5,6 , 7], "loss_mask": [0,1,1], )"
           R"("logprobs": [0, -0.5, -1.25e-1],)"
           R"( "temperature": 0.7, "versions": [-1, 3, 4], "reward": 2.5, "advantage": [0, 1, -2], )"
           R"("more": {"x": [1]}})"
           "\r\n\n   \n"
           R"({"input_ids":[],"loss_mask":[],"logprobs":[],"advantage":1e-999,"temperature":0.7})");
  ASSERT_EQ(rollouts.size(), 2u);
  const Trajectory& first = rollouts[0];
  EXPECT_EQ(first.group, "grüß");
  EXPECT_EQ(first.input_ids, (std::vector<int32_t>{5, 6, 7}));
  EXPECT_EQ(first.loss_mask, (std::vector<uint8_t>{0, 1, 1}));
  EXPECT_EQ(first.logprobs, (std::vector<float>{0, -0.5f, -0.125f}));
  EXPECT_EQ(first.temperature, 0.7);
  EXPECT_EQ(first.versions, (std::vector<int32_t>{-1, 3, 4}));
  EXPECT_EQ(first.reward, 2.5);
  EXPECT_EQ(first.advantage, (std::vector<float>{0, 1, -2}));
  EXPECT_EQ(first.fields, Json::parse(R"({"more": {"x": [1]}})"));
  EXPECT_TRUE(rollouts[1].input_ids.empty());
  EXPECT_EQ(rollouts[1].advantage, std::vector<float>{0.0f});
  EXPECT_FALSE(rollouts[1].reward.has_value());
  EXPECT_TRUE(rollouts[1].fields.is_object());
}

TEST_F(RolloutFile, ReadsAllFieldsOfTrajectoryRows) {
  Json line = Json::parse(kGood);
  line.update(Json::parse(
      R"({"trajectory": "t7", "turn": 2, "turns": [-1, 0, 1], "top_ids": [[], [6, 9], [7]],)"
      R"( "top_logprobs": [[], [-0.5, -2], [-0.125]], "rewards": {"right": 1, "short": -0.5},)"
      R"( "turn_rewards": [0.25, 1], "valid": false, "prompt": "p", "completion": "c", "answer": 42,)"
      R"( "finish_reason": "length", "reward_failure": "late", "raw_logprobs": [-1, -2], "own": [1, 2, 3]})"));
  RolloutReadOptions options;
  options.columns.push_back("own");
  const Trajectory row = read(line.dump(), options)[0];
  EXPECT_EQ(row.trajectory, "t7");
  EXPECT_EQ(row.turn, 2);
  EXPECT_EQ(row.turns, (std::vector<int32_t>{-1, 0, 1}));
  EXPECT_EQ(row.top_ids, (std::vector<std::vector<int32_t>>{{}, {6, 9}, {7}}));
  EXPECT_EQ(row.top_logprobs, (std::vector<std::vector<float>>{{}, {-0.5f, -2}, {-0.125f}}));
  EXPECT_EQ(row.rewards, (std::map<std::string, double>{{"right", 1}, {"short", -0.5}}));
  EXPECT_EQ(row.turn_rewards, (std::vector<double>{0.25, 1}));
  EXPECT_FALSE(row.valid);
  EXPECT_FALSE(row.in_loss());
  EXPECT_EQ(row.prompt, "p");
  EXPECT_EQ(row.completion, "c");
  EXPECT_FALSE(row.answer) << "not a text: kept as it stands";
  EXPECT_EQ(row.fields, Json::parse(R"({"answer": 42})"));
  EXPECT_EQ(row.finish_reason, "length");
  EXPECT_EQ(row.reward_failure, "late");
  EXPECT_EQ(row.columns.at("raw_logprobs"), (std::vector<double>{-1, -2}));  // for the generated tokens
  EXPECT_EQ(row.columns.at("own"), (std::vector<double>{1, 2, 3}));
  line["valid"] = false;
  line.erase("reward");
  EXPECT_NO_THROW(read(line.dump())) << "an invalid row needs no reward";
  line["valid"] = true;
  expect_names(refusal(line.dump()), {"'reward'", "nothing"});
}

// Checks the order and the format of the fields in files that a run writes.
TEST_F(RolloutFile, WritesTheFieldsInTheirOrder) {
  Trajectory row = read(with("versions", "[-1, 3, 3]"))[0];
  row.advantage = {-0.5f};
  row.prompt = "what?";
  row.completion = "that";
  row.answer = "7";
  row.finish_reason = "stop";
  row.reward_failure = "late";
  row.trained = false;
  row.fields["zebra"] = {1, 2};
  row.fields["prompt"] = "a field with a form of its own wins";
  write_rollouts(folder_ / "w.jsonl", {row});
  EXPECT_EQ(
      read_file(folder_ / "w.jsonl"),
      R"({"group": "a", "input_ids": [5, 6, 7], "loss_mask": [0, 1, 1], "logprobs": [0, -0.5, -0.125], )"
      R"("temperature": 1, "versions": [-1, 3, 3], "reward": 1, "advantage": -0.5, "answer": "7", )"
      R"("completion": "that", "finish_reason": "stop", "prompt": "what?", "reward_failure": "late", )"
      R"("zebra": [1,2], "trained": false})"
      "\n");
}

// A list of advantages for a sequence without tokens is empty. It must not be read as "not given": the
// written file would then lack the advantage, and reading the file would fail.
TEST_F(RolloutFile, AdvantageOfAnEmptySequenceStaysGiven) {
  const auto rollouts = read(R"({"input_ids": [], "loss_mask": [], "logprobs": [], "advantage": []})");
  EXPECT_EQ(rollouts[0].advantage, std::vector<float>{0.0f});
  write_rollouts(folder_ / "w.jsonl", rollouts);
  EXPECT_EQ(read_rollouts(folder_ / "w.jsonl")[0].advantage, std::vector<float>{0.0f});
}

TEST_F(RolloutFile, PositionZeroIsNeverTrained) {
  Trajectory rollout = read(with("loss_mask", "[1, 1, 0]"))[0];
  EXPECT_FALSE(rollout.trains(0));
  EXPECT_TRUE(rollout.trains(1));
  EXPECT_FALSE(rollout.trains(2));
}

TEST_F(RolloutFile, NamesLineFieldAndPosition) {
  const std::string good = str(kGood, "\n");
  expect_names(refusal(good + "\n" + with("input_ids", "[5, -6, 7]")),
               {"r.jsonl", "line 3", "'input_ids'", "position 1 (counted from 0)", "'-6'"});
  expect_names(refusal(with("input_ids", "[5, 6, 7.0]")),
               {"line 1", "'input_ids'", "position 2", "'7.0'", "integer"});
  expect_names(refusal(with("input_ids", "[5, 6, true]")), {"'input_ids'", "position 2", "'true'"});
  expect_names(refusal(with("input_ids", "[5, 6, 99999999999999999999]")),
               {"position 2", "'99999999999999999999'"});
  expect_names(refusal(with("input_ids", "[5, 6, 2147483648]")), {"position 2", "2147483647"});
  expect_names(refusal(with("input_ids", "[5, 6, 4096]"), {.vocab_size = 4096}),
               {"position 2", "'4096'", "4095"});
  EXPECT_EQ(read(with("input_ids", "[5, 6, 4095]"), {.vocab_size = 4096})[0].input_ids[2], 4095);
  expect_names(refusal(with("input_ids", "\"5 6 7\"")), {"'input_ids'", "expected a list"});
  expect_names(refusal(with("input_ids", "[[5], 6, 7]")), {"'input_ids'", "position 0"});
  expect_names(refusal(with("loss_mask", "[0, 1]")), {"'loss_mask'", "a list of 2", "expected 3"});
  expect_names(refusal(with("loss_mask", "[0, 2, 1]")), {"'loss_mask'", "position 1", "'2'"});
  expect_names(refusal(with("loss_mask", "[0, 1, 0.5]")), {"'loss_mask'", "position 2", "'0.5'"});
  expect_names(refusal(with("logprobs", "[0, -1, 1e999]")), {"'logprobs'", "position 2", "'1e999'", "float"});
  expect_names(refusal(with("logprobs", "[0, -1e39, 0]")), {"'logprobs'", "position 1", "'-1e39'"});
  expect_names(refusal(with("logprobs", "[0, NaN, 0]")), {"'logprobs'", "position 1", "'NaN'", "no NaN"});
  expect_names(refusal(with("logprobs", "[0, -Infinity, 0]")), {"position 1", "'-Infinity'"});
  expect_names(refusal(with("logprobs", "[0, null, 0]")), {"position 1", "'null'"});
  for (const char* number : {"01", "+1", ".5", "1.", "1e", "0x10", "1e+", "-", "--1", "inf", "1_000"})
    expect_names(refusal(with("logprobs", str("[0, ", number, ", 0]"))),
                 {"'logprobs'", "position 1", number});
  expect_names(refusal(with("versions", "[-1, -2, 0]")), {"'versions'", "position 1"});
  expect_names(refusal(with("versions", "[]")), {"'versions'", "a list of 0"});
  expect_names(refusal(with("reward", "null")), {"'reward'", "'null'"});
  expect_names(refusal(with("reward", "1e999")), {"'reward'", "'1e999'", "double"});
  expect_names(refusal(with("reward", "NaN")), {"'reward'", "'NaN'"});
  expect_names(refusal(with("advantage", "[1, 2]")), {"'advantage'", "a list of 2", "expected 3"});
  expect_names(refusal(with("advantage", "1e60")), {"'advantage'", "'1e60'"});
  expect_names(refusal(with("temperature", "0")), {"'temperature'", "above 0"});
  expect_names(refusal(with("temperature", "\"1\"")), {"'temperature'"});
  expect_names(refusal(with("group", "7")), {"'group'", "'7'", "a string"});
  expect_names(refusal(with("more", "[1, nan]")), {"'more'", "JSON"});
  expect_names(refusal(with("trajectory", "7")), {"'trajectory'", "'7'", "a string"});
  expect_names(refusal(with("turn", "-1")), {"'turn'", "'-1'", "an integer from 0"});
  expect_names(refusal(with("turns", "[0, -2, 0]")), {"'turns'", "position 1", "'-2'"});
  expect_names(refusal(with("turns", "[0, 1]")), {"'turns'", "a list of 2", "expected 3"});
  expect_names(refusal(with("valid", "1")), {"'valid'", "'1'", "true or false"});
  expect_names(refusal(with("rewards", "[1]")), {"'rewards'", "'[1]", "an object of numbers"});
  expect_names(refusal(with("rewards", R"({"right": 1e999})")), {"'rewards.right'", "'1e999'"});
  expect_names(refusal(with("rewards", R"({"a": 1, "a": 1})")), {"'rewards.a'", "twice"});
  expect_names(refusal(with("turn_rewards", "[0, null]")), {"'turn_rewards'", "position 1", "'null'"});
  expect_names(refusal(with("top_ids", "[[], [1]]")), {"'top_ids'", "a list of 2", "expected 3"});
  expect_names(refusal(with("top_ids", "[[], 1, []]")), {"'top_ids'", "position 1 ", "expected a list"});
  expect_names(refusal(with("top_ids", "[[], [6, 7.5], []]")),
               {"'top_ids'", "position 1, 1 (counted", "'7.5'"});
  expect_names(refusal(with("top_logprobs", "[[], [-1, x], []]")),
               {"'top_logprobs'", "position 1, 1 (counted", "'x'"});
  Json top = Json::parse(with("top_ids", "[[], [6, 7], [8]]"));
  top["top_logprobs"] = {Json::array(), {-1}, {-1}};
  expect_names(refusal(top.dump()), {"'top_logprobs'", "position 1 ", "a list of 1", "expected 2"});
  expect_names(refusal(with("raw_logprobs", "[0]")), {"'raw_logprobs'", "a list of 1", "expected 3", "or 2"});
  expect_names(refusal(with("more", "1e999")), {"'more'"});
}

TEST_F(RolloutFile, NamesWhatIsMissing) {
  for (const char* field : {"input_ids", "loss_mask", "logprobs"})
    expect_names(refusal(without(field)), {"line 1", field, "nothing"});
  expect_names(refusal(without("reward")), {"'reward'", "advantage"});
  RolloutReadOptions relaxed;
  relaxed.require_reward_or_advantage = false;
  expect_names(refusal(with("temperature", "0"), relaxed), {"'temperature'", "above 0"});
  relaxed.allow_greedy = true;
  EXPECT_EQ(read(with("temperature", "0"), relaxed)[0].temperature, 0);
  expect_names(refusal(with("temperature", "-1"), relaxed), {"'temperature'", "above 0"});
  EXPECT_EQ(read(without("reward"), relaxed).size(), 1u);
  expect_names(refusal(without("group"), relaxed), {"'group'"});
  Json line = Json::parse(without("group"));
  line["advantage"] = 0.5;
  EXPECT_EQ(read(line.dump())[0].advantage, std::vector<float>{0.5f});
  line = Json::parse(without("logprobs"));
  line["logprob"] = Json::array();
  expect_names(refusal(line.dump()), {"'logprobs'", "'logprob'"});
}

TEST_F(RolloutFile, RefusesLinesThatAreNotOneObject) {
  for (const char* text :
       {"[1]", "{", "}", "{\"group\"", "{\"group\": ", "{\"group\": \"a", "{group: 1}", "null", "\x01"})
    expect_names(refusal(str(kGood, "\n", text)), {"line 2"});
  expect_names(refusal(str(kGood, kGood)), {"line 1", "column", "one object per line"});
  expect_names(refusal(std::string(kGood).substr(0, 60)), {"line 1"});
  expect_names(refusal(with("more", "[1, 2")), {"line 1"});
  expect_names(refusal(with("more", std::string(100000, '['))), {"nested"});
  expect_names(refusal(with("more", "\"\xff\"")), {"'more'"});
  expect_names(refusal("{\"reward\": 1, \"reward\": 2}"), {"'reward'", "twice"});
  expect_names(refusal("{\"more\": 1, \"more\": 2}"), {"'more'", "twice"});
  expect_names(refusal(R"({"prompt": "a", "prompt": "b"})"), {"'prompt'", "twice"});
  expect_names(refusal(R"({"raw_logprobs": [], "raw_logprobs": []})"), {"'raw_logprobs'", "twice"});
}

// An error quotes only a little of the input, whatever the input is.
TEST_F(RolloutFile, MessagesAreShort) {
  EXPECT_LT(refusal(with("input_ids", "[" + std::string(1 << 20, '7') + "]")).size(), 400u);
  EXPECT_LT(refusal(std::string(1 << 20, 'x')).size(), 400u);
  EXPECT_LT(refusal("{\"" + std::string(1 << 20, 'x') + "\": nope}").size(), 400u);
}

// A line that is cut anywhere is refused with a UserError. A line with one changed byte is refused or read.
TEST_F(RolloutFile, SurvivesEveryTruncationAndRandomDamage) {
  const std::string line = with("versions", "[-1, 3, 4]");
  for (size_t length = 1; length < line.size(); ++length)
    EXPECT_NE(refusal(line.substr(0, length)), "(accepted)");
  std::mt19937 random(7);
  int num_accepted = 0;
  for (int i = 0; i < 1000; ++i) {
    std::string damaged = line;
    damaged[random() % damaged.size()] = static_cast<char>(random());
    num_accepted += refusal(damaged) == "(accepted)";
  }
  EXPECT_GT(num_accepted, 0);  // changed bytes inside numbers or group names
  EXPECT_LT(num_accepted, 500);
}

TEST_F(RolloutFile, RefusesMixedTemperatures) {
  expect_names(refusal(str(kGood, "\n\n", with("temperature", "0.7"))),
               {"line 3", "'temperature'", "0.7", "line 1"});
  EXPECT_EQ(read(str(kGood, "\n", with("temperature", "1.0"))).size(), 2u);
}

TEST_F(RolloutFile, RefusesFilesWithoutRollouts) {
  EXPECT_THROW(read_rollouts(folder_), UserError);
  EXPECT_THROW(read_rollouts(folder_ / "missing.jsonl"), UserError);
  EXPECT_THROW(read(""), UserError);
  expect_names(refusal("\n \n"), {"no rollouts"});
}

Trajectory random_rollout(std::mt19937& random) {
  const auto random_float = [&] {
    float value;
    do {
      const uint32_t bits = random();
      std::memcpy(&value, &bits, sizeof value);
    } while (!std::isfinite(value));
    return value;
  };
  Trajectory rollout;
  const size_t length = random() % 40;
  rollout.group = str("g", random());
  for (size_t i = 0; i < length; ++i) {
    rollout.input_ids.push_back(static_cast<int32_t>(random() >> 1));
    rollout.loss_mask.push_back(random() % 2);
    rollout.logprobs.push_back(random_float());
    rollout.versions.push_back(static_cast<int32_t>(random() % 100) - 1);
  }
  if (random() % 2) rollout.versions.clear();
  rollout.temperature = 0.7;
  if (random() % 2) rollout.reward = random() * 1e-3;
  if (random() % 2 || !rollout.reward) rollout.advantage.push_back(random_float());
  else if (random() % 2) rollout.advantage = rollout.logprobs;
  rollout.fields = Json::object();
  if (random() % 2) rollout.fields["text"] = "line\nbreak \"quoted\" \u2028";
  if (random() % 2) rollout.trajectory = str("t ", random());
  if (random() % 2) rollout.turn = static_cast<int64_t>(random() % 9);
  if (random() % 2)
    for (size_t i = 0; i < length; ++i) rollout.turns.push_back(static_cast<int32_t>(random() % 4) - 1);
  if (random() % 2)
    for (size_t i = 0; i < length; ++i) {
      rollout.top_ids.emplace_back(random() % 3, static_cast<int32_t>(random() % 100));
      rollout.top_logprobs.emplace_back(rollout.top_ids.back().size(), random_float());
    }
  if (random() % 2) rollout.rewards = {{"right", random() * 1e-3}, {"a \"name\"", -1}};
  if (random() % 2) rollout.turn_rewards.assign(random() % 3, random() * 1e-3);
  rollout.valid = random() % 4 != 0;
  rollout.trained = random() % 4 != 0;
  if (random() % 2) rollout.prompt = "p\n", rollout.completion = "", rollout.reward_failure = "why";
  if (random() % 2) rollout.answer = "42", rollout.finish_reason = "stop";
  if (random() % 2) rollout.columns["raw_logprobs"].assign(length, random() * -1e-9);
  if (random() % 2)
    rollout.columns["truncated_logprobs"].assign(static_cast<size_t>(rollout.num_generated()),
                                                 random() * -1e-9);
  return rollout;
}

void expect_equal(const Trajectory& a, const Trajectory& b) {
  EXPECT_EQ(a.group, b.group);
  EXPECT_EQ(a.input_ids, b.input_ids);
  EXPECT_EQ(a.loss_mask, b.loss_mask);
  EXPECT_EQ(a.logprobs, b.logprobs);
  EXPECT_EQ(a.versions, b.versions);
  EXPECT_EQ(a.temperature, b.temperature);
  EXPECT_EQ(a.reward, b.reward);
  EXPECT_EQ(a.advantage, b.advantage);
  EXPECT_EQ(a.trajectory, b.trajectory);
  EXPECT_EQ(a.turn, b.turn);
  EXPECT_EQ(a.turns, b.turns);
  EXPECT_EQ(a.top_ids, b.top_ids);
  EXPECT_EQ(a.top_logprobs, b.top_logprobs);
  EXPECT_EQ(a.columns, b.columns);
  EXPECT_EQ(a.rewards, b.rewards);
  EXPECT_EQ(a.turn_rewards, b.turn_rewards);
  EXPECT_EQ(a.valid, b.valid);
  EXPECT_EQ(a.trained, b.trained);
  for (const auto text : {&Trajectory::prompt, &Trajectory::completion, &Trajectory::answer,
                          &Trajectory::finish_reason, &Trajectory::reward_failure})
    EXPECT_EQ(a.*text, b.*text);
  EXPECT_EQ(a.fields, b.fields);
}

TEST_F(RolloutFile, RoundTripsExactly) {
  std::mt19937 random(1);
  std::vector<Trajectory> rollouts;
  for (int i = 0; i < 500; ++i) rollouts.push_back(random_rollout(random));
  rollouts.emplace_back().temperature = 0.7;
  rollouts.back().input_ids = {1, 2, 3, 4, 5, 6};
  rollouts.back().loss_mask.assign(6, 1);
  rollouts.back().versions.clear();
  rollouts.back().logprobs = {0.0f,   0.1f, FLT_MIN, FLT_MAX, std::numeric_limits<float>::denorm_min(),
                              -1e-30f};
  rollouts.back().advantage = {1.5f};
  for (const char* name : {"r.jsonl", "r.jsonl.zst"}) {
    const fs::path path = folder_ / name;
    write_rollouts(path, rollouts);
    const std::vector<Trajectory> again = read_rollouts(path);
    ASSERT_EQ(again.size(), rollouts.size());
    for (size_t i = 0; i < again.size(); ++i) {
      expect_equal(again[i], rollouts[i]);
      expect_equal(parse_rollout(rollout_to_json(rollouts[i]), "here"), rollouts[i]);
    }
  }
  EXPECT_LT(fs::file_size(folder_ / "r.jsonl.zst"), fs::file_size(folder_ / "r.jsonl") * 3 / 4);
}

// Pieces of decompressed text end inside lines. Files may have several zstd frames (`cat a.zst b.zst`).
TEST_F(RolloutFile, ReadsZstdOfManyFramesAndLongLines) {
  Trajectory rollout = read(kGood)[0];
  for (int i = 0; i < 700'000; ++i) {
    rollout.input_ids.push_back(i * 1000);
    rollout.loss_mask.push_back(1);
    rollout.logprobs.push_back(-i / 3.0f);
  }
  write_rollouts(folder_ / "a.jsonl.zst", {rollout, read(kGood)[0]});
  const std::string frame = read_file(folder_ / "a.jsonl.zst");
  const auto again = read_rollouts(write("b.jsonl.zst", frame + frame));
  ASSERT_EQ(again.size(), 4u);
  expect_equal(again[0], rollout);
  expect_equal(again[2], rollout);
  expect_equal(again[3], read(kGood)[0]);
}

TEST_F(RolloutFile, AGroupIsReadWithoutTheOthers) {
  std::vector<Trajectory> rows;
  for (const char* group : {"a", "a", "b", "c"}) {
    rows.push_back(read(kGood)[0]);
    rows.back().group = group;
  }
  for (const char* name : {"own.jsonl.zst", "plain.jsonl"}) {  // plain text stands for files of one frame
    write_rollouts(folder_ / name, rows);
    const RolloutGroups groups(folder_ / name);
    ASSERT_EQ(groups.size(), 3u) << name;
    ASSERT_EQ(groups.read(0).size(), 2u);
    EXPECT_EQ(groups.read(1).at(0).group, "b");
    expect_equal(groups.read(2).at(0), rows[3]);
  }
  // Frames that are appended: what is incomplete is left out, and a damaged group is an error of its own.
  const std::string one = rollouts_frame(std::span(rows).first(2)), two = rollouts_frame({&rows[2], 1});
  EXPECT_EQ(RolloutGroups(write("c.jsonl.zst", one + two + two.substr(0, 9))).size(), 2u);
  EXPECT_EQ(RolloutGroups(write("c.jsonl.zst", one + two.substr(0, 9))).size(), 1u);
  EXPECT_EQ(read_rollouts(write("c.jsonl.zst", one + two)).size(), 3u);
  std::string damaged = one + two;
  damaged[one.size() / 2] ^= 1;
  const RolloutGroups groups(write("c.jsonl.zst", damaged));
  EXPECT_EQ(groups.read(1).at(0).group, "b");
  EXPECT_THROW(groups.read(0), UserError);
}

TEST_F(RolloutFile, RefusesDamagedZstd) {
  write_rollouts(folder_ / "a.jsonl.zst", {read(kGood)[0], read(kGood)[0]});
  const std::string frame = read_file(folder_ / "a.jsonl.zst");
  for (size_t length = 1; length < frame.size(); ++length)
    EXPECT_THROW(read_rollouts(write("b.jsonl.zst", frame.substr(0, length))), UserError) << length;
  std::string flipped = frame;
  flipped[frame.size() / 2] ^= 1;
  EXPECT_THROW(read_rollouts(write("b.jsonl.zst", flipped)), UserError);
  EXPECT_THROW(read_rollouts(write("b.jsonl.zst", kGood)), UserError);
}

TEST_F(RolloutFile, RefusesToWriteBrokenRollouts) {
  Trajectory rollout = read(kGood)[0];
  rollout.logprobs[1] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_THROW(write_rollouts(folder_ / "w.jsonl", {rollout}), InternalError);
  rollout = read(kGood)[0];
  rollout.loss_mask.pop_back();
  EXPECT_THROW(write_rollouts(folder_ / "w.jsonl", {rollout}), InternalError);
  EXPECT_FALSE(fs::exists(folder_ / "w.jsonl"));
}

// Simulates a full disk: a process limit stops files from growing beyond a size.
TEST_F(RolloutFile, AFullDiskLeavesTheOldFile) {
  const fs::path path = write("full.jsonl", str(kGood, "\n"));
  const std::vector<Trajectory> many(5000, read(kGood)[0]);
  rlimit old_limit;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &old_limit), 0);
  const rlimit limit{100'000, old_limit.rlim_max};
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  EXPECT_THROW(write_rollouts(path, many), IoError);
  setrlimit(RLIMIT_FSIZE, &old_limit);
  std::signal(SIGXFSZ, old_handler);
  EXPECT_EQ(read_file(path), str(kGood, "\n"));
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), {}),
            2);  // r.jsonl from read(), full.jsonl, and no temporary file
}

}  // namespace
}  // namespace bough
