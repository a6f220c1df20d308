#include "data/dataset.h"

#include <algorithm>
#include <map>
#include <optional>
#include <unordered_set>

#include "base/error.h"
#include "base/file.h"

namespace bough {

namespace {

// One record: a line of the file, checked. The prompt layout is applied later (lay_out).
struct Record {
  enum class Kind { messages, prompt, question };
  Kind kind = Kind::question;
  std::string where;  // "file:line"
  std::string id;
  std::string text;          // the prompt or question
  OrderedJson messages;      // the conversation without its last message, if that is of the assistant
  OrderedJson tools;         // null: none
  OrderedJson last_message;  // the last message, if it is of the assistant; else null
  std::optional<std::string> answer;
  std::optional<std::string> completion;
  Json fields;
};

std::string type_of(const OrderedJson& value) {
  return str(value.type_name(), " ",
             quoted(value.is_string() ? value.get<std::string>() : dump_ordered(value), 40));
}

[[noreturn]] void wrong_type(const std::string& where, const std::string& field, const OrderedJson& got,
                             const char* expected) {
  throw UserError(str(where, ": ", field, ": got ", type_of(got), ", expected ", expected));
}

class LineReader {
 public:
  LineReader(const DatasetSettings& settings, const std::string& path, std::string_view line, int64_t number)
      : settings_(settings),
        where_(str(path, ":", number)),
        line_(parse_ordered_json(line, path, number, &lost_digits_)) {}

  Record read(int64_t line_number) {
    if (!line_.is_object())
      wrong_type(where_, "the line", line_, "an object such as {\"question\": ..., \"answer\": ...}");
    Record record;
    record.where = where_;
    record.id = read_id(line_number);
    read_what_is_asked(record);
    record.tools = read_tools();
    record.answer = text_or_number(settings_.answer_key);
    record.completion = text_or_number(settings_.completion_key);
    refuse_lost_digits();
    take_last_message(record);
    record.fields = Json(line_);
    return record;
  }

 private:
  // If the last message is of the assistant, it is what the model must write.
  void take_last_message(Record& record) const {
    OrderedJson& messages = record.messages;
    if (!messages.empty() && messages.back()["role"] == "assistant") {
      record.last_message = messages.back();
      messages.erase(messages.size() - 1);
      const OrderedJson content = record.last_message.value("content", OrderedJson());
      const std::string text = content.is_null() ? "" : content.get<std::string>();
      const bool is_text = !text.empty() || !has_calls_or_reasoning(record.last_message);
      if (!record.answer && is_text) record.answer = text;
    }
    if (record.kind != Record::Kind::messages) return;
    const std::string last = messages.empty() ? "" : messages.back()["role"].get<std::string>();
    if (last.empty() || last == "assistant") {
      throw UserError(str(where_, ": ", settings_.messages_key,
                          ": expected a message before the answer, got ",
                          last.empty() ? "none" : "one of the assistant"));
    }
  }

  static bool has_calls_or_reasoning(const OrderedJson& message) {
    return message.contains("tool_calls") || message.contains("reasoning_content");
  }

  // Whole numbers of more than 64 bits are exact as answers and ids, which are texts. A reward function would
  // get other fields with other digits.
  void refuse_lost_digits() {
    for (const auto& [key, digits] : lost_digits_) {
      if (digits.find_first_of(".eE") != std::string::npos) continue;
      if (key == settings_.answer_key || key == settings_.completion_key || key == settings_.id_key)
        line_[key] = digits;
      else
        throw UserError(str(where_, ": ", key, ": the whole number ", quoted(digits, 40),
                            " exceeds 64 bits; write it as a text"));
    }
  }

  // nullptr where the field is missing or null.
  const OrderedJson* find(const std::string& key) const {
    const auto it = line_.find(key);
    return it == line_.end() || it->is_null() ? nullptr : &*it;
  }

  std::optional<std::string> text_or_number(const std::string& key) const {
    const OrderedJson* value = find(key);
    if (value == nullptr) return std::nullopt;
    if (value->is_string()) return value->get<std::string>();
    if (value->is_number()) return number_text(key, *value);
    wrong_type(where_, key, *value, "a text or a number");
  }

  std::string read_id(int64_t line_number) const {
    const OrderedJson* value = find(settings_.id_key);
    if (value == nullptr) return std::to_string(line_number);
    if (value->is_string()) return value->get<std::string>();
    const std::string number = value->is_number() ? number_text(settings_.id_key, *value) : ".";
    if (number.find_first_of(".eE") == std::string::npos) return number;
    wrong_type(where_, settings_.id_key, *value, "a text or an integer");
  }

  // With the digits of the file.
  std::string number_text(const std::string& key, const OrderedJson& value) const {
    const auto lost = lost_digits_.find(key);
    return lost == lost_digits_.end() ? value.dump() : lost->second;
  }

  void read_what_is_asked(Record& record) const {
    for (const std::string& key : {settings_.messages_key, settings_.prompt_key, settings_.question_key}) {
      const OrderedJson* value = find(key);
      if (value == nullptr) continue;
      const bool may_be_list = key != settings_.question_key;  // in some files `prompt` is a list of messages
      if (may_be_list && value->is_array()) {
        record.kind = Record::Kind::messages;
        record.messages = read_messages(key, *value);
      } else if (key != settings_.messages_key && value->is_string()) {
        record.kind = key == settings_.prompt_key ? Record::Kind::prompt : Record::Kind::question;
        record.text = value->get<std::string>();
        if (record.text.empty()) throw UserError(str(where_, ": ", key, ": the text is empty"));
      } else {
        wrong_type(where_, key, *value, key == settings_.messages_key ? "a list of messages" : "a text");
      }
      return;
    }
    throw UserError(str(where_, ": none of the fields ", settings_.messages_key, ", ", settings_.prompt_key,
                        " and ", settings_.question_key, " is there (the line has: ", keys(),
                        "); set messages_key, prompt_key or question_key to the right field"));
  }

  std::string keys() const {
    std::string list;
    for (const auto& item : line_.items()) list += (list.empty() ? "" : ", ") + item.key();
    return list.empty() ? "nothing" : quoted(list);
  }

  OrderedJson read_messages(const std::string& key, const OrderedJson& list) const {
    if (list.empty()) throw UserError(str(where_, ": ", key, ": the list is empty"));
    OrderedJson messages;
    try {
      messages = template_messages(list, key);
    } catch (const MessageError& error) {
      throw UserError(str(where_, ": ", error.what()));
    }
    for (size_t i = 0; i < messages.size(); ++i) {
      const auto role = messages[i]["role"].get<std::string>();
      if (role != "system" && role != "user" && role != "assistant" && role != "tool")
        throw UserError(str(where_, ": ", key, "[", i, "].role: got ", quoted(role),
                            ", expected system, developer, user, assistant or tool"));
      if (messages[i].value("content", OrderedJson()).is_null() && !has_calls_or_reasoning(messages[i]))
        throw UserError(str(where_, ": ", key, "[", i, "].content: got nothing, and the message has no ",
                            "tool_calls and no reasoning_content; expected one of them"));
    }
    return messages;
  }

  OrderedJson read_tools() const {
    const OrderedJson* value = find(settings_.tools_key);
    if (value == nullptr) return {};
    try {
      return template_tools(*value, settings_.tools_key);
    } catch (const UserError& error) {
      throw UserError(str(where_, ": ", error.what(),
                          "; if the field has no tools of the model, set tools_key to another one"));
    }
  }

  const DatasetSettings& settings_;
  std::string where_;
  std::map<std::string, std::string> lost_digits_;  // numbers that line_ holds inexactly, as written
  OrderedJson line_;
};

std::vector<Record> read_records(const DatasetSettings& settings, const std::string& path) {
  if (path.empty()) throw UserError("dataset: path is empty; set it to a JSON Lines file");
  const MappedFile file{std::filesystem::path(path)};
  std::string_view text = file.text();
  if (text.starts_with("\xEF\xBB\xBF")) text.remove_prefix(3);  // byte order mark
  std::vector<Record> records;
  for_each_line(text, [&](std::string_view line, int64_t number) {
    records.push_back(LineReader(settings, path, line, number).read(number));
  });
  if (records.empty()) throw UserError(str(path, ": no records: every line is blank"));
  return records;
}

void require_answer(const Record& record, const DatasetSettings& settings) {
  if (record.answer) return;
  throw UserError(
      str(record.where, ": ", settings.answer_key,
          " is missing; set answer_key to its field, or set answer_required: false if the reward does not "
          "need an answer"));
}

std::vector<WorkedExample> to_examples(std::span<const Record> records, const DatasetSettings& settings) {
  std::vector<WorkedExample> examples;
  for (const Record& record : records) {
    if (record.kind == Record::Kind::messages) {
      throw UserError(str(record.where, ": a conversation cannot be a worked example of few_shot; expected ",
                          settings.question_key, " or ", settings.prompt_key));
    }
    require_answer(record, settings);
    examples.push_back({record.text, *record.answer, record.kind == Record::Kind::prompt});
  }
  return examples;
}

// Input that read_dataset() and read_sft() both need: the selected records, and the worked examples in front
// of each prompt.
struct Contents {
  std::vector<Record> records;
  std::vector<WorkedExample> examples;
};

Contents read_contents(const DatasetSettings& settings) {
  settings.layout.check();
  Contents contents{read_records(settings, settings.path), {}};
  std::vector<Record>& records = contents.records;
  if (const auto shots = static_cast<size_t>(settings.few_shot.shots); shots > 0) {
    const std::string& path = settings.few_shot.path.empty() ? settings.path : settings.few_shot.path;
    const std::vector<Record> source = read_records(settings, path);
    if (source.size() < shots) {
      throw UserError(
          str(path, ": few_shot.shots is ", shots, ", but the file has only ", source.size(), " records"));
    }
    contents.examples = to_examples(std::span(source).first(shots), settings);
    std::unordered_set<std::string> asked;
    for (const WorkedExample& example : contents.examples) asked.insert(example.question);
    std::erase_if(records, [&](const Record& record) { return asked.contains(record.text); });
    if (records.empty())
      throw UserError(
          str(settings.path,
              ": the file has only the worked examples of few_shot; add problems or set few_shot.path"));
  }
  if (settings.max_problems > 0 && records.size() > static_cast<size_t>(settings.max_problems)) {
    records.resize(static_cast<size_t>(settings.max_problems));
  }
  return contents;
}

// Fills in the prompt or the messages of a Problem or SftExample (`Target`).
template <class Target>
void lay_out(const Record& record, const Contents& contents, const DatasetSettings& settings,
             Target& target) {
  const PromptLayout& layout = settings.layout;
  target.where = record.where;
  target.tools = record.tools;
  if (record.kind == Record::Kind::messages) {
    target.messages = record.messages;
  } else if (settings.format == "chat") {
    target.messages = conversation(contents.examples, record.text, layout);
  } else {
    const bool is_prompt = record.kind == Record::Kind::prompt;
    target.prompt = plain_prompt(contents.examples,
                                 is_prompt ? record.text : render_question(record.text, layout), layout);
  }
}

}  // namespace

Dataset read_dataset(const DatasetSettings& settings) {
  Contents contents = read_contents(settings);
  std::vector<Problem> problems;
  problems.reserve(contents.records.size());
  for (Record& record : contents.records) {
    if (settings.answer_required) require_answer(record, settings);
    Problem problem;
    problem.id = record.id;
    lay_out(record, contents, settings, problem);
    problem.answer = record.answer.value_or("");
    problem.fields = std::move(record.fields);
    problems.push_back(std::move(problem));
  }
  return {std::move(problems), settings.path};
}

std::vector<SftExample> read_sft(const DatasetSettings& settings) {
  const Contents contents = read_contents(settings);
  std::vector<SftExample> examples;
  examples.reserve(contents.records.size());
  for (const Record& record : contents.records) {
    const bool has_message = !record.last_message.is_null();
    if (!record.answer && !record.completion && !has_message) {
      throw UserError(str(record.where, ": nothing to learn: expected ", settings.completion_key, ", ",
                          settings.answer_key, " or an assistant message at the end"));
    }
    SftExample example;
    lay_out(record, contents, settings, example);
    if (!example.messages.empty()) {
      if (has_message && !record.completion) example.messages.push_back(record.last_message);
      else
        example.messages.push_back(
            message_of("assistant", record.completion ? *record.completion : *record.answer));
    } else {
      example.completion =
          record.completion ? *record.completion : settings.layout.answer_prefix + *record.answer;
    }
    examples.push_back(std::move(example));
  }
  return examples;
}

}  // namespace bough
