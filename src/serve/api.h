// What the APIs share: a request's body is read field by field into what the engine is asked (ServedRequest)
// and an object that writes the answer in the API's form (Answer).
//
// A field is supported, named as harmless and ignored, or refused by name: nothing that would change an
// answer is passed over in silence. Names are OpenAI's and Anthropic's; what these lack is called as vLLM
// calls it.
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
#include "text/tokenizer.h"

namespace bough {

// What a client is told. `type` is OpenAI's; Anthropic's follows from the status.
struct ApiError : std::runtime_error {
  ApiError(int status_, const std::string& message, std::string param_ = "", std::string code_ = "")
      : std::runtime_error(message), status(status_), param(std::move(param_)), code(std::move(code_)) {}
  int status;
  std::string param, code;
};

// The model as the APIs know it. Immutable: threads share it.
struct ServedModel {
  std::vector<std::string> names;     // the first in answers
  std::vector<std::string> adapters;  // their names; the engine is one of several
  bool any_name = false;
  Tokenizer tokenizer;
  std::optional<ChatTemplate> chat_template;
  std::string no_template;  // why there is none
  int64_t max_length = 0, vocab_size = 0;
  int64_t created = 0;  // seconds since 1970
  ServeSettings settings;

  // What the name in a request is answered with. ApiError 404.
  std::string name_for(const std::string& asked) const;
  bool is_adapter(const std::string& name) const;
  // Renders and encodes. ApiError: no template, or it refuses the conversation.
  std::string render(const Conversation& conversation) const;
  // The one of a token's log-probabilities that answers show.
  double logprob_of(double raw, double truncated) const {
    return settings.logprobs_mode == "raw_logprobs" ? raw : truncated;
  }
};

// Reads the fields of an object. `null` is as if it were not there. ApiError 400 names the field.
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
  void ignore(std::initializer_list<const char*> names);
  // Only this value (or none) is what the server does anyway.
  void only(const std::string& name, const OrderedJson& value, const std::string& why);
  // The rest is unknown.
  void done() const;

  std::string path(const std::string& name) const { return where_.empty() ? name : where_ + "." + name; }
  [[noreturn]] void wrong(const std::string& name, const std::string& expected);

 private:
  const OrderedJson& object_;
  const std::string where_;
  std::set<std::string> known_;
};

struct ServedRequest {
  std::string model;    // as answers name it
  std::string adapter;  // that is asked; empty: the model itself
  std::vector<std::vector<int32_t>> prompts;
  SamplingParameters sampling;
  std::optional<uint64_t> seed;  // draws depend on it, prompt and sample alone
  bool stream = false;
  std::string reasoning_parser, tool_call_parser;  // empty: not parsed
  OrderedJson tools;
  OutputBegin begun;
  // Of an agent that is trained: its session, and the prompt as that knows it.
  std::shared_ptr<AgentSession> session;
  std::shared_ptr<const AskedTurn> asked;

  int64_t num_choices() const { return static_cast<int64_t>(prompts.size()) * sampling.n_samples; }
  int64_t prompt_tokens() const;
};

// What came of a choice, or was added to it.
struct AnswerToken {
  int32_t id = 0;
  double logprob = 0;
  std::vector<std::pair<int32_t, double>> top;  // the most likely ones at its place, where they are asked for
};
struct ChoiceDelta {
  OutputParts parts;
  std::vector<AnswerToken> tokens;  // a stop token too
  std::optional<SampleEnd> end;

  bool empty() const {
    return parts.reasoning.empty() && parts.content.empty() && parts.calls.empty() && tokens.empty() && !end;
  }
};

// Writes one request's answer. Choices are numbered through all prompts.
class Answer {
 public:
  explicit Answer(std::string id) : id_(std::move(id)) {}
  virtual ~Answer() = default;
  const std::string& id() const { return id_; }  // that the client knows it by
  virtual Json whole(const std::vector<ChoiceDelta>& choices) = 0;
  virtual bool wants_deltas() const { return false; }  // add() is called, whether it is a stream or not
  // A stream: events as they go to the client. end() gets what all choices came to.
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
  std::optional<Json> ready;  // the answer, where no engine is needed for it
};

// Whose request it is; null: nobody's that is trained.
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

// What every request that generates begins with: its name for the model, and what it gets where it says
// nothing else.
ServedRequest begin_request(Fields& fields, const ServedModel& model, const SessionPointer& session);
// Fields that all of OpenAI's endpoints and vLLM's extensions have: temperature, top_p, top_k, min_p,
// penalties, stop_token_ids, ignore_eos, min_tokens, seed. In a session they are checked, but tokens are
// drawn as the run's gconfig says: what is trained must be drawn from the policy as the loss knows it.
void read_sampling(Fields& fields, const ServedModel& model, ServedRequest& request);
// `stream` and `stream_options`. Returns whether a stream ends with the usage.
bool read_stream_options(Fields& fields, ServedRequest& request);
// `stop`, a text or some.
void read_stop(Fields& fields, const std::string& name, SamplingParameters& sampling);
// What of the tools an answer calls. A call is forced by its beginning, which goes to the end of the prompt:
// the rest is the model's, and may be no call that can be read.
struct ToolChoice {
  enum class Kind { kNone, kAuto, kForced } kind = Kind::kAuto;
  std::string name;  // the only tool that the model is shown; empty: all
};
ToolChoice read_tool_choice(Fields& fields);  // as both of OpenAI's APIs have it
// Makes the conversation the request's only prompt, sets the parsers and checks its length. Its tools are
// OpenAI's.
void set_conversation(Conversation conversation, const ToolChoice& choice, const ServedModel& model,
                      ServedRequest& request);
// ApiError: no room for an answer, too many samples. Sets the limit of new tokens where none was asked.
void check_request(const ServedModel& model, ServedRequest& request, std::optional<int64_t> max_tokens);

// Tools of an API as the chat API has them: `function_of` makes the function of one. Null: there are none.
OrderedJson read_tools(Fields& fields, OrderedJson (*function_of)(Fields& tool));

// A message's content, a text or a list of parts that hold text, as one text.
std::string content_text(const OrderedJson& content, const std::string& where);
// A call's arguments, as templates want them.
OrderedJson arguments_object(const std::string& arguments, const std::string& where);

std::string new_id(const std::string& prefix);  // prefix and 24 hexadecimal digits
int64_t now_seconds();
Json usage_json(int64_t prompt_tokens, int64_t completion_tokens);  // of completions
std::string sse(const Json& data);                                  // "data: {...}\n\n"
std::string sse(const std::string& event, const Json& data);
int64_t count_tokens(const std::vector<ChoiceDelta>& choices);
// A token's text as log-probabilities show it, with its bytes.
// How many of the most likely tokens an answer shows beside each one drawn. ApiError 400 where the server's
// mode does not allow it.
void read_top_logprobs(Fields& fields, const std::string& name, const ServedModel& model,
                       ServedRequest& request);
Json logprob_json(const Tokenizer& tokenizer, const AnswerToken& token);
std::string token_text(const Tokenizer& tokenizer, int32_t id);  // U+FFFD for what is not UTF-8

}  // namespace bough
