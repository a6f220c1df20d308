#include "control/prompt_encoder.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "text/prompt_ids.h"

namespace bough {

namespace {

// A placeholder for the last message's content. It shows what the template writes after the content.
constexpr std::string_view kProbe = "ContentOfTheLastMessage";

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

EncodedPrompt PromptEncoder::encode(const Problem& problem) const {
  EncodedPrompt prompt;
  if (problem.messages.empty()) {
    prompt.text = problem.prompt;
    prompt.ids = encode_plain_prompt(tokenizer_, prompt.text);
  } else {
    prompt.text = chat_template().render(problem.messages, true);
    prompt.ids = tokenizer_.encode(prompt.text);  // writing a bos_token is the chat template's task
  }
  if (prompt.ids.empty()) throw UserError(str("problem ", quoted(problem.id), ": its prompt is empty"));
  return prompt;
}

EncodedExample PromptEncoder::encode(const SftExample& example, std::optional<int32_t> stop_token) const {
  EncodedExample out;
  std::vector<int32_t> completion;
  if (example.messages.empty()) {
    out.ids = encode_plain_prompt(tokenizer_, example.prompt);
    completion = tokenizer_.encode_continuation(example.completion);
    if (stop_token) completion.push_back(*stop_token);
  } else {
    const std::vector<Message>& chat = example.messages;
    const std::string prompt = chat_template().render(std::span(chat).first(chat.size() - 1), true);
    const std::string all = chat_template().render(chat, false);
    if (!all.starts_with(prompt)) {
      throw UserError(
          "the chat template writes a finished conversation differently from a prompt and its answer: such a "
          "template cannot be trained on; use prompt and completion instead");
    }
    out.ids = tokenizer_.encode(prompt);
    completion = tokenizer_.encode_continuation(all.substr(prompt.size()));
    end_turn(chat, completion, stop_token);
  }
  out.loss_mask.assign(out.ids.size(), 0);
  out.ids.insert(out.ids.end(), completion.begin(), completion.end());
  out.loss_mask.resize(out.ids.size(), 1);
  return out;
}

// A turn ends with the first special token that the template writes after the content. Text after that token
// is never generated. If there is none (GLM's turns end when the next one begins), `stop_token` ends the
// turn.
void PromptEncoder::end_turn(std::vector<Message> chat, std::vector<int32_t>& completion,
                             std::optional<int32_t> stop_token) const {
  chat.back().content = kProbe;
  const std::string all = chat_template().render(chat, false);
  const size_t content = all.rfind(kProbe);
  if (content == std::string::npos)
    throw UserError(
        "the chat template does not write the last message verbatim: such a template cannot be trained on; "
        "use prompt and completion instead");
  const auto is_special = [&](int32_t id) { return tokenizer_.is_special(id); };
  const std::vector<int32_t> tail = tokenizer_.encode_continuation(all.substr(content + kProbe.size()));
  auto left = std::count_if(tail.begin(), tail.end(), is_special);
  if (left == 0) {
    if (stop_token) completion.push_back(*stop_token);
    return;
  }
  for (size_t i = completion.size(); i-- > 0;)
    if (is_special(completion[i]) && --left == 0) return completion.resize(i + 1);
}

}  // namespace bough
