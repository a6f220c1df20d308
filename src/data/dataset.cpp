#include "data/dataset.h"

#include <algorithm>
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
  std::string text;               // the prompt or question
  std::vector<Message> messages;  // the conversation without the answer
  std::optional<std::string> answer;
  std::optional<std::string> completion;
  Json fields;
};

std::string type_of(const Json& value) {
  return str(value.type_name(), " ",
             quoted(value.is_string() ? value.get<std::string>() : dump_line(value), 40));
}

[[noreturn]] void wrong_type(const std::string& where, const std::string& field, const Json& got,
                             const char* expected) {
  throw UserError(str(where, ": ", field, ": got ", type_of(got), ", expected ", expected));
}

class LineReader {
 public:
  LineReader(const DatasetSettings& settings, std::string where, Json line)
      : settings_(settings), where_(std::move(where)), line_(std::move(line)) {}

  Record read(int64_t line_number) {
    if (!line_.is_object())
      wrong_type(where_, "the line", line_, "an object such as {\"question\": ..., \"answer\": ...}");
    Record record;
    record.where = where_;
    record.id = read_id(line_number);
    read_what_is_asked(record);
    record.answer = text_or_number(settings_.answer_key);
    record.completion = text_or_number(settings_.completion_key);
    if (!record.messages.empty() && record.messages.back().role == "assistant") {
      if (!record.answer) record.answer = record.messages.back().content;
      record.messages.pop_back();
    }
    if (record.kind == Record::Kind::messages &&
        (record.messages.empty() ||
         (record.messages.back().role != "user" && record.messages.back().role != "tool"))) {
      throw UserError(str(
          where_, ": ", settings_.messages_key, ": expected a user or tool message before the answer, got ",
          record.messages.empty() ? "none" : "a " + record.messages.back().role + " message"));
    }
    record.fields = std::move(line_);
    return record;
  }

 private:
  // nullptr where the field is missing or null.
  const Json* find(const std::string& key) const {
    const auto it = line_.find(key);
    return it == line_.end() || it->is_null() ? nullptr : &*it;
  }

  std::optional<std::string> text_or_number(const std::string& key) const {
    const Json* value = find(key);
    if (value == nullptr) return std::nullopt;
    if (value->is_string()) return value->get<std::string>();
    if (value->is_number()) return value->dump();
    wrong_type(where_, key, *value, "a text or a number");
  }

  std::string read_id(int64_t line_number) const {
    const Json* value = find(settings_.id_key);
    if (value == nullptr) return std::to_string(line_number);
    if (value->is_string()) return value->get<std::string>();
    if (value->is_number_integer()) return value->dump();
    wrong_type(where_, settings_.id_key, *value, "a text or an integer");
  }

  void read_what_is_asked(Record& record) const {
    for (const std::string& key : {settings_.messages_key, settings_.prompt_key, settings_.question_key}) {
      const Json* value = find(key);
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

  std::vector<Message> read_messages(const std::string& key, const Json& list) const {
    std::vector<Message> messages;
    for (size_t i = 0; i < list.size(); ++i) {
      const std::string field = str(key, "[", i, "]");
      if (!list[i].is_object()) wrong_type(where_, field, list[i], "an object with role and content");
      Message message;
      for (auto [name, into] : {std::pair{"role", &message.role}, std::pair{"content", &message.content}}) {
        const auto it = list[i].find(name);
        if (it == list[i].end()) throw UserError(str(where_, ": ", field, ".", name, " is missing"));
        if (!it->is_string()) wrong_type(where_, str(field, ".", name), *it, "a text");
        *into = it->get<std::string>();
      }
      if (message.role != "system" && message.role != "user" && message.role != "assistant" &&
          message.role != "tool") {
        throw UserError(str(where_, ": ", field, ".role: got ", quoted(message.role),
                            ", expected system, user, assistant or tool"));
      }
      messages.push_back(std::move(message));
    }
    if (messages.empty()) throw UserError(str(where_, ": ", key, ": the list is empty"));
    return messages;
  }

  const DatasetSettings& settings_;
  std::string where_;
  Json line_;
};

std::vector<Record> read_records(const DatasetSettings& settings, const std::string& path) {
  if (path.empty()) throw UserError("dataset: path is empty; set it to a JSON Lines file");
  const MappedFile file{std::filesystem::path(path)};
  std::string_view text = file.text();
  if (text.starts_with("\xEF\xBB\xBF")) text.remove_prefix(3);  // byte order mark
  std::vector<Record> records;
  for_each_json_line(text, path, [&](Json line, int64_t number) {
    records.push_back(LineReader(settings, str(path, ":", number), std::move(line)).read(number));
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
    if (!record.answer && !record.completion) {
      throw UserError(str(record.where, ": nothing to learn: expected ", settings.completion_key, ", ",
                          settings.answer_key, " or an assistant message at the end"));
    }
    SftExample example;
    lay_out(record, contents, settings, example);
    if (!example.messages.empty()) {
      example.messages.push_back({"assistant", record.completion ? *record.completion : *record.answer});
    } else {
      example.completion =
          record.completion ? *record.completion : settings.layout.answer_prefix + *record.answer;
    }
    examples.push_back(std::move(example));
  }
  return examples;
}

}  // namespace bough
