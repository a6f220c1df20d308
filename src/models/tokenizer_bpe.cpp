#include "models/tokenizer_bpe.h"

#include <algorithm>
#include <limits>
#include <mutex>
#include <queue>
#include <unordered_set>

#include "base/error.h"
#include "base/json.h"
#include "models/unicode_text.h"

namespace bough {
namespace {

std::string shown(const Json& value) {
  return bough::quoted(dump_line(value));
}

}  // namespace

const std::array<std::string, 256>& byte_level_characters() {
  static const std::array<std::string, 256> table = [] {
    std::array<std::string, 256> characters;
    char32_t next = 0x100;  // stands for the bytes that are not printable in Latin-1, in order
    for (int byte = 0; byte < 256; ++byte) {
      const bool printable = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xFF && byte != 0xAD);
      unicode::append(characters[byte], printable ? static_cast<char32_t>(byte) : next++);
    }
    return characters;
  }();
  return table;
}

std::string byte_level_decode(std::string_view spelling, bool* exact) {
  static const std::unordered_map<std::string_view, char> bytes = [] {
    std::unordered_map<std::string_view, char> inverse;
    for (size_t i = 0; i < 256; ++i) inverse[byte_level_characters()[i]] = static_cast<char>(i);
    return inverse;
  }();
  std::string out;
  if (exact) *exact = true;
  for (size_t i = 0; i < spelling.size();) {
    const size_t length = unicode::decode(spelling.substr(i)).length;
    const auto byte = bytes.find(spelling.substr(i, length));
    if (byte == bytes.end()) {
      if (exact) *exact = false;
      return std::string(spelling);
    }
    out += byte->second;
    i += length;
  }
  return out;
}

// (left id, right id) to (rank, id of the product). Open addressing: this lookup is what encoding spends its
// time on.
class BytePairEncoder::MergeTable {
 public:
  struct Merge {
    int32_t rank, id;
  };

  explicit MergeTable(size_t num_merges) {
    size_t capacity = 16;
    while (capacity < 2 * num_merges) capacity *= 2;
    slots_.resize(capacity);
  }

  // A later merge of the same pair replaces an earlier one, as in `tokenizers`.
  void insert(int32_t left, int32_t right, Merge merge) {
    size_t i = slot(left, right);
    while (slots_[i].left >= 0 && !slots_[i].is(left, right)) i = (i + 1) & (slots_.size() - 1);
    slots_[i] = {left, right, merge};
  }

  const Merge* find(int32_t left, int32_t right) const {
    for (size_t i = slot(left, right); slots_[i].left >= 0; i = (i + 1) & (slots_.size() - 1))
      if (slots_[i].is(left, right)) return &slots_[i].merge;
    return nullptr;
  }

 private:
  struct Slot {
    int32_t left = -1, right = -1;
    Merge merge{};
    bool is(int32_t l, int32_t r) const { return left == l && right == r; }
  };
  size_t slot(int32_t left, int32_t right) const {
    const uint64_t key =
        static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
    return (key * 0x9E3779B97F4A7C15u >> 20) & (slots_.size() - 1);
  }
  std::vector<Slot> slots_;
};

// Words seen, with their ids. Texts repeat their words, so most lookups end here. Bounded: a shard that is
// full takes no more, which keeps what came first, the frequent words. Sharded by the word's hash, so that
// threads seldom wait for each other.
class BytePairEncoder::Cache {
 public:
  static constexpr size_t kLongestWord = 64;  // bytes; longer ones hardly ever come twice

  bool find(std::string_view word, std::vector<int32_t>& ids) {
    Shard& shard = shard_of(word);
    const std::lock_guard lock(shard.mutex);
    const auto found = shard.words.find(word);
    if (found == shard.words.end()) return false;
    ids.insert(ids.end(), found->second.begin(), found->second.end());
    return true;
  }

  void insert(std::string_view word, const std::vector<int32_t>& ids) {
    Shard& shard = shard_of(word);
    const std::lock_guard lock(shard.mutex);
    if (shard.words.size() < kWordsPerShard) shard.words.try_emplace(std::string(word), ids);
  }

 private:
  static constexpr size_t kWordsPerShard = 4096;
  struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
  };
  struct Shard {
    std::mutex mutex;
    std::unordered_map<std::string, std::vector<int32_t>, Hash, std::equal_to<>> words;
  };
  Shard& shard_of(std::string_view word) { return shards_[Hash()(word) >> 32 & (shards_.size() - 1)]; }
  std::array<Shard, 16> shards_;
};

BytePairEncoder::BytePairEncoder() : cache_(std::make_unique<Cache>()) {}
BytePairEncoder::BytePairEncoder(BytePairEncoder&&) noexcept = default;
BytePairEncoder::~BytePairEncoder() = default;

BytePairEncoder BytePairEncoder::from_json(const Json& model, const std::string& where) {
  if (!model.is_object()) throw UserError(str(where, ": model: expected an object, got ", shown(model)));
  const Json type = model.value("type", Json("BPE"));
  if (type != "BPE") throw UserError(str(where, ": model ", shown(type), " is not supported: only BPE is"));
  // `unk_token` and `fuse_unk` never matter: every byte has a token.
  for (const char* name : {"dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"}) {
    const Json value = model.value(name, Json());
    const bool absent = value.is_null() || value == "" || value == false || value == 0.0;
    if (!absent) throw UserError(str(where, ": model: ", name, " = ", shown(value), " is not supported"));
  }
  if (!model.contains("vocab") || !model["vocab"].is_object() || !model.contains("merges") ||
      !model["merges"].is_array())
    throw UserError(str(where, ": model: expected a `vocab` object and a `merges` list"));
  BytePairEncoder result;
  result.read_vocabulary(model["vocab"], where);
  result.read_merges(model["merges"], where);
  const Json ignore_merges = model.value("ignore_merges", Json(false));
  if (!ignore_merges.is_boolean())
    throw UserError(str(where, ": model: ignore_merges must be true or false"));
  result.ignore_merges_ = ignore_merges;
  if (result.ignore_merges_) {
    for (const auto& [spelling, id] : result.vocabulary_) {
      bool exact = false;
      const std::string bytes = byte_level_decode(spelling, &exact);
      if (exact) result.whole_words_.emplace(bytes, id);
    }
  }
  return result;
}

void BytePairEncoder::read_vocabulary(const Json& vocabulary, const std::string& where) {
  std::unordered_set<int32_t> seen;
  for (const auto& [spelling, id] : vocabulary.items()) {
    if (!id.is_number_unsigned() ||
        id.get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int32_t>::max() - 1))
      throw UserError(str(where, ": model: vocab: the id of ", bough::quoted(spelling), " is ", shown(id),
                          ", expected a whole number below 2^31 - 1"));
    if (!seen.insert(id.get<int32_t>()).second)
      throw UserError(str(where, ": model: vocab: two tokens have the id ", shown(id), ", one of them ",
                          bough::quoted(spelling)));
    vocabulary_.emplace(spelling, id.get<int32_t>());
  }
  for (size_t byte = 0; byte < 256; ++byte) {
    const auto token = vocabulary_.find(byte_level_characters()[byte]);
    // C0, C1 and F5..FF occur in no UTF-8 text; some vocabularies leave them out.
    const bool occurs = byte < 0xC0 || (byte > 0xC1 && byte < 0xF5);
    if (token == vocabulary_.end() && occurs)
      throw UserError(str(where, ": model: vocab: no token for byte ", byte, " (",
                          bough::quoted(byte_level_characters()[byte]),
                          "): only byte-level vocabularies that cover all texts are supported"));
    byte_ids_[byte] = token == vocabulary_.end() ? -1 : token->second;
  }
}

void BytePairEncoder::read_merges(const Json& merges, const std::string& where) {
  merges_ = std::make_unique<MergeTable>(merges.size());
  const auto id_of = [&](const std::string& spelling, size_t rank) {
    const auto token = vocabulary_.find(spelling);
    if (token == vocabulary_.end())
      throw UserError(
          str(where, ": model: merge ", rank, ": ", bough::quoted(spelling), " is not in the vocabulary"));
    return token->second;
  };
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const Json& merge = merges[rank];
    std::string left, right;
    if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
      left = merge[0];
      right = merge[1];
    } else if (merge.is_string()) {
      const std::string& text = merge.get_ref<const std::string&>();
      const size_t space = text.find(' ');
      if (space != std::string::npos && text.find(' ', space + 1) == std::string::npos) {
        left = text.substr(0, space);
        right = text.substr(space + 1);
      }
    }
    if (left.empty() || right.empty())
      throw UserError(str(where, ": model: merge ", rank,
                          ": expected \"left right\" or [\"left\", \"right\"], got ", shown(merge)));
    const int32_t left_id = id_of(left, rank);
    const int32_t right_id = id_of(right, rank);
    merges_->insert(left_id, right_id, {static_cast<int32_t>(rank), id_of(left + right, rank)});
  }
}

void BytePairEncoder::encode(std::string_view word, std::vector<int32_t>& ids) const {
  if (word.empty()) return;
  if (ignore_merges_) {
    const auto whole = whole_words_.find(std::string(word));
    if (whole != whole_words_.end()) {
      ids.push_back(whole->second);
      return;
    }
  }
  const bool cached = word.size() > 1 && word.size() <= Cache::kLongestWord;
  if (cached && cache_->find(word, ids)) return;
  const std::vector<int32_t> merged = merge(word);
  ids.insert(ids.end(), merged.begin(), merged.end());
  if (cached) cache_->insert(word, merged);
}

// A list of symbols linked over the word's bytes, and a heap of the merges that may apply. A merge does not
// remove outdated heap entries; they are recognised when they come up. `tokenizers` recognises them by the
// product's id, not by the pair, which lets an outdated entry stand in for another pair with the same
// product: so does this.
std::vector<int32_t> BytePairEncoder::merge(std::string_view word) const {
  struct Symbol {
    int32_t id, previous, next;
    bool removed;
  };
  struct Candidate {
    int32_t rank, position, id;
    bool operator>(const Candidate& other) const {
      return rank != other.rank ? rank > other.rank : position > other.position;
    }
  };
  BOUGH_CHECK(word.size() < static_cast<size_t>(std::numeric_limits<int32_t>::max()), "a word of ",
              word.size(), " bytes");
  const int32_t size = static_cast<int32_t>(word.size());
  std::vector<Symbol> symbols(word.size());
  std::vector<Candidate> first;
  for (int32_t i = 0; i < size; ++i) {
    const int32_t id = byte_ids_[static_cast<unsigned char>(word[i])];
    BOUGH_CHECK(id >= 0, "byte ", static_cast<int>(static_cast<unsigned char>(word[i])),
                " of a word that is not UTF-8");
    symbols[i] = {id, i - 1, i + 1 < size ? i + 1 : -1, false};
    if (i == 0) continue;
    if (const auto* merge = merges_->find(symbols[i - 1].id, id))
      first.push_back({merge->rank, i - 1, merge->id});
  }
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> queue(std::greater<>(),
                                                                               std::move(first));
  const auto offer = [&](int32_t left, int32_t right) {
    if (const auto* merge = merges_->find(symbols[left].id, symbols[right].id))
      queue.push({merge->rank, left, merge->id});
  };
  while (!queue.empty()) {
    const Candidate top = queue.top();
    queue.pop();
    Symbol& left = symbols[top.position];
    if (left.removed || left.next < 0) continue;
    Symbol& right = symbols[left.next];
    const auto* merge = merges_->find(left.id, right.id);
    if (!merge || merge->id != top.id) continue;
    left.id = top.id;
    left.next = right.next;
    right.removed = true;
    if (left.next >= 0) symbols[left.next].previous = top.position;
    if (left.previous >= 0) offer(left.previous, top.position);
    if (left.next >= 0) offer(top.position, left.next);
  }
  std::vector<int32_t> ids;
  for (int32_t i = 0; i >= 0; i = symbols[i].next) ids.push_back(symbols[i].id);
  return ids;
}

}  // namespace bough
