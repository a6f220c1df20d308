#include "data/problems.h"

#include <functional>
#include <unordered_set>

#include "base/error.h"

namespace bough {

namespace {

// Prefixes each text with its length, so that ("ab", "c") and ("a", "bc") differ.
void append(std::string& bytes, std::string_view text) {
  bytes += std::to_string(text.size());
  bytes += ':';
  bytes += text;
}

// A hash of all problems. `write` appends to `bytes` what counts in one problem.
uint64_t hash_of(std::span<const Problem> problems,
                 const std::function<void(std::string& bytes, const Problem& problem)>& write) {
  std::vector<uint64_t> hashes;
  hashes.reserve(problems.size());
  std::string bytes;
  for (const Problem& problem : problems) {
    bytes.clear();
    write(bytes, problem);
    hashes.push_back(stable_hash(bytes.data(), bytes.size()));
  }
  return stable_hash(hashes.data(), hashes.size() * sizeof(uint64_t));
}

void append_texts(std::string& bytes, const Problem& problem) {
  append(bytes, problem.prompt);
  append(bytes, problem.answer);
  for (const OrderedJson& message : problem.messages) {
    append(bytes, message.value("role", ""));
    append(bytes, message.contains("content") && message["content"].is_string()
                      ? message["content"].get_ref<const std::string&>()
                      : std::string());
  }
}

void append_fields(std::string& bytes, const Problem& problem) {
  append(bytes, dump_ordered(problem.messages));
  append(bytes, dump_ordered(problem.tools));
  append(bytes, dump_line(problem.fields));
}

}  // namespace

Dataset::Dataset(std::vector<Problem> problems, std::string source)
    : problems_(std::move(problems)),
      source_(std::move(source)),
      fingerprint_(hash_of(problems_, append_texts)),
      fields_fingerprint_(hash_of(problems_, append_fields)) {
  std::unordered_set<std::string_view> ids;
  for (const Problem& problem : problems_) {
    if (!ids.insert(problem.id).second) {
      throw UserError(str(source_, ": two problems have the id ", quoted(problem.id),
                          "; ids must be unique (lines without `id` are numbered)"));
    }
  }
}

Json Dataset::identity() const {
  return {{"size", size()}, {"fingerprint", fingerprint_}, {"fields_fingerprint", fields_fingerprint_}};
}

void Dataset::check_unchanged(const Json& saved) const {
  const Json now = identity();
  const auto differs = [&](const char* key) { return saved.contains(key) && saved[key] != now[key]; };
  std::string change;
  if (differs("size")) change = str("it had ", saved["size"].dump(), " problems, now it has ", size());
  else if (differs("fingerprint")) change = "prompts, messages or answers changed";
  else if (differs("fields_fingerprint"))
    change = "fields of its lines changed (prompts, answers and the texts of messages are the same)";
  if (!change.empty()) {
    throw UserError(str(
        source_, ": cannot resume, because this data set differs from the one of the checkpoint: ", change,
        "; resume with the same data set, or start a new trial_name"));
  }
}

ProblemOrder::ProblemOrder(const Dataset& dataset, uint64_t seed, bool shuffle)
    : dataset_(&dataset), seed_(seed), shuffle_(shuffle), random_(seed, Purpose::shuffle) {
  if (dataset.size() == 0) throw UserError(str(dataset.source(), ": no problems; at least one is needed"));
}

size_t ProblemOrder::index_at(int64_t position) const {
  BOUGH_CHECK(position >= 0, "position=", position);
  const auto size = static_cast<int64_t>(dataset_->size());
  if (!shuffle_) return static_cast<size_t>(position % size);
  if (position / size != cached_epoch_) {
    cached_epoch_ = position / size;
    permutation_ = random_.permutation(dataset_->size(), static_cast<uint64_t>(cached_epoch_));
  }
  return permutation_[static_cast<size_t>(position % size)];
}

Json ProblemOrder::save() const {
  Json json = dataset_->identity();
  json.update({{"position", position_}, {"seed", seed_}, {"shuffle", shuffle_}});
  return json;
}

void ProblemOrder::restore(const Json& saved) {
  dataset_->check_unchanged(saved);
  const Json now = save();
  for (const char* key : {"fingerprint", "seed", "shuffle"}) {
    if (!saved.contains(key) || saved[key] != now[key]) {
      throw UserError(str(dataset_->source(), ": cannot resume the order of problems: ", key, " was ",
                          saved.value(key, Json()).dump(), " when it was saved, now it is ", now[key].dump(),
                          "; resume with the same data set and settings, or start a new trial_name"));
    }
  }
  const Json position = saved.value("position", Json());
  if (!position.is_number_integer() || position.get<int64_t>() < 0) {
    throw UserError(str(dataset_->source(), ": saved order of problems: position is ",
                        quoted(position.dump()),
                        ", expected an integer of at least 0; the checkpoint is damaged"));
  }
  position_ = position.get<int64_t>();
}

}  // namespace bough
