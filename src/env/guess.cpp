#include "env/guess.h"

#include <charconv>
#include <unordered_set>

#include "base/error.h"
#include "base/random.h"

namespace bough {

namespace {

struct Game {
  int64_t low, high, secret, guesses;

  std::string question() const {
    return str("My number is from ", low, " to ", high, ". You have ", guesses, " guesses.");
  }
};

std::string answer_to(int64_t guess, int64_t secret) {
  return guess < secret ? "higher" : guess > secret ? "lower" : "right";
}

std::vector<Game> make_games(int64_t n, Split split, uint64_t seed, const GuessSettings& settings) {
  constexpr uint64_t kMaxAttempts = 20'000;
  const CounterRandom random(seed, Purpose::environment);
  std::vector<Game> games;
  std::unordered_set<std::string> seen;
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t sequence = (static_cast<uint64_t>(split) << 48) + static_cast<uint64_t>(i);
    for (uint64_t attempt = 0; std::ssize(games) == i; ++attempt) {
      if (attempt == kMaxAttempts)
        throw UserError(str("guess: only ", i, " of ", n, " different games found with max_low ",
                            settings.max_low, " and width ", settings.width,
                            "; ask for fewer, or raise one of them"));
      const auto low = 1 + static_cast<int64_t>(
                               random.below(static_cast<uint64_t>(settings.max_low), sequence, 2 * attempt));
      const auto above = static_cast<int64_t>(
          random.below(static_cast<uint64_t>(settings.width), sequence, 2 * attempt + 1));
      const Game game{low, low + settings.width - 1, low + above, settings.guesses};
      const std::string text = str(game.low, "-", game.high, ":", game.secret);
      if (sums_split(text) == split && seen.insert(text).second) games.push_back(game);
    }
  }
  return games;
}

// The last integer in a text.
std::optional<int64_t> last_number(std::string_view text) {
  const size_t end = text.find_last_of("0123456789");
  if (end == std::string_view::npos) return std::nullopt;
  size_t begin = text.find_last_not_of("0123456789", end);
  begin = begin == std::string_view::npos ? 0 : begin + 1;
  int64_t value = 0;
  const auto result = std::from_chars(text.data() + begin, text.data() + end + 1, value);
  return result.ec == std::errc() ? std::optional(value) : std::nullopt;
}

class Guess final : public Episode {
 public:
  Observation reset(const Problem& problem, uint64_t seed) override {
    const auto number = [&](const char* key) {
      const auto found = problem.fields.find(key);
      if (found == problem.fields.end() || !found->is_number_integer())
        throw UserError(str("problem ", quoted(problem.id), ": ", key,
                            " is missing or not a whole number; `bough data guess` writes such problems"));
      return found->get<int64_t>();
    };
    const auto secret = last_number(problem.answer);
    if (!secret) throw UserError(str("problem ", quoted(problem.id), ": its answer is not a whole number"));
    game_ = {number("low"), number("high"), *secret, number("guesses")};
    Observation out;
    out.messages.push_back(message_of("user", game_.question()));
    return out;
  }

  Observation step(const Action& action) override {
    Observation out;
    --game_.guesses;
    const auto guess = last_number(action.content);
    const bool is_right = guess == game_.secret;
    out.done = is_right || game_.guesses <= 0;
    out.reward = is_right ? 1 : 0;
    out.messages.push_back(message_of("user", guess ? answer_to(*guess, game_.secret) : "say a number"));
    return out;
  }

 private:
  Game game_{};
};

}  // namespace

std::vector<Json> make_guess_problems(int64_t n, Split split, uint64_t seed, const GuessSettings& settings) {
  std::vector<Json> problems;
  for (const Game& game : make_games(n, split, seed, settings))
    problems.push_back({{"question", game.question()},
                        {"answer", str(game.secret)},
                        {"low", game.low},
                        {"high", game.high},
                        {"guesses", game.guesses}});
  return problems;
}

std::vector<Json> make_guess_traces(int64_t n, Split split, uint64_t seed, const GuessSettings& settings) {
  // The slips (GuessSettings::slips) use random numbers that the games do not use. So the games do not depend
  // on the setting `slips`.
  constexpr uint64_t kOwn = uint64_t{1} << 61;
  const CounterRandom random(seed, Purpose::environment);
  std::vector<Json> traces;
  uint64_t draw = 0;
  for (const Game& game : make_games(n, split, seed, settings)) {
    Json messages = {{{"role", "user"}, {"content", game.question()}}};
    int64_t low = game.low, high = game.high;
    for (int64_t i = 0; i < game.guesses; ++i) {
      const bool forgets = random.uniform(kOwn, draw++) < settings.slips;
      const int64_t from = forgets ? game.low : low, to = forgets ? game.high : high;
      const auto guess =
          from + static_cast<int64_t>(random.below(static_cast<uint64_t>(to - from + 1), kOwn, draw++));
      messages.push_back({{"role", "assistant"}, {"content", str(guess)}});
      traces.push_back({{"messages", messages}});
      if (guess == game.secret) break;
      messages.push_back({{"role", "user"}, {"content", answer_to(guess, game.secret)}});
      if (guess < game.secret) low = std::max(low, guess + 1);
      else high = std::min(high, guess - 1);
    }
  }
  return traces;
}

std::unique_ptr<Episode> make_guess() {
  return std::make_unique<Guess>();
}

}  // namespace bough
