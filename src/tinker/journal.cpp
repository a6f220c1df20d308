#include "tinker/journal.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/descriptor.h"
#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "base/random.h"

namespace bough {

namespace fs = std::filesystem;

namespace {

constexpr const char* kBase = "base.json";
constexpr const char* kSession = "session.json";
constexpr const char* kSamplers = "samplers";
constexpr const char* kModel = "model.json";
constexpr const char* kStep = "step-";
constexpr const char* kAnswers = "answers-";
constexpr const char* kAnswersOfStep = "answers";  // in step-N
constexpr const char* kRequest = "request-";
constexpr const char* kDone = "done-";

fs::path numbered(const fs::path& folder, const char* prefix, int64_t number) {
  return folder / str(prefix, number);
}

std::optional<int64_t> number_of(const std::string& name, const std::string& prefix) {
  const std::string digits = name.starts_with(prefix) ? name.substr(prefix.size()) : "";
  if (digits.empty() || digits.size() > 18 || digits.find_first_not_of("0123456789") != std::string::npos)
    return std::nullopt;
  return std::stoll(digits);
}

std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

// A record is a line of JSON, with the length and the hash of what follows, and a payload. It is complete or
// absent after a kill. It can be torn after a power cut.
void write_record(const fs::path& path, Json header, std::string_view payload) {
  header["bytes"] = payload.size();
  header["hash"] = stable_hash(payload.data(), payload.size());
  const fs::path temporary = path.string() + ".new";
  remove_tree(temporary);
  try {
    AppendFile file(temporary);
    file.append(dump_line(header) + "\n");
    file.append(payload);
    fs::rename(temporary, path);
  } catch (...) {
    std::error_code ignored;
    fs::remove(temporary, ignored);
    throw;
  }
}

struct Record {
  Json header;
  std::string payload;
};
std::optional<Record> read_record(const fs::path& path) {
  const std::string text = read_file(path);
  const size_t end = text.find('\n');
  if (end == std::string::npos) return std::nullopt;
  try {
    Record record{parse_json(std::string_view(text).substr(0, end), path.string()), text.substr(end + 1)};
    if (record.header.at("bytes") != record.payload.size() ||
        record.header.at("hash") != stable_hash(record.payload.data(), record.payload.size()))
      return std::nullopt;
    return record;
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

// Flushes the entries of a folder, so that a power cut leaves the folders in it.
void sync_entries(const fs::path& folder) {
  const Descriptor descriptor(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  // Some file systems have nothing to flush and return EINVAL.
  if (descriptor.value < 0 || (::fsync(descriptor.value) != 0 && errno != EINVAL))
    throw IoError(str("cannot flush ", folder.string(), ": ", std::strerror(errno)));
}

using Answers = std::map<int64_t, std::shared_ptr<const FutureResult>>;

void write_answers(const fs::path& path, const Answers& answers) {
  Json all = Json::array();
  for (const auto& [seq_id, answer] : answers)
    all.push_back(
        {seq_id, answer->as_json(), Json::binary({answer->protobuf.begin(), answer->protobuf.end()})});
  const std::vector<uint8_t> bytes = Json::to_cbor(all);
  write_record(path, Json::object(), {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
}

// Adds the answers of a file to `answers` and returns their seq_ids.
std::vector<int64_t> read_answers(const fs::path& path, std::map<int64_t, FutureResult>& answers) {
  std::vector<int64_t> seq_ids;
  const std::optional<Record> record = read_record(path);
  if (!record) {
    log_warning(str("serve: ", path.string(),
                    " is damaged: its answers are lost, and clients that still wait "
                    "for them get an error"));
    return seq_ids;
  }
  for (const Json& each : Json::from_cbor(record->payload)) {
    const auto& protobuf = each.at(2).get_binary();
    seq_ids.push_back(each.at(0).get<int64_t>());
    answers[seq_ids.back()] = {.json = each.at(1), .protobuf = {protobuf.begin(), protobuf.end()}};
  }
  return seq_ids;
}

Json start_json(const ModelStart& start) {
  Json targets = Json::array();
  for (const LoraTarget& target : start.adapter.targets) targets.push_back(target.name);
  return {{"rank", start.adapter.rank}, {"alpha", start.adapter.alpha},
          {"targets", targets},         {"seed", start.seed},
          {"path", start.path},         {"with_optimizer", start.with_optimizer}};
}

ModelStart read_start(const fs::path& file) {
  const Json json = read_json(file);
  try {
    ModelStart start;
    start.adapter.rank = json.at("rank").get<int64_t>();
    start.adapter.alpha = json.at("alpha").get<double>();
    start.adapter.targets.clear();
    for (const Json& name : json.at("targets")) start.adapter.targets.push_back({name.get<std::string>()});
    start.seed = json.at("seed").get<uint64_t>();
    start.path = json.at("path").get<std::string>();
    start.with_optimizer = json.at("with_optimizer").get<bool>();
    return start;
  } catch (const Json::exception& error) {
    throw UserError(str(file.string(), ": not the settings of a model: ", error.what()));
  }
}

void check_same_base(const fs::path& folder, const Json& base) {
  const bool has_sessions = std::ranges::any_of(fs::directory_iterator(folder),
                                                [](const auto& entry) { return entry.is_directory(); });
  if (!has_sessions || !fs::exists(folder / kBase)) return;
  Json known = read_json(folder / kBase), given = base;
  const auto name = [](const Json& of) {
    return str(of.value("directory", ""), " in ", of.value("dtype", ""));
  };
  const std::string known_name = name(known), given_name = name(given);
  known.erase("directory");
  given.erase("directory");
  if (known != given)
    throw UserError(
        str(folder.string(), ": got ", given_name, " as base model, expected ", known_name,
            ", which sessions in this folder train: serve that model, choose another `folder`, or "
            "end the sessions by removing ",
            folder.string()));
}

}  // namespace

Json base_identity(const fs::path& directory, const std::string& dtype) {
  constexpr size_t kPieces = 16, kPieceBytes = size_t{64} << 10;
  Json files = Json::object();
  for (const std::string& name : names_in(directory)) {
    if (name != "config.json" && !name.ends_with(".safetensors")) continue;
    const MappedFile file(directory / name);
    Json hashes = Json::array();
    for (size_t i = 0; i < kPieces; ++i) {
      const size_t begin = file.size() / kPieces * i;
      hashes.push_back(stable_hash(file.data() + begin, std::min(kPieceBytes, file.size() - begin)));
    }
    files[name] = {file.size(), hashes};
  }
  return {{"directory", fs::weakly_canonical(directory).string()}, {"dtype", dtype}, {"files", files}};
}

Journal::Journal(fs::path folder, bool is_on, const Json& base) : folder_(std::move(folder)), is_on_(is_on) {
  if (!is_on_) {
    if (fs::exists(folder_))
      log_warning(str("serve: journal=false: the sessions in ", folder_.string(), " are removed"));
    remove_tree(folder_);
    return;
  }
  make_directories(folder_);
  check_same_base(folder_, base);
  write_file_atomically(folder_ / kBase, dump_pretty(base));
}

fs::path Journal::folder_of(const std::string& model) const {
  return folder_ / model.substr(0, model.find(':')) / model;
}

// ---- After a restart

namespace {
void restore_samplers(const fs::path& folder, RestoredSession& session) {
  if (!fs::is_directory(folder)) return;
  for (const std::string& name : names_in(folder)) try {
      if (name.ends_with(".json"))
        session.samplers[name.substr(0, name.size() - 5)] = read_json(folder / name);
    } catch (const UserError& error) {
      log_warning(str("serve: this sampling session is lost: ", error.what()));
    }
}
}  // namespace

std::vector<RestoredSession> Journal::restore() {
  std::vector<RestoredSession> sessions;
  if (!is_on_) return sessions;
  for (const std::string& id : names_in(folder_)) {
    const fs::path folder = folder_ / id;
    if (!fs::is_directory(folder)) continue;
    if (!fs::exists(folder / kSession)) {  // it was never acknowledged
      remove_tree(folder);
      continue;
    }
    RestoredSession session{.id = id, .description = {}, .samplers = {}, .models = {}};
    try {
      session.description = read_json(folder / kSession);
    } catch (const UserError& error) {
      log_warning(str("serve: this session is lost: ", error.what()));
      continue;
    }
    for (const std::string& name : names_in(folder)) {
      if (name == kSamplers || name == kSession) continue;
      RestoredModel& model = session.models.emplace_back();
      model.id = name;
      restore_model(folder / name, model);
      // A model without settings was never acknowledged.
      if (!model.failure.empty() || fs::exists(folder / name / kModel)) continue;
      session.models.pop_back();
      remove_tree(folder / name);
    }
    restore_samplers(folder / kSamplers, session);
    sessions.push_back(std::move(session));
  }
  return sessions;
}

void Journal::restore_model(const fs::path& folder, RestoredModel& restored) {
  Model model;
  try {
    restore_files(folder, restored, model);
    if (fs::exists(folder / kModel)) restored.start = read_start(folder / kModel);
  } catch (const std::exception& error) {
    restored.failure = str("its journal is damaged: ", error.what());
    return;
  }
  const MutexLock lock(mutex_);
  if (restored.start.adapter.rank > 0) models_[restored.id] = std::move(model);
}

void Journal::restore_files(const fs::path& folder, RestoredModel& restored, Model& model) {
  std::vector<int64_t> steps;
  for (const std::string& name : names_in(folder)) {
    if (const auto step = number_of(name, kStep)) steps.push_back(*step);
    if (name.starts_with(".") || name.ends_with(".new")) remove_tree(folder / name);
  }
  std::sort(steps.begin(), steps.end());
  for (const int64_t step : steps) {
    if (step == steps.back()) {
      model.snapshot = step;
      model.in_snapshot = read_answers(numbered(folder, kStep, step) / kAnswersOfStep, restored.answers);
      continue;
    }
    const fs::path answers = numbered(folder, kStep, step) / kAnswersOfStep;  // killed before this was done
    if (fs::exists(answers)) fs::rename(answers, numbered(folder, kAnswers, step));
    remove_tree(numbered(folder, kStep, step));
  }
  for (const std::string& name : names_in(folder)) {
    if (const auto mark = number_of(name, kDone)) model.mark = std::max(mark, model.mark);
    if (const auto last = number_of(name, kAnswers))
      model.answers[*last] = read_answers(folder / name, restored.answers);
  }
  model.next = restored.next = 1 + std::max(model.snapshot.value_or(0), model.mark.value_or(0));
  for (const auto& [seq_id, answer] : restored.answers)
    if (seq_id >= model.next) model.done.insert(seq_id);
  for (const std::string& name : names_in(folder)) {
    const auto seq_id = number_of(name, kRequest);
    if (!seq_id) continue;
    std::optional<Record> record;
    if (*seq_id >= model.next && !model.done.contains(*seq_id)) {
      record = read_record(folder / name);
      if (!record) log_warning(str("serve: ", (folder / name).string(), " is damaged: the request is lost"));
    }
    if (!record) {
      remove_tree(folder / name);
      continue;
    }
    model.requests.insert(*seq_id);
    restored.requests[*seq_id] = {record->header.at("route"), record->header.at("content_type"),
                                  std::move(record->payload)};
  }
}

// ---- While the service runs

void Journal::add_session(const std::string& session, const Json& description) {
  if (!is_on_) return;
  make_directories(folder_ / session);
  write_file_atomically(folder_ / session / kSession, dump_pretty(description));
  sync_entries(folder_);
}

void Journal::add_model(const std::string& model, const ModelStart& start) {
  if (!is_on_) return;
  const MutexLock lock(mutex_);
  if (models_.contains(model)) return;
  make_directories(folder_of(model));
  sync_entries(folder_of(model).parent_path());
  write_file_atomically(folder_of(model) / kModel, dump_pretty(start_json(start)));
  if (start.adapter.rank > 0) models_.try_emplace(model);
}

void Journal::add_sampler(const std::string& session, const std::string& id, const Json& sampler) {
  if (!is_on_) return;
  const fs::path folder = folder_ / session / kSamplers;
  make_directories(folder);
  write_file_atomically(folder / (id + ".json"), dump_pretty(sampler));
}

void Journal::remove_session(const std::string& session) {
  if (!is_on_) return;
  const MutexLock lock(mutex_);
  std::erase_if(models_, [&](const auto& entry) { return entry.first.starts_with(session + ":"); });
  remove_tree(folder_ / session);
}

void Journal::forget(const std::string& model) {
  const MutexLock lock(mutex_);
  models_.erase(model);
}

void Journal::accept(const std::string& model, int64_t seq_id, const JournalRequest& request) {
  const MutexLock lock(mutex_);
  const auto found = models_.find(model);
  if (found == models_.end() || seq_id < found->second.next || found->second.done.contains(seq_id) ||
      found->second.requests.contains(seq_id))
    return;
  write_record(numbered(folder_of(model), kRequest, seq_id),
               {{"route", request.route}, {"content_type", request.content_type}}, request.body);
  found->second.requests.insert(seq_id);
}

void Journal::answered(const std::string& model, int64_t seq_id, const FutureResult& result) {
  const MutexLock lock(mutex_);
  const auto found = models_.find(model);
  if (found == models_.end() || seq_id < found->second.next) return;
  const fs::path folder = folder_of(model);
  write_answers(numbered(folder, kAnswers, seq_id), {{seq_id, std::make_shared<const FutureResult>(result)}});
  found->second.answers[seq_id] = {seq_id};
  found->second.done.insert(seq_id);
  if (found->second.requests.erase(seq_id) > 0) remove_tree(numbered(folder, kRequest, seq_id));
}

void Journal::step(const std::string& model, int64_t seq_id, const Save& save, const Answer& answer) {
  Answers answers;
  {
    const MutexLock lock(mutex_);
    const auto found = models_.find(model);
    if (found == models_.end()) return;
    for (int64_t each = found->second.next; each <= seq_id; ++each)
      if (!found->second.done.contains(each)) answers[each] = nullptr;
  }
  for (auto& [each, value] : answers) value = answer(each);
  std::erase_if(answers, [](const auto& entry) { return !entry.second; });
  const fs::path folder = folder_of(model), temporary = folder / ".step";
  remove_tree(temporary);
  make_directories(temporary);
  try {
    save(temporary);
    write_answers(temporary / kAnswersOfStep, answers);
    publish_directory(temporary, numbered(folder, kStep, seq_id));
  } catch (...) {
    std::error_code ignored;
    fs::remove_all(temporary, ignored);
    throw;
  }
  const MutexLock lock(mutex_);
  const auto found = models_.find(model);
  if (found == models_.end()) return;
  Model& its = found->second;
  if (const auto old = std::exchange(its.snapshot, seq_id)) {
    std::error_code ignored;
    if (!its.in_snapshot.empty()) {
      fs::rename(numbered(folder, kStep, *old) / kAnswersOfStep, numbered(folder, kAnswers, *old), ignored);
      its.answers[*old] = std::move(its.in_snapshot);
    }
    fs::remove_all(numbered(folder, kStep, *old), ignored);
  }
  its.in_snapshot.clear();
  for (const auto& [each, value] : answers) its.in_snapshot.push_back(each);
  advance(folder, its, seq_id + 1);
}

// All requests before `next` are done. A file that cannot be removed is removed by the next start.
void Journal::advance(const fs::path& folder, Model& model, int64_t next) {
  model.next = next;
  model.done.erase(model.done.begin(), model.done.lower_bound(next));
  const auto end = model.requests.lower_bound(next);
  std::error_code ignored;
  for (auto each = model.requests.begin(); each != end; ++each)
    fs::remove(numbered(folder, kRequest, *each), ignored);
  model.requests.erase(model.requests.begin(), end);
}

std::optional<fs::path> Journal::snapshot(const std::string& model) const {
  const MutexLock lock(mutex_);
  const auto found = models_.find(model);
  if (found == models_.end() || !found->second.snapshot) return std::nullopt;
  return numbered(folder_of(model), kStep, *found->second.snapshot);
}

void Journal::drop_answers(const IsKept& is_kept) {
  const MutexLock lock(mutex_);
  for (auto& entry : models_) {
    const std::string& id = entry.first;
    Model& model = entry.second;
    const fs::path folder = folder_of(id);
    std::error_code ignored;
    int64_t next = model.next;
    while (model.done.contains(next)) ++next;
    if (next > model.next) {
      write_file_atomically(numbered(folder, kDone, next - 1), "");
      if (model.mark) fs::remove(numbered(folder, kDone, *model.mark), ignored);
      model.mark = next - 1;
      advance(folder, model, next);
    }
    const auto is_needed = [&](int64_t seq_id) { return seq_id >= model.next || is_kept(id, seq_id); };
    std::erase_if(model.answers, [&](const auto& file) {
      if (std::ranges::any_of(file.second, is_needed)) return false;
      fs::remove(numbered(folder, kAnswers, file.first), ignored);
      return true;
    });
  }
}

}  // namespace bough
