#include "control/prompt_encoder.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "text/prompt_ids.h"

namespace bough {

namespace {

void refuse_tools(const OrderedJson& tools) {
  if (!tools.is_null())
    throw UserError(
        "tools: a plain prompt shows no tools to the model; use messages, or set the data set's format to "
        "chat, "
        "so that the chat template shows them; if they are for the reward only, set tools_key to another "
        "field");
}

// Whether the text names all tools. If not, it may still describe them.
bool has_names(const std::string& text, const OrderedJson& tools) {
  return std::ranges::all_of(tools, [&](const OrderedJson& tool) {
    const OrderedJson& function = tool.contains("function") ? tool["function"] : tool;
    return text.find(function["name"].get_ref<const std::string&>()) != std::string::npos;
  });
}

}  // namespace

PromptEncoder::PromptEncoder(Tokenizer tokenizer, std::optional<ChatTemplate> chat_template)
    : tokenizer_(std::move(tokenizer)), chat_template_(std::move(chat_template)) {}

PromptEncoder PromptEncoder::from_directory(const std::filesystem::path& directory) {
  PromptEncoder encoder(Tokenizer::load(directory));
  try {
    encoder.chat_template_ = ChatTemplate::from_directory(directory);
  } catch (const UserError& error) {
    encoder.no_template_ = error.what();  // matters only for conversations
  }
  return encoder;
}

const ChatTemplate& PromptEncoder::chat_template() const {
  if (!chat_template_) throw UserError(str("conversations need a chat template: ", no_template_));
  return *chat_template_;
}

std::string PromptEncoder::render(const Conversation& conversation) const {
  Conversation shown = conversation;
  const MessageForm& form = chat_template().message_form();
  for (size_t i = 0; i < shown.messages.size(); ++i)
    if (!form.shows_calls && shown.messages[i].contains("tool_calls"))
      throw UserError(
          str("messages[", i,
              "].tool_calls: the model's chat template does not show tool calls; use a model or a "
              "chat_template.jinja that does, or write the calls as content"));
  apply(form, shown.messages);
  return chat_template().render(shown);
}

std::string PromptEncoder::render(const OrderedJson& messages, const OrderedJson& tools,
                                  bool add_generation_prompt) const {
  Conversation conversation;
  conversation.messages = messages;
  conversation.tools = tools;
  conversation.add_generation_prompt = add_generation_prompt;
  const std::string text = render(conversation);
  if (tools.is_null() || (chat_template().message_form().shows_tools && has_names(text, tools))) return text;
  conversation.tools = nullptr;
  if (render(conversation) == text)
    throw UserError(
        "tools: the model's chat template does not show tools; use a model or a chat_template.jinja that "
        "does, describe the tools in a system message, or set tools_key to another field");
  return text;
}

EncodedPrompt PromptEncoder::encode(const Problem& problem) const {
  EncodedPrompt prompt;
  if (problem.messages.empty()) {
    refuse_tools(problem.tools);
    prompt.text = problem.prompt;
    prompt.ids = encode_plain_prompt(tokenizer_, prompt.text);
    if (problem.truncate_to > 0 && truncate_left(prompt.ids, problem.truncate_to) > 0)
      prompt.text = tokenizer_.decode(prompt.ids);
  } else {
    prompt.text = render(problem.messages, problem.tools, true);
    prompt.ids = tokenizer_.encode(prompt.text);  // writing a bos_token is the chat template's task
  }
  if (prompt.ids.empty()) throw UserError(str("problem ", quoted(problem.id), ": its prompt is empty"));
  return prompt;
}

EncodedExample PromptEncoder::encode(const SftExample& example, std::optional<int32_t> stop_token) const {
  EncodedExample out;
  std::vector<int32_t> completion;
  if (example.messages.empty()) {
    refuse_tools(example.tools);
    out.ids = encode_plain_prompt(tokenizer_, example.prompt);
    completion = tokenizer_.encode_continuation(example.completion);
    if (stop_token) completion.push_back(*stop_token);
  } else {
    OrderedJson asked = example.messages;
    asked.erase(asked.size() - 1);
    const std::string prompt = render(asked, example.tools, true);
    const std::string all = render(example.messages, example.tools, false);
    if (!all.starts_with(prompt)) {
      throw UserError(
          "the chat template writes a finished conversation differently from a prompt and its answer: such a "
          "template cannot be trained on; use prompt and completion instead");
    }
    check_reasoning(example, all);
    out.ids = tokenizer_.encode(prompt);
    completion = tokenizer_.encode_continuation(all.substr(prompt.size()));
    end_turn(example, completion, stop_token);
  }
  out.loss_mask.assign(out.ids.size(), 0);
  out.ids.insert(out.ids.end(), completion.begin(), completion.end());
  out.loss_mask.resize(out.ids.size(), 1);
  return out;
}

size_t PromptEncoder::truncate_left(std::vector<int32_t>& prompt, int64_t most) const {
  if (std::ssize(prompt) <= most) return 0;
  const auto begin =
      std::find_if(prompt.begin(), prompt.end(), [&](int32_t id) { return !tokenizer_.is_special(id); });
  const auto num_removed = std::min(std::ssize(prompt) - most, std::distance(begin, prompt.end()));
  prompt.erase(begin, begin + num_removed);
  return static_cast<size_t>(num_removed);
}

// A model would learn to answer without its reasoning.
void PromptEncoder::check_reasoning(const SftExample& example, const std::string& text) const {
  OrderedJson chat = example.messages;
  if (chat.back().erase("reasoning_content") > 0 && render(chat, example.tools, false) == text)
    throw UserError(str("messages[", chat.size() - 1,
                        "].reasoning_content: the model's chat template does not show it; use a model or a "
                        "chat_template.jinja that does, or write the reasoning as content"));
}

// A turn ends with the first special token that the template writes after the content of a message without
// calls. Text after that token is never generated. If there is none (GLM's turns end when the next one
// begins), `stop_token` ends the turn.
void PromptEncoder::end_turn(const SftExample& example, std::vector<int32_t>& completion,
                             std::optional<int32_t> stop_token) const {
  Conversation conversation;
  conversation.messages = example.messages;
  conversation.tools = example.tools;
  const auto after = text_after_content(chat_template(), std::move(conversation));
  if (!after)
    throw UserError(
        "the chat template does not write the last message verbatim: such a template cannot be trained on; "
        "use prompt and completion instead");
  const auto is_special = [&](int32_t id) { return tokenizer_.is_special(id); };
  const std::vector<int32_t> tail = tokenizer_.encode_continuation(*after);
  auto left = std::count_if(tail.begin(), tail.end(), is_special);
  if (left == 0) {
    if (stop_token) completion.push_back(*stop_token);
    return;
  }
  for (size_t i = completion.size(); i-- > 0;)
    if (is_special(completion[i]) && --left == 0) return completion.resize(i + 1);
}

}  // namespace bough
