// Conversations to text, in ChatML:
//
//   <|im_start|>role\ncontent<|im_end|>\n   for each message, then <|im_start|>assistant\n to make the model
//                                           speak
//
// The template of a model directory is run as it is written, by the small Jinja interpreter of
// chat_template_jinja.h, so that the text equals transformers' apply_chat_template. What is checked when it
// is loaded is that it is ChatML: probe conversations must give the text above. Three deviations are known
// and kept: the model's bos_token in front, a default system message where the conversation has none
// (Qwen2.5), and templates that treat <think> blocks of assistant messages (Qwen3). Tools are not passed to
// the template.
//
// The text is whole: it is encoded without the tokenizer's own template, as apply_chat_template does, so that
// a bos_token is there once if the chat template writes it, and else not at all.
#pragma once

#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "data/problems.h"

namespace bough {

class ChatTemplate {
 public:
  // Plain ChatML.
  ChatTemplate();
  // Reads chat_template.jinja, or else the `chat_template` of tokenizer_config.json. UserError if the
  // directory has neither, or the template is not ChatML: the message says to use plain prompts instead.
  static ChatTemplate from_directory(const std::filesystem::path& directory);
  // Makes a template from its text; `name` is what error messages call it.
  static ChatTemplate from_text(std::string_view jinja, const std::string& name);

  // The text of the conversation; with `add_generation_prompt` it ends where the assistant's answer begins.
  // UserError if a role is none of the three, or the template itself refuses the conversation.
  std::string render(std::span<const Message> messages, bool add_generation_prompt) const;

  // What the template puts in front of a conversation without a system message ("" mostly).
  const std::string& default_system() const { return default_system_; }

 private:
  struct Program;
  ChatTemplate(std::string_view source, Json variables, std::string name);
  void check_is_chatml();
  std::string run(std::span<const Message> messages, bool add_generation_prompt) const;

  std::shared_ptr<const Program> program_;  // immutable: copies share it, threads may too
  std::string name_;
  std::string begin_;           // in front of every conversation: bos_token, or nothing
  std::string default_system_;  // the content alone
  std::string default_block_;   // as rendered
};

// The Jinja source of plain ChatML, as `bough init` writes it.
std::string_view chatml_template();

}  // namespace bough
