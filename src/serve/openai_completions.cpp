// POST /v1/completions: prompts as text or token ids, answers as text.
#include <algorithm>

#include "base/clock.h"
#include "serve/api.h"
#include "text/prompt_ids.h"

namespace bough {

namespace {

struct CompletionOptions {
  ServedRequest request;
  std::vector<std::string> prompt_texts;  // if the prompts are echoed
  bool echo = false, logprobs = false, include_usage = false, return_token_ids = false;
};

int64_t num_characters(const std::string& text) {
  return std::count_if(text.begin(), text.end(), [](unsigned char c) { return (c & 0xC0) != 0x80; });
}

class CompletionAnswer final : public Answer {
 public:
  CompletionAnswer(const ServedModel& model, CompletionOptions options)
      : Answer(new_id("cmpl-")), model_(model), options_(std::move(options)), created_(now_seconds()) {
    for (size_t i = 0; i < static_cast<size_t>(options_.request.num_choices()); ++i)
      offsets_.push_back(options_.echo ? num_characters(prompt_text(i)) : 0);
  }

  Json whole(const std::vector<ChoiceDelta>& choices) override {
    Json answer = frame();
    for (size_t i = 0; i < choices.size(); ++i)
      answer["choices"].push_back(choice_json(i, choices[i], /*is_first=*/true));
    answer["usage"] = usage_json(options_.request.prompt_tokens(), count_tokens(choices));
    return answer;
  }

  std::string begin() override {
    if (!options_.echo && !options_.return_token_ids) return "";
    Json chunk = frame();
    for (size_t i = 0; i < offsets_.size(); ++i) chunk["choices"].push_back(choice_json(i, {}, true));
    return sse(chunk);
  }
  std::string add(size_t index, const ChoiceDelta& choice) override {
    const bool shows_tokens = options_.logprobs || options_.return_token_ids;
    if (choice.parts.content.empty() && !choice.end && !(shows_tokens && !choice.tokens.empty())) return "";
    Json chunk = frame();
    chunk["choices"].push_back(choice_json(index, choice, false));
    return sse(chunk);
  }
  std::string end(const std::vector<ChoiceDelta>& choices) override {
    std::string text;
    if (options_.include_usage) {
      Json chunk = frame();
      chunk["usage"] = usage_json(options_.request.prompt_tokens(), count_tokens(choices));
      text = sse(chunk);
    }
    return text + "data: [DONE]\n\n";
  }
  std::string fail(const ApiError& error) override { return sse(openai_error(error)) + "data: [DONE]\n\n"; }

 private:
  size_t prompt_of(size_t choice) const {
    return choice / static_cast<size_t>(options_.request.sampling.n_samples);
  }
  const std::string& prompt_text(size_t choice) const { return options_.prompt_texts[prompt_of(choice)]; }
  Json frame() const {
    return {{"id", id()},
            {"object", "text_completion"},
            {"created", created_},
            {"model", options_.request.model},
            {"choices", Json::array()}};
  }

  Json choice_json(size_t index, const ChoiceDelta& choice, bool is_first) {
    Json entry({{"index", index},
                {"text", (options_.echo && is_first ? prompt_text(index) : "") + choice.parts.content},
                {"finish_reason", nullptr},
                {"logprobs", nullptr}});
    if (choice.end) {
      entry["finish_reason"] = choice.end->reason == FinishReason::kLength ? "length" : "stop";
      entry["stop_reason"] = choice.end->stop ? Json(*choice.end->stop) : Json();
    }
    if (options_.logprobs) {
      Json tokens = Json::array(), values = Json::array(), offsets = Json::array(), tops = Json::array();
      for (const AnswerToken& token : choice.tokens) {
        const std::string text = token_text(model_.tokenizer, token.id);
        tokens.push_back(text);
        values.push_back(token.logprob);
        offsets.push_back(offsets_[index]);
        offsets_[index] += num_characters(text);
        Json top = Json::object();
        // Tokens may have the same text. The sampled token or else the most likely one is listed by its text,
        // the others by their ids, as vLLM writes them.
        for (const auto& [id, logprob] : token.top) {
          const std::string other = token_text(model_.tokenizer, id);
          const bool is_taken = id != token.id && (other == text || top.contains(other));
          top.emplace(is_taken ? str("token_id:", id) : other, logprob);
        }
        tops.push_back(std::move(top));
      }
      entry["logprobs"] = {
          {"tokens", std::move(tokens)},
          {"token_logprobs", std::move(values)},
          {"text_offset", std::move(offsets)},
          {"top_logprobs", options_.request.sampling.top_logprobs > 0 ? std::move(tops) : Json()}};
    }
    if (options_.return_token_ids) {
      Json ids = Json::array();
      for (const AnswerToken& token : choice.tokens) ids.push_back(token.id);
      entry["token_ids"] = std::move(ids);
      if (is_first) entry["prompt_token_ids"] = options_.request.prompts[prompt_of(index)];
    }
    return entry;
  }

  const ServedModel& model_;
  const CompletionOptions options_;
  const int64_t created_;
  std::vector<int64_t> offsets_;  // of the next token in each choice's text, in characters
};

// A text, token ids, or a list of either.
void read_prompts(Fields& fields, const ServedModel& model, ServedRequest& request) {
  const std::string expected = "a text, a list of token ids, or a list of either";
  const auto special = fields.boolean("add_special_tokens").value_or(true);
  const auto add = [&](const OrderedJson& prompt) {
    if (prompt.is_string()) {
      try {
        const auto& text = prompt.get_ref<const std::string&>();
        request.prompts.push_back(special ? encode_plain_prompt(model.tokenizer, text)
                                          : model.tokenizer.encode(text));
      } catch (const UserError& error) {
        throw ApiError(400, error.what(), "prompt");
      }
      return;
    }
    if (!prompt.is_array() || prompt.empty()) fields.wrong("prompt", expected);
    auto& ids = request.prompts.emplace_back();
    for (const OrderedJson& id : prompt) {
      if (!id.is_number_integer() || id < 0 || id >= model.vocab_size)
        throw ApiError(400,
                       str("prompt: got ", quoted(id.dump(-1, ' ', false, Json::error_handler_t::replace)),
                           ", expected a token id below ", model.vocab_size),
                       "prompt");
      ids.push_back(id.get<int32_t>());
    }
  };
  const OrderedJson* prompt = fields.find("prompt");
  if (!prompt) fields.wrong("prompt", expected);
  if (!prompt->is_array() || (!prompt->empty() && prompt->front().is_number())) return add(*prompt);
  if (prompt->empty() || static_cast<int64_t>(prompt->size()) > model.settings.max_samples_per_request)
    fields.wrong("prompt",
                 str("1 to ", model.settings.max_samples_per_request, " prompts (max_samples_per_request)"));
  for (const OrderedJson& each : *prompt) add(each);
}

}  // namespace

ReadRequest read_completion(const OrderedJson& body, const ServedModel& model,
                            const SessionPointer& session) {
  constexpr int64_t kDefaultTokens = 16;  // OpenAI's default
  Fields fields(body);
  ReadRequest read;
  ServedRequest& request = read.request = begin_request(fields, model, session);
  CompletionOptions options;
  options.include_usage = read_stream_options(fields, request);
  options.echo = fields.boolean("echo").value_or(false);
  if (const auto logprobs = fields.integer("logprobs", 0, 20)) {
    options.logprobs = true;
    read_top_logprobs(fields, "logprobs", model, request);
    if (options.echo)
      fields.wrong("logprobs", "none with echo: a prompt's log-probabilities are not computed");
  }
  options.return_token_ids = fields.boolean("return_token_ids").value_or(false);
  read_prompts(fields, model, request);
  read_sampling(fields, model, request);
  read_stop(fields, "stop", request.sampling);
  request.sampling.n_samples = fields.integer("n", 1, 100000).value_or(request.sampling.n_samples);
  const auto max_tokens = fields.integer("max_tokens", 1, 1000000000);
  if (const auto best_of = fields.integer("best_of", 1, 100000);
      best_of && *best_of != request.sampling.n_samples)
    fields.wrong("best_of", "n");
  fields.only("suffix", "", "the server does not support it");
  fields.only("logit_bias", OrderedJson::object(), "logits are not changed");
  for (const char* name : {"use_beam_search", "include_stop_str_in_output"})
    fields.only(name, false, "the server does not support it");
  for (const char* name : {"response_format", "structured_outputs"})
    fields.only(name, nullptr, "answers are not constrained to a format");
  for (const char* name : {"prompt_logprobs", "prompt_embeds"})
    fields.only(name, nullptr, "the server does not support it");
  fields.only("skip_special_tokens", true, "the server does not support it");
  fields.ignore({"user", "priority", "request_id", "cache_salt", "spaces_between_special_tokens"});
  fields.done();
  check_request(model, request, max_tokens.value_or(kDefaultTokens));
  if (options.echo)
    for (const auto& prompt : request.prompts) options.prompt_texts.push_back(model.tokenizer.decode(prompt));
  options.request = request;
  read.answer = std::make_unique<CompletionAnswer>(model, std::move(options));
  return read;
}

}  // namespace bough
