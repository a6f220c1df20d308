// Problems, the data set that they form, and the order in which a run uses them.
//
// The order is a pure function of (data set size, seed, position). Position p has the problem at place p mod
// size of epoch p / size. Each epoch has a new random permutation of the problems. So a run that resumes
// needs only the position to continue with the same problems.
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

// A problem has either a plain prompt or messages. A chat template turns the messages into the prompt.
struct Problem {
  std::string id;        // unique in its data set
  std::string prompt;    // plain text; empty if the problem has messages
  OrderedJson messages;  // a list as of template_messages(), for the model to answer; empty: plain text
  std::string answer;    // the reference answer as written in the record; may be empty
  Json fields = Json::object();  // the whole record; the user's reward function gets it as keyword arguments
  OrderedJson tools;             // a list of function schemas; null: none
  std::string where;             // "file:line"; empty if the problem is from no file
  int64_t truncate_to = 0;       // most tokens of a plain prompt, which is cut at its left; 0: not cut
};

class Dataset {
 public:
  Dataset() = default;
  // `source` names the data set in error messages. Throws UserError if two problems have the same id.
  Dataset(std::vector<Problem> problems, std::string source);

  size_t size() const { return problems_.size(); }
  const Problem& operator[](size_t index) const { return problems_[index]; }
  std::span<const Problem> problems() const { return problems_; }
  const std::string& source() const { return source_; }

  // Hashes of the problems in order, independent of the file's path: of the texts of prompts, messages and
  // answers, and of everything else that a line has.
  uint64_t fingerprint() const { return fingerprint_; }
  uint64_t fields_fingerprint() const { return fields_fingerprint_; }

  // A checkpoint keeps {size, fingerprint, fields_fingerprint}.
  Json identity() const;
  // Throws UserError, which says what changed, if `saved` has the identity of other problems. Keys that older
  // versions did not save (size, fields_fingerprint) are not compared.
  void check_unchanged(const Json& saved) const;

 private:
  std::vector<Problem> problems_;
  std::string source_;
  uint64_t fingerprint_ = 0, fields_fingerprint_ = 0;
};

// Maps positions to problems, epoch by epoch. The data set must outlive this object. The constructor throws
// UserError if the data set is empty.
class ProblemOrder {
 public:
  ProblemOrder(const Dataset& dataset, uint64_t seed, bool shuffle = true);

  // The problem's index in the data set at `position` >= 0. O(1) if the position is in the epoch of the last
  // call, else O(size).
  size_t index_at(int64_t position) const;

  const Problem& next() { return (*dataset_)[index_at(position_++)]; }
  int64_t position() const { return position_; }
  int64_t epoch() const { return position_ / static_cast<int64_t>(dataset_->size()); }

  // save() returns {position, seed, shuffle} and the data set's identity. restore() throws UserError if the
  // data set, the seed or shuffle differ from `saved`.
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
