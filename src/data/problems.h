// What is asked: problems, the data set they form, and the order in which a run meets them.
//
// The order is a pure function of (data set's size, seed, position): position p is the problem number
// p mod size of epoch p / size, and each epoch has its own random permutation. So a run that stopped anywhere
// needs one integer to go on with the same problems.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/random.h"
#include "text/message.h"

namespace bough {

// A problem is either a plain prompt or messages, of which a chat template makes the prompt.
struct Problem {
  std::string id;                 // unique in its data set
  std::string prompt;             // plain text; empty where `messages` is not
  std::vector<Message> messages;  // ends with a user message; empty for plain text
  std::string answer;             // the gold, as the record has it; may be empty
  Json fields = Json::object();   // the whole record; the user's reward function gets it as keyword arguments
};

class Dataset {
 public:
  Dataset() = default;
  // `source` names the data set in messages. UserError: two problems with one id.
  Dataset(std::vector<Problem> problems, std::string source);

  size_t size() const { return problems_.size(); }
  const Problem& operator[](size_t index) const { return problems_[index]; }
  std::span<const Problem> problems() const { return problems_; }
  const std::string& source() const { return source_; }

  // A name for the content: equal for equal prompts, messages and answers in the same order, wherever the
  // file lies.
  uint64_t fingerprint() const { return fingerprint_; }

 private:
  std::vector<Problem> problems_;
  std::string source_;
  uint64_t fingerprint_ = 0;
};

// Deals the problems of a data set epoch by epoch. The data set must outlive it and must not be empty
// (UserError).
class ProblemOrder {
 public:
  ProblemOrder(const Dataset& dataset, uint64_t seed, bool shuffle = true);

  // Which problem comes at `position` >= 0. O(1) inside the epoch asked for last, O(size) in another.
  size_t index_at(int64_t position) const;

  const Problem& next() { return (*dataset_)[index_at(position_++)]; }
  int64_t position() const { return position_; }
  int64_t epoch() const { return position_ / static_cast<int64_t>(dataset_->size()); }

  // {position, seed, shuffle, fingerprint}. restore() throws a UserError where the data set is not the one
  // saved, or seed or shuffle differ: the order would not be the same.
  Json save() const;
  void restore(const Json& saved);

 private:
  const Dataset* dataset_;
  uint64_t seed_;
  bool shuffle_;
  CounterRandom random_;
  int64_t position_ = 0;
  mutable int64_t cached_epoch_ = -1;
  mutable std::vector<size_t> permutation_;  // of cached_epoch_
};

}  // namespace bough
