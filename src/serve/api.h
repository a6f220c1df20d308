// Code that all APIs share. A request's body is read field by field. The result is a request for the engine
// (ServedRequest) and an object that writes the answer in the API's format (Answer).
//
// Each field is supported, listed as harmless and ignored, or refused by name. A field that would change the
// answer is never silently ignored. Fields have OpenAI's and Anthropic's names, extensions have vLLM's.
#pragma once

#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "serve/agent_session.h"
#include "serve/sample_text.h"
#include "serve/settings.h"
#include "text/chat_template.h"
#include "text/message.h"
#include "text/tokenizer.h"

namespace bough {

// An error that the client is told. The error type that each API shows follows from `status`.
struct ApiError : std::runtime_error {
  ApiError(int status_, const std::string& message, std::string param_ = "", std::string code_ = "")
      : std::runtime_error(message), status(status_), param(std::move(param_)), code(std::move(code_)) {}
  int status;
  std::string param, code;
};

// Returns read(). A message of a wrong form becomes an ApiError 400 that names its field.
template <class Read>
auto with_api_errors(Read&& read) {
  try {
    return read();
  } catch (const MessageError& error) {
    throw ApiError(400, error.what(), error.field);
  }
}

// The model as the APIs show it. Immutable, so threads may share it.
struct ServedModel {
  std::vector<std::string> names;     // answers show the first one
  std::vector<std::string> adapters;  // names of LoRA adapters
  bool any_name = false;
  Tokenizer tokenizer;
  std::optional<ChatTemplate> chat_template;
  std::string no_template;  // why there is no chat template
  int64_t max_length = 0, vocab_size = 0;
  int64_t created = 0;  // seconds since 1970
  ServeSettings settings;

  // The model name in answers to a request that asked for `asked`: the first name if `asked` is empty. Throws
  // ApiError 404 if no model or adapter has the name `asked`, unless any_name.
  std::string name_for(const std::string& asked) const;
  bool is_adapter(const std::string& name) const;
  // Renders the chat template, with the assistant's messages in the form that it reads. Calls that the
  // template does not show are written as text. Throws ApiError 400 if there is no template, the template
  // raises an error, or calls can be shown in neither way.
  std::string render(Conversation conversation) const;
  // The log-probability that answers show, by logprobs_mode.
  double logprob_of(double raw, double truncated) const {
    return settings.logprobs_mode == "raw_logprobs" ? raw : truncated;
  }
};

// The reason for which formats of answers are refused, and what to do instead.
inline constexpr const char* kUnconstrained =
    "answers are not constrained to a format; for an object, offer a tool with its schema and force the call "
    "by tool_choice";

// Reads the fields of a JSON object. A field with value null counts as missing. A field of a wrong type or
// range throws ApiError 400 that names the field.
class Fields {
 public:
  explicit Fields(const OrderedJson& object, std::string where = "");

  const OrderedJson* find(const std::string& name);
  const OrderedJson* array(const std::string& name);
  const OrderedJson* object(const std::string& name);
  std::optional<bool> boolean(const std::string& name);
  std::optional<int64_t> integer(const std::string& name, int64_t low, int64_t high);
  std::optional<double> number(const std::string& name, double low, double high);
  std::optional<std::string> text(const std::string& name);
  std::string required_text(const std::string& name);
  int64_t required_integer(const std::string& name, int64_t low, int64_t high);
  void ignore(std::initializer_list<const char*> names);
  // Accepts the field only with `value`, which describes what the server does anyway.
  void only(const std::string& name, const OrderedJson& value, const std::string& why);
  // Throws ApiError 400 if the object has a field that was not read or ignored before.
  void done() const;

  std::string path(const std::string& name) const { return where_.empty() ? name : where_ + "." + name; }
  [[noreturn]] void wrong(const std::string& name, const std::string& expected);

 private:
  const OrderedJson& object_;
  const std::string where_;
  std::set<std::string> known_;
};

struct ServedRequest {
  std::string model;    // name in answers
  std::string adapter;  // LoRA adapter; empty: the model itself
  std::vector<std::vector<int32_t>> prompts;
  SamplingParameters sampling;
  std::optional<uint64_t> seed;  // if set, samples depend only on seed, prompt and sample number
  bool stream = false;
  std::string reasoning_parser, tool_call_parser;  // empty: not parsed
  OrderedJson tools;
  bool ends_after_call = false;
  OutputBegin begun;
  // The session of a trained agent's request, and the request's place in its rows. Otherwise nullptr.
  std::shared_ptr<AgentSession> session;
  std::shared_ptr<const AskedTurn> asked;

  int64_t num_choices() const { return static_cast<int64_t>(prompts.size()) * sampling.n_samples; }
  int64_t prompt_tokens() const;
};

// An output token of a choice, as answers show it. A ChoiceDelta has the output of a choice that is new (in
// add()), or all of it (in whole() and end()).
struct AnswerToken {
  int32_t id = 0;
  double logprob = 0;
  std::vector<std::pair<int32_t, double>> top;  // top-k tokens with log-probabilities, if asked for
};
struct ChoiceDelta {
  OutputParts parts;
  std::vector<AnswerToken> tokens;  // including a stop token
  std::optional<SampleEnd> end;

  bool empty() const {
    return parts.reasoning.empty() && parts.content.empty() && parts.calls.empty() && tokens.empty() && !end;
  }
};

// Writes one request's answer. Choice numbers are prompt * n_samples + sample.
class Answer {
 public:
  explicit Answer(std::string id) : id_(std::move(id)) {}
  virtual ~Answer() = default;
  const std::string& id() const { return id_; }  // the answer's id, known to the client
  virtual Json whole(const std::vector<ChoiceDelta>& choices) = 0;
  virtual bool wants_deltas() const { return false; }  // true: add() is called without streaming too
  // The events of a stream, as sent to the client. end() gets the complete output of all choices.
  virtual std::string begin() = 0;
  virtual std::string add(size_t choice, const ChoiceDelta& delta) = 0;
  virtual std::string end(const std::vector<ChoiceDelta>& choices) = 0;
  virtual std::string fail(const ApiError& error) = 0;

 private:
  const std::string id_;
};

struct ReadRequest {
  ServedRequest request;
  std::unique_ptr<Answer> answer;
  std::optional<Json> ready;  // the answer, if it does not need the engine
};

// The session that a request belongs to. nullptr if the request does not come from a trained agent.
using SessionPointer = std::shared_ptr<AgentSession>;

struct Api {
  const char* path;
  ReadRequest (*read)(const OrderedJson& body, const ServedModel& model, const SessionPointer& session);
  Json (*error)(const ApiError& error);
};

// One for each endpoint that generates (and Anthropic's count_tokens).
ReadRequest read_chat_completion(const OrderedJson& body, const ServedModel& model,
                                 const SessionPointer& session);
ReadRequest read_completion(const OrderedJson& body, const ServedModel& model, const SessionPointer& session);
ReadRequest read_response(const OrderedJson& body, const ServedModel& model, const SessionPointer& session);
ReadRequest read_message(const OrderedJson& body, const ServedModel& model, const SessionPointer& session);
ReadRequest read_token_count(const OrderedJson& body, const ServedModel& model,
                             const SessionPointer& session);
Json openai_error(const ApiError& error);
Json anthropic_error(const ApiError& error);

// Reads the model's name, and fills in the default sampling settings (ServeSettings::gconfig).
ServedRequest begin_request(Fields& fields, const ServedModel& model, const SessionPointer& session);
// Reads temperature, top_p, top_k, min_p, penalties, stop_token_ids, ignore_eos, min_tokens and seed. In an
// agent's session these fields are checked, but only stop_token_ids takes effect. Tokens are sampled by the
// run's gconfig, because the loss assumes this behavior policy.
void read_sampling(Fields& fields, const ServedModel& model, ServedRequest& request);
// Reads `stream` and `stream_options`. Returns whether a stream ends with the token usage.
bool read_stream_options(Fields& fields, ServedRequest& request);
// Reads the stop strings from field `name`: one text or a list of texts.
void read_stop(Fields& fields, const std::string& name, SamplingParameters& sampling);
// The tools that an answer may call. To force a call, the beginning of a call is appended to the prompt. The
// model writes the rest, which may fail to parse as a call.
struct ToolChoice {
  enum class Kind { kNone, kAuto, kForced } kind = Kind::kAuto;
  std::string name;       // the only tool shown to the model; empty: all tools
  bool one_call = false;  // an answer ends with its first call
};
// Reads tool_choice and parallel_tool_calls, in the format of either OpenAI API.
ToolChoice read_tool_choice(Fields& fields);
// Makes the conversation the request's only prompt and sets the parsers. Tools are in OpenAI's format. Throws
// ApiError 400 if the template refuses the conversation or the tool choice cannot be followed.
void set_conversation(Conversation conversation, const ToolChoice& choice, const ServedModel& model,
                      ServedRequest& request);
// Sets the limit of new tokens; without `max_tokens` it is gconfig's. Throws ApiError 400 if a prompt is
// empty or leaves no room for an answer in the context, or if there are too many samples.
void check_request(const ServedModel& model, ServedRequest& request, std::optional<int64_t> max_tokens);

// Converts the field `tools` to the format of OpenAI's chat API. `function_of` converts one tool. Returns
// null if there are no tools.
OrderedJson read_tools(Fields& fields, OrderedJson (*function_of)(Fields& tool));

// Joins a message's content, a text or a list of text parts, into one text.
std::string content_text(const OrderedJson& content, const std::string& where,
                         const char* separator = "\n");  // vLLM's
// Parses a call's arguments, because chat templates expect an object. Empty text: an empty object.
OrderedJson arguments_object(const std::string& arguments, const std::string& where);

std::string new_id(const std::string& prefix);  // prefix and 24 hexadecimal digits
// The id that the model wrote, or a new one. Mistral's templates accept only ids of nine letters and digits.
std::string id_of(const ToolCall& call, const std::string& tool_call_parser, const std::string& prefix);
Json usage_json(int64_t prompt_tokens, int64_t completion_tokens);  // OpenAI's format
std::string sse(const Json& data);                                  // "data: {...}\n\n"
std::string sse(const std::string& event, const Json& data);
int64_t count_tokens(const std::vector<ChoiceDelta>& choices);
int64_t count_reasoning_tokens(const std::vector<ChoiceDelta>& choices);  // of choices that have ended
// Reads from field `name` how many top-k tokens an answer shows for each sampled token. Throws ApiError 400
// if logprobs_mode is not raw_logprobs.
void read_top_logprobs(Fields& fields, const std::string& name, const ServedModel& model,
                       ServedRequest& request);
Json logprob_json(const Tokenizer& tokenizer, const AnswerToken& token);  // with text and bytes
std::string token_text(const Tokenizer& tokenizer, int32_t id);           // U+FFFD for invalid UTF-8

}  // namespace bough
