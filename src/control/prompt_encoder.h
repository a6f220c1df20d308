// Encodes problems and examples as token ids, by the model's tokenizer and, for conversations, its chat
// template.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "control/generator.h"
#include "data/dataset.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"

namespace bough {

// A sequence for supervised training: its tokens, and a 1 for each that is trained.
struct EncodedExample {
  std::vector<int32_t> ids;
  std::vector<uint8_t> loss_mask;
};

class PromptEncoder final : public TextCodec, public ChatCodec {
 public:
  explicit PromptEncoder(Tokenizer tokenizer, std::optional<ChatTemplate> chat_template = {});

  // Loads the tokenizer and, if there is a usable one, the chat template of a model directory. Throws
  // UserError if there is no tokenizer.json.
  static PromptEncoder from_directory(const std::filesystem::path& directory);

  const Tokenizer& tokenizer() const { return tokenizer_; }

  // A plain prompt gets the special tokens of the tokenizer's own template (such as a BOS). A conversation
  // gets those that the chat template writes, as in transformers' apply_chat_template. Throws UserError if a
  // conversation has no usable chat template, if a plain prompt has tools, or if the prompt is empty; the
  // last message names the problem.
  EncodedPrompt encode(const Problem& problem) const override;
  std::string decode(std::span<const int32_t> ids) const override { return tokenizer_.decode(ids); }

  // Renders the assistant's messages in the form that the template reads. Throws UserError if they have calls
  // and the template shows none.
  std::string render(const Conversation& conversation) const override;
  std::string tool_call_parser() const override {
    return chat_template_ ? chat_template_->tool_call_parser() : "";
  }
  std::vector<int32_t> encode_chat(std::string_view text, bool continues) const override {
    return continues ? tokenizer_.encode_continuation(text) : tokenizer_.encode(text);
  }
  std::string text_of(std::span<const int32_t> ids) const override {
    return tokenizer_.decode(ids, /*skip_special_tokens=*/false);
  }

  // Returns the prompt with mask 0, then the completion and `stop_token` (nullopt: nothing is appended)
  // with mask 1. In a conversation only the last message is trained, with its reasoning and calls, up to
  // the special token that ends its turn. If the template writes no such token, `stop_token` follows.
  // Prompt and completion are encoded separately, as in generation, without a space in front of the
  // completion (Tokenizer::encode_continuation). Throws UserError if the chat template is missing or
  // unusable for training.
  EncodedExample encode(const SftExample& example, std::optional<int32_t> stop_token) const;

  // Removes tokens of a prompt at its left, so that `most` are left. Special tokens at its begin, such as a
  // BOS, stay. Returns how many tokens were removed.
  size_t truncate_left(std::vector<int32_t>& prompt, int64_t most) const;

 private:
  const ChatTemplate& chat_template() const;
  // Also throws UserError if there are tools and the template shows none.
  std::string render(const OrderedJson& messages, const OrderedJson& tools, bool add_generation_prompt) const;
  void check_reasoning(const SftExample& example, const std::string& text) const;
  void end_turn(const SftExample& example, std::vector<int32_t>& completion,
                std::optional<int32_t> stop_token) const;

  Tokenizer tokenizer_;
  std::optional<ChatTemplate> chat_template_;
  std::string no_template_;  // why there is none
};

}  // namespace bough
