#include "report/conversation_page.h"

#include <algorithm>

#include "base/error.h"
#include "base/format.h"
#include "report/html_text.h"

namespace bough {

namespace {

constexpr size_t kMostConversations = 8;    // per group
constexpr size_t kMostMessages = 64;        // per conversation: the first ones and the last ones
constexpr size_t kMostMessageBytes = 4000;  // per message
constexpr size_t kMostBytes = 3'000'000;    // for the section

std::string plural(int64_t count, const char* what) {
  return str(format_thousands(count), " ", what, count == 1 ? "" : "s");
}

// Draws a conversation's tokens as a bar: runs of tokens that the model wrote and runs of tokens that it was
// shown. Tokens in common with the conversation that this one forks from are pale.
std::string bar(const ConversationView& view) {
  int64_t total = 0;
  for (const ConversationView::Run& run : view.runs) total += run.tokens;
  if (total == 0) return "";
  std::string out = "<span class=\"bar\">";
  int64_t at = 0;
  const auto add = [&](int64_t tokens, bool is_model, bool is_common) {
    if (tokens > 0)
      out += str("<i class=\"", is_model ? "model" : "shown", is_common ? " common" : "",
                 "\" style=\"flex:", tokens, "\"></i>");
  };
  for (const ConversationView::Run& run : view.runs) {
    const int64_t common = std::clamp<int64_t>(view.common_tokens - at, 0, run.tokens);
    add(common, run.is_model, true);
    add(run.tokens - common, run.is_model, false);
    at += run.tokens;
  }
  return out + "</span>";
}

std::string three_digits(double value) {
  return format_significant(value, 3);
}

std::string head(const ConversationView& view) {
  std::string out = str("<summary><b>", html_escape(view.name), "</b> ");
  if (view.reward)
    out += str("<span class=\"", *view.reward > 0 ? "good" : "bad", "\">reward ", three_digits(*view.reward),
               "</span> ");
  out += str(html_escape(view.reason), ", ", plural(view.turns, "turn"), ", ", plural(view.tokens, "token"));
  double engine = 0, environment = 0;
  for (const MessageView& message : view.messages) {
    engine += message.engine_seconds;
    environment += message.environment_seconds;
  }
  if (engine + environment > 0)
    out += str(", ", three_digits(engine), " s engine, ", three_digits(environment), " s environment");
  if (view.invalid_calls > 0)
    out += str(", <span class=\"bad\">", plural(view.invalid_calls, "invalid call"), "</span>");
  if (view.rows > 1) out += str(", ", view.rows, " rows");
  for (const auto& [name, value] : view.rewards)
    out += str(", ", html_escape(name), " ", three_digits(value));
  int64_t total = 0;
  for (const ConversationView::Run& run : view.runs) total += run.tokens;
  if (!view.forks_from.empty()) {
    const std::string other = html_escape(view.forks_from);
    out += view.common_tokens == total ? str("<small>all tokens shared with ", other, "</small>")
           : view.fork_turn < 0        ? str("<small>forks from ", other, " before the first turn</small>")
                                       : str("<small>forks from ", other, " in turn ", view.fork_turn, ", ",
                                             plural(view.common_tokens, "token"), " in common</small>");
  }
  return out + bar(view) + "</summary>\n";
}

std::string body_of(const MessageView& message) {
  const bool is_model = message.turn.has_value();
  std::string out = str("<div class=\"message ", is_model ? "model" : "shown", "\"><div class=\"who\">",
                        html_escape(message.role));
  if (!message.name.empty()) out += " " + html_escape(message.name);
  if (is_model) {
    out += str(" <small>turn ", *message.turn);
    if (message.tokens > 0) out += ", " + plural(message.tokens, "token");
    if (message.engine_seconds > 0) out += str(", ", three_digits(message.engine_seconds), " s");
    if (message.environment_seconds > 0)
      out += str("; answered after ", three_digits(message.environment_seconds), " s");
    if (message.reward != 0) out += str("; reward ", three_digits(message.reward));
    out += "</small>";
    if (message.retokenized)
      out +=
          " <small class=\"bad\">the template's text of this turn has other tokens than were sampled</small>";
  }
  out += "</div>";
  const auto text = [&](const char* kind, const std::string& value) {
    if (!value.empty())
      out += str("<pre class=\"", kind, "\">", html_escape(cut_text(value, kMostMessageBytes)), "</pre>");
  };
  text("thinks", message.reasoning);
  text(message.content.starts_with("error: ") && !is_model ? "says bad" : "says", message.content);
  for (const auto& [name, arguments] : message.calls) text("calls", name + " " + arguments);
  return out + "</div>\n";
}

std::string conversation_html(const ConversationView& view) {
  std::string out = "<details class=\"talk\">" + head(view);
  const size_t count = view.messages.size();
  for (size_t i = 0; i < count; ++i) {
    if (count > kMostMessages && i == kMostMessages / 2) {
      i = count - kMostMessages / 2;
      out += str("<p class=\"hint\">", count - kMostMessages, " messages are not shown.</p>\n");
    }
    out += body_of(view.messages[i]);
  }
  if (!view.failure.empty())
    out += str("<div class=\"message\"><pre class=\"bad\">",
               html_escape(cut_text(view.failure, kMostMessageBytes)), "</pre></div>\n");
  return out + "</details>\n";
}

}  // namespace

std::string conversations_section(const std::vector<ConversationGroup>& groups) {
  if (groups.empty()) return "";
  std::string out =
      "<h2>Conversations</h2>\n<p class=\"hint\">Groups of some steps. A bar is a conversation's last row: "
      "<span class=\"bar key\"><i class=\"model\"></i></span> tokens from the model, "
      "<span class=\"bar key\"><i class=\"shown\"></i></span> tokens given to the model; pale: tokens shared "
      "with the conversation that it forks from.</p>\n";
  size_t num_left_out = 0;
  for (const ConversationGroup& group : groups) {
    std::string text = str("<section class=\"panel talks\"><h3>step ", group.step, ", group ",
                           html_escape(cut_text(group.name, 200)), "</h3>\n");
    for (size_t i = 0; i < std::min(group.views.size(), kMostConversations); ++i)
      text += conversation_html(group.views[i]);
    if (group.views.size() > kMostConversations)
      text +=
          str("<p class=\"hint\">", kMostConversations, " of ", group.views.size(), " conversations.</p>\n");
    text += "</section>\n";
    if (out.size() + text.size() > kMostBytes) ++num_left_out;
    else out += text;
  }
  if (num_left_out > 0)
    out += str("<p class=\"hint\">", num_left_out, " groups are too long to be shown.</p>\n");
  return out;
}

}  // namespace bough
