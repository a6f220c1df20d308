#include "text/tokenizer_bpe.h"

#include <algorithm>
#include <limits>
#include <queue>
#include <utility>

#include "base/error.h"
#include "base/mutex.h"
#include "text/tokenizer_json.h"
#include "text/unicode_text.h"

namespace bough {
namespace {

using tokenizer_json::shown;

// The mark that SentencePiece writes for a space.
constexpr std::string_view kMark = "\u2581";
constexpr char32_t kMarkCharacter = 0x2581;

constexpr size_t kCommonCharacters = 0x10000;  // characters below it are in a table, others in a map

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

// Maps (left id, right id) to (rank, id of the merged token). A hash table with open addressing, because
// encoding spends most of its time on this look-up.
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

  // If a pair is inserted twice, the later merge replaces the earlier one, as in `tokenizers`.
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

// Caches words with their ids. Words repeat in texts, so most look-ups hit the cache. The cache is bounded: a
// full shard takes no more words. So it holds the words that came first, which are mostly the frequent ones.
// The word's hash selects the shard, so that threads seldom wait for each other.
class BytePairEncoder::Cache {
 public:
  static constexpr size_t kLongestWord = 64;  // bytes; longer words hardly ever repeat

  bool find(std::string_view word, std::vector<int32_t>& ids) {
    Shard& shard = shard_of(word);
    const MutexLock lock(shard.mutex);
    const auto found = shard.words.find(word);
    if (found == shard.words.end()) return false;
    ids.insert(ids.end(), found->second.begin(), found->second.end());
    return true;
  }

  void insert(std::string_view word, const std::vector<int32_t>& ids) {
    Shard& shard = shard_of(word);
    const MutexLock lock(shard.mutex);
    if (shard.words.size() < kWordsPerShard) shard.words.try_emplace(std::string(word), ids);
  }

 private:
  static constexpr size_t kWordsPerShard = 4096;
  struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
  };
  struct Shard {
    Mutex mutex;
    std::unordered_map<std::string, std::vector<int32_t>, Hash, std::equal_to<>> words GUARDED_BY(mutex);
  };
  Shard& shard_of(std::string_view word) { return shards_[Hash()(word) >> 32 & (shards_.size() - 1)]; }
  std::array<Shard, 16> shards_;
};

BytePairEncoder::BytePairEncoder() : cache_(std::make_unique<Cache>()) {}
BytePairEncoder::BytePairEncoder(BytePairEncoder&&) noexcept = default;
BytePairEncoder::~BytePairEncoder() = default;

BytePairEncoder BytePairEncoder::from_json(const Json& model, bool byte_level, const std::string& where) {
  const std::string here = where + ": model";
  if (!model.is_object()) throw UserError(str(here, ": expected an object, got ", shown(model)));
  const Json type = model.value("type", Json("BPE"));
  if (type != "BPE")
    throw UserError(
        str(here, " ", shown(type),
            " is not supported: only BPE is. Use a model with a BPE tokenizer (GPT-2, Llama, Qwen, "
            "Mistral, Gemma, Phi-3 and similar models have one), or work with token ids"));
  for (const char* name : {"dropout", "continuing_subword_prefix", "end_of_word_suffix"}) {
    const Json value = model.value(name, Json());
    const bool absent = value.is_null() || value == "" || value == false || value == 0.0;
    if (!absent) throw UserError(str(here, ": ", name, " = ", shown(value), " is not supported"));
  }
  if (!model.contains("vocab") || !model["vocab"].is_object() || !model.contains("merges") ||
      !model["merges"].is_array())
    throw UserError(str(here, ": expected a `vocab` object and a `merges` list"));
  BytePairEncoder result;
  result.byte_level_ = byte_level;
  result.byte_fallback_ = tokenizer_json::flag(model, "byte_fallback", false, here);
  result.fuse_unknown_ = tokenizer_json::flag(model, "fuse_unk", false, here);
  result.ignore_merges_ = tokenizer_json::flag(model, "ignore_merges", false, here);
  if (!model.value("unk_token", Json()).is_null())
    result.unknown_token_ = tokenizer_json::text_of(model, "unk_token", here);
  result.read_vocabulary(model["vocab"], where);
  result.read_units();
  result.read_merges(model["merges"], where);
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
}

// Reads the tokens with which the encoding of words starts, and the substitutes for characters without a
// token.
void BytePairEncoder::read_units() {
  constexpr std::string_view kHexadecimal = "0123456789ABCDEF";
  const auto id_of = [&](const std::string& spelling) {
    const auto token = vocabulary_.find(spelling);
    return token == vocabulary_.end() ? -1 : token->second;
  };
  for (size_t byte = 0; byte < 256; ++byte) {
    byte_ids_[byte] = id_of(byte_level_characters()[byte]);
    fallback_ids_[byte] = id_of(str("<0x", kHexadecimal[byte / 16], kHexadecimal[byte % 16], '>'));
  }
  if (unknown_token_) unknown_id_ = id_of(*unknown_token_);
  if (!byte_level_) character_ids_.assign(kCommonCharacters, -1);
  for (const auto& [spelling, id] : vocabulary_) {
    if (byte_level_ && !ignore_merges_) break;
    if (byte_level_) {
      bool exact = false;
      const std::string bytes = byte_level_decode(spelling, &exact);
      if (exact) whole_words_.emplace(bytes, id);
    } else if (!spelling.empty()) {
      const unicode::Decoded first = unicode::decode(spelling);
      if (first.length != spelling.size()) continue;
      if (first.code_point < kCommonCharacters) character_ids_[first.code_point] = id;
      else rare_character_ids_[first.code_point] = id;
    }
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
    const std::string product = left + right;
    merges_->insert(left_id, right_id, {static_cast<int32_t>(rank), id_of(product, rank)});
    for (size_t mark = product.find(kMark, 1); !byte_level_ && mark != std::string::npos;
         mark = product.find(kMark, mark + 1))
      before_mark_.insert(
          unicode::decode(std::string_view(product).substr(unicode::character_before(product, mark)))
              .code_point);
  }
}

int32_t BytePairEncoder::character_id(char32_t character) const {
  if (character < kCommonCharacters) return character_ids_[character];
  const auto rare = rare_character_ids_.find(character);
  return rare == rare_character_ids_.end() ? -1 : rare->second;
}

void BytePairEncoder::encode(std::string_view word, std::vector<int32_t>& ids) const {
  if (word.empty()) return;
  if (ignore_merges_) {
    const auto& whole = byte_level_ ? whole_words_ : vocabulary_;
    if (const auto token = whole.find(std::string(word)); token != whole.end()) {
      ids.push_back(token->second);
      return;
    }
  }
  size_t begin = 0;
  if (!byte_level_ && character_ids_[kMarkCharacter] >= 0) {
    for (size_t mark = word.find(kMark, 1); mark != std::string_view::npos;
         mark = word.find(kMark, mark + 1)) {
      const char32_t before = unicode::decode(word.substr(unicode::character_before(word, mark))).code_point;
      // No cut after a character without a token: its last byte token may merge with ▁, or its unk_token may
      // still wait to be fused.
      if (character_id(before) < 0 || before_mark_.contains(before)) continue;
      encode_part(word.substr(begin, mark - begin), ids);
      begin = mark;
    }
  }
  encode_part(word.substr(begin), ids);
}

void BytePairEncoder::encode_part(std::string_view part, std::vector<int32_t>& ids) const {
  const bool cached = part.size() > 1 && part.size() <= Cache::kLongestWord;
  if (cached && cache_->find(part, ids)) return;
  const std::vector<int32_t> merged = merge(part);
  ids.insert(ids.end(), merged.begin(), merged.end());
  if (cached) cache_->insert(part, merged);
}

// The tokens of a word as a linked list. If a merge joins a token with the token before it, the token is
// removed.
class BytePairEncoder::Symbols {
 public:
  struct Symbol {
    int32_t id, previous, next;
    bool removed;
  };

  explicit Symbols(size_t most) { list_.reserve(most); }

  // An unk_token is held back until the next token is added. In `tokenizers`, byte tokens that replace a
  // character are placed before the unk_token that is held back. add_fallback() reproduces this.
  void add(int32_t id) {
    if (waiting_ >= 0) add_fallback(std::exchange(waiting_, -1));
    add_fallback(id);
  }
  void add_fallback(int32_t id) {
    const int32_t position = static_cast<int32_t>(list_.size());
    if (position > 0) list_.back().next = position;
    list_.push_back({id, position - 1, -1, false});
  }
  void add_unknown(int32_t id, bool fuse) {
    if (waiting_ >= 0 && !fuse) add_fallback(waiting_);
    waiting_ = id;
  }
  std::vector<Symbol>& finish() {
    if (waiting_ >= 0) add_fallback(std::exchange(waiting_, -1));
    return list_;
  }

 private:
  std::vector<Symbol> list_;
  int32_t waiting_ = -1;  // an unk_token, or -1
};

void BytePairEncoder::add_unknown(std::string_view character, Symbols& symbols) const {
  const auto id_of = [&](char byte) { return fallback_ids_[static_cast<unsigned char>(byte)]; };
  if (byte_fallback_ &&
      std::all_of(character.begin(), character.end(), [&](char byte) { return id_of(byte) >= 0; })) {
    for (const char byte : character) symbols.add_fallback(id_of(byte));
    return;
  }
  if (!unknown_token_) return;
  if (unknown_id_ < 0)
    throw UserError(
        str("text to encode: the tokenizer has no token for ", bough::quoted(character),
            ", and its unk_token ", bough::quoted(*unknown_token_),
            " is not in its vocabulary; remove the character from the text or correct tokenizer.json"));
  symbols.add_unknown(unknown_id_, fuse_unknown_);
}

// Uses a linked list of symbols over the word's bytes, and a heap of candidate merges. After a merge, some
// entries of the heap are outdated. `tokenizers` detects them when they are popped, by the merged token's id
// and not by the pair. So it may apply an outdated entry to another pair with the same merged token. This
// code reproduces that.
std::vector<int32_t> BytePairEncoder::merge(std::string_view word) const {
  struct Candidate {
    int32_t rank, position, id;
    bool operator>(const Candidate& other) const {
      return rank != other.rank ? rank > other.rank : position > other.position;
    }
  };
  BOUGH_CHECK(word.size() < static_cast<size_t>(std::numeric_limits<int32_t>::max()), "a word has ",
              word.size(), " bytes, the limit is 2^31 - 1");
  Symbols unmerged(word.size());
  for (size_t i = 0; i < word.size();) {
    if (byte_level_) {
      const size_t byte = static_cast<unsigned char>(word[i++]);
      if (byte_ids_[byte] >= 0) unmerged.add(byte_ids_[byte]);
      else add_unknown(byte_level_characters()[byte], unmerged);
    } else {
      const unicode::Decoded next = unicode::decode(word.substr(i));
      const int32_t id = character_id(next.code_point);
      if (id >= 0) unmerged.add(id);
      else add_unknown(word.substr(i, next.length), unmerged);
      i += next.length;
    }
  }
  std::vector<Symbols::Symbol>& symbols = unmerged.finish();
  if (symbols.empty()) return {};
  std::vector<Candidate> first;
  for (int32_t i = 1; i < static_cast<int32_t>(symbols.size()); ++i)
    if (const auto* merge = merges_->find(symbols[i - 1].id, symbols[i].id))
      first.push_back({merge->rank, i - 1, merge->id});
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> queue(std::greater<>(),
                                                                               std::move(first));
  const auto offer = [&](int32_t left, int32_t right) {
    if (const auto* merge = merges_->find(symbols[left].id, symbols[right].id))
      queue.push({merge->rank, left, merge->id});
  };
  while (!queue.empty()) {
    const Candidate top = queue.top();
    queue.pop();
    Symbols::Symbol& left = symbols[top.position];
    if (left.removed || left.next < 0) continue;
    Symbols::Symbol& right = symbols[left.next];
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
