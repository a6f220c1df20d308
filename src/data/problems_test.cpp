#include "data/problems.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "base/error.h"

namespace bough {
namespace {

Dataset numbered(size_t n, const std::string& prefix = "problem ") {
  std::vector<Problem> problems;
  for (size_t i = 0; i < n; ++i) {
    Problem problem;
    problem.id = std::to_string(i);
    problem.prompt = prefix + problem.id;
    problem.answer = problem.id;
    problems.push_back(problem);
  }
  return {problems, "numbered"};
}

std::vector<std::string> next_ids(ProblemOrder& order, size_t n) {
  std::vector<std::string> ids;
  for (size_t i = 0; i < n; ++i) ids.push_back(order.next().id);
  return ids;
}

TEST(Dataset, FingerprintDependsOnTheContentOnly) {
  EXPECT_EQ(numbered(5).fingerprint(), numbered(5).fingerprint());
  EXPECT_NE(numbered(5).fingerprint(), numbered(6).fingerprint());
  EXPECT_NE(numbered(5).fingerprint(), numbered(5, "Problem ").fingerprint());
  const auto one = [](std::string prompt, std::string answer, OrderedJson messages) {
    return Dataset({{"0", std::move(prompt), std::move(messages), std::move(answer)}}, "one").fingerprint();
  };
  EXPECT_NE(one("ab", "c", {}), one("a", "bc", {}));
  EXPECT_NE(one("", "c", {message_of("user", "a")}), one("", "c", {message_of("system", "a")}));
}

TEST(Dataset, EveryFieldCountsInTheFieldsFingerprint) {
  Problem problem = {.id = "0", .prompt = "a", .messages = {}, .answer = "c", .fields = {{"gold", 1}}};
  const auto fingerprint = [&] { return Dataset({problem}, "one").fields_fingerprint(); };
  const uint64_t first = fingerprint();
  problem.fields = {{"gold", 9}};
  const uint64_t second = fingerprint();
  problem.tools = OrderedJson::array({{{"name", "f"}}});
  EXPECT_NE(first, second);
  EXPECT_NE(second, fingerprint());
}

TEST(Dataset, RefusesTwoProblemsWithOneId) {
  EXPECT_THROW(Dataset({{"a", "x"}, {"a", "y"}}, "file"), UserError);
}

TEST(ProblemOrder, EveryEpochIsADifferentPermutation) {
  const Dataset dataset = numbered(40);
  ProblemOrder order(dataset, 1);
  std::set<std::vector<std::string>> epochs;
  for (int epoch = 0; epoch < 5; ++epoch) {
    EXPECT_EQ(order.epoch(), epoch);
    const auto ids = next_ids(order, 40);
    EXPECT_EQ(std::set<std::string>(ids.begin(), ids.end()).size(), 40u);
    epochs.insert(ids);
  }
  EXPECT_EQ(epochs.size(), 5u);
}

TEST(ProblemOrder, DependsOnSeedAndPositionAlone) {
  const Dataset dataset = numbered(17);
  ProblemOrder forward(dataset, 3), other_seed(dataset, 4);
  const ProblemOrder backward(dataset, 3);
  const auto ids = next_ids(forward, 100);
  for (int64_t p = 99; p >= 0; --p) EXPECT_EQ(dataset[backward.index_at(p)].id, ids[p]) << p;
  EXPECT_NE(next_ids(other_seed, 100), ids);
}

TEST(ProblemOrder, WithoutShuffleTheFilesOrderIsKept) {
  const Dataset dataset = numbered(3);
  ProblemOrder order(dataset, 1, false);
  EXPECT_EQ(next_ids(order, 4), (std::vector<std::string>{"0", "1", "2", "0"}));
}

TEST(ProblemOrder, GoesOnWhereItWasSaved) {
  const Dataset dataset = numbered(11);
  ProblemOrder whole(dataset, 5), first(dataset, 5), second(dataset, 5);
  const auto expected = next_ids(whole, 40);
  auto ids = next_ids(first, 15);
  second.restore(Json::parse(first.save().dump()));
  EXPECT_EQ(second.position(), 15);
  for (const auto& id : next_ids(second, 25)) ids.push_back(id);
  EXPECT_EQ(ids, expected);
}

TEST(ProblemOrder, RefusesAnotherOrder) {
  const Dataset dataset = numbered(11), other = numbered(12);
  const Json saved = ProblemOrder(dataset, 5).save();
  EXPECT_THROW(ProblemOrder(other, 5).restore(saved), UserError);
  EXPECT_THROW(ProblemOrder(dataset, 6).restore(saved), UserError);
  EXPECT_THROW(ProblemOrder(dataset, 5, false).restore(saved), UserError);
  EXPECT_THROW(ProblemOrder(dataset, 5).restore(Json::object()), UserError);
  Json negative = saved;
  negative["position"] = -1;
  EXPECT_THROW(ProblemOrder(dataset, 5).restore(negative), UserError);
}

// A run does not resume with other tests, rubrics or tools. Version 0.1.0 did not save their fingerprint.
TEST(ProblemOrder, RefusesOtherFieldsIfTheirFingerprintWasSaved) {
  const auto dataset = [](int64_t gold) {
    return Dataset({{.id = "0", .prompt = "a", .messages = {}, .answer = "c", .fields = {{"gold", gold}}}},
                   "one");
  };
  const Dataset before = dataset(1), after = dataset(9);
  Json saved = ProblemOrder(before, 5).save();
  EXPECT_THROW(ProblemOrder(after, 5).restore(saved), UserError);
  saved.erase("fields_fingerprint");
  ProblemOrder(after, 5).restore(saved);
}

TEST(Dataset, SaysWhatChangedSinceItsIdentityWasSaved) {
  const auto change = [](const Dataset& now, const Json& saved) -> std::string {
    try {
      now.check_unchanged(saved);
    } catch (const UserError& error) {
      return error.what();
    }
    return "";
  };
  const Json saved = Json::parse(numbered(5).identity().dump());
  EXPECT_EQ(change(numbered(5), saved), "");
  EXPECT_NE(change(numbered(6), saved).find("it had 5 problems, now it has 6"), std::string::npos);
  EXPECT_NE(change(numbered(5, "Problem "), saved).find("prompts, messages or answers"), std::string::npos);
  EXPECT_EQ(change(numbered(6), Json::object()), "") << "a checkpoint without an identity";
}

TEST(ProblemOrder, NeedsAProblem) {
  EXPECT_THROW(ProblemOrder(Dataset({}, "empty"), 1), UserError);
}

}  // namespace
}  // namespace bough
