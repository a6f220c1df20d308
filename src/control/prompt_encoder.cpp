#include "control/prompt_encoder.h"

#include <utility>

#include "base/error.h"

namespace bough {

namespace {

constexpr std::string_view kEndOfTurn = "<|im_end|>";

}  // namespace

PromptEncoder::PromptEncoder(Tokenizer tokenizer, std::optional<ChatTemplate> chat_template)
    : tokenizer_(std::move(tokenizer)), chat_template_(std::move(chat_template)) {}

PromptEncoder PromptEncoder::from_directory(const std::filesystem::path& directory) {
  PromptEncoder encoder(Tokenizer::load(directory));
  try {
    encoder.chat_template_ = ChatTemplate::from_directory(directory);
  } catch (const UserError& error) {
    encoder.no_template_ = error.what();  // matters only to those who have conversations
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
    prompt.ids = tokenizer_.encode(prompt.text, true);
  } else {
    prompt.text = chat_template().render(problem.messages, true);
    prompt.ids = tokenizer_.encode(prompt.text);  // a bos_token is the chat template's to write
  }
  if (prompt.ids.empty()) throw UserError(str("problem ", quoted(problem.id), ": its prompt is empty"));
  return prompt;
}

EncodedExample PromptEncoder::encode(const SftExample& example, std::optional<int32_t> stop_token) const {
  EncodedExample out;
  std::vector<int32_t> completion;
  if (example.messages.empty()) {
    out.ids = tokenizer_.encode(example.prompt, true);
    completion = tokenizer_.encode_continuation(example.completion);
    if (stop_token) completion.push_back(*stop_token);
  } else {
    const std::vector<Message>& chat = example.messages;
    const std::string prompt = chat_template().render(std::span(chat).first(chat.size() - 1), true);
    const std::string all = chat_template().render(chat, false);
    if (!all.starts_with(prompt)) {
      throw UserError(
          "the chat template writes a finished conversation differently from a prompt and its answer: "
          "such a template cannot be trained on; use prompt and completion instead");
    }
    std::string answer = all.substr(prompt.size());
    // What follows the end of the turn is never generated.
    if (const size_t end = answer.rfind(kEndOfTurn); end != std::string::npos)
      answer.resize(end + kEndOfTurn.size());
    out.ids = tokenizer_.encode(prompt);
    completion = tokenizer_.encode_continuation(answer);
  }
  out.loss_mask.assign(out.ids.size(), 0);
  out.ids.insert(out.ids.end(), completion.begin(), completion.end());
  out.loss_mask.resize(out.ids.size(), 1);
  return out;
}

}  // namespace bough
