#include "tinker/checkpoints.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <ctime>

#include "base/clock.h"
#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "serve/api.h"

namespace bough {

namespace fs = std::filesystem;

namespace {

constexpr const char* kTerms = "checkpoint.json";
constexpr const char* kRun = "run.json";
constexpr std::array<const char*, 3> kKinds = {"weights", "sampler_weights", "external_weights"};
constexpr std::array<const char*, 3> kTypes = {"training", "sampler", "external"};  // as the API names them
constexpr const char* kSnapshot = ".snapshot-";  // no client's name begins with a point
constexpr const char* kMissing = "there is no such checkpoint";
constexpr const char* kNew = ".new";  // a checkpoint NAME is written as .NAME.new
constexpr size_t kLongestName = 128;

bool is_plain(const std::string& name) {
  return !name.empty() && name.size() <= kLongestName && name.front() != '.' &&
         std::all_of(name.begin(), name.end(), [](unsigned char c) {
           return std::isalnum(c) != 0 || c == '-' || c == '_' || c == '.' || c == ':';
         });
}

[[noreturn]] void refuse_path(const std::string& path, const std::string& field, const std::string& why) {
  throw ApiError(400, str(field, ": got ", quoted(path, 200), ": ", why), field);
}

bool is_temporary(const std::string& name) {
  return name.starts_with(".") && name.ends_with(kNew);
}

}  // namespace

Json text_values(const Json& metadata) {
  if (!metadata.is_object()) return nullptr;
  Json texts = Json::object();
  for (const auto& [name, value] : metadata.items())
    texts[name] = value.is_string() ? value : Json(dump_line(value));
  return texts;
}

std::string iso_time(int64_t seconds) {
  const auto time = static_cast<std::time_t>(seconds);
  std::tm parts{};
  gmtime_r(&time, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

Checkpoints::Checkpoints(fs::path folder) : folder_(std::move(folder)) {
  make_directories(folder_);
}

CheckpointName Checkpoints::checked(const std::string& run, const std::string& kind,
                                    const std::string& name) {
  for (const std::string* part : {&run, &name})
    if (!is_plain(*part))
      throw ApiError(400,
                     str("path: got ", quoted(*part, 80),
                         ", expected letters, digits, '-', '_', '.' and ':', at most ", kLongestName),
                     "path");
  if (std::find(kKinds.begin(), kKinds.end(), kind) == kKinds.end())
    throw ApiError(
        400, str("path: got ", quoted(kind, 40), ", expected weights, sampler_weights or external_weights"),
        "path");
  return {run, kind, name};
}

CheckpointName Checkpoints::snapshot(const std::string& run, int64_t seq_id) {
  return {run, "sampler_weights", str(kSnapshot, seq_id)};
}

void Checkpoints::begin_run(const std::string& run, Json description) const {
  const fs::path file = folder_ / run / kRun;
  if (fs::exists(file)) return;
  make_directories(folder_ / run);
  description["time"] = now_seconds();
  write_file_atomically(file, dump_pretty(description));
}

void Checkpoints::end_run(const std::string& run, int64_t last_request) const {
  const fs::path file = folder_ / run / kRun;
  bool is_empty = true;
  for (const char* kind : kKinds) {
    if (!fs::is_directory(folder_ / run / kind)) continue;
    for (const auto& entry : fs::directory_iterator(folder_ / run / kind)) {
      if (entry.path().filename().string().starts_with(kSnapshot)) remove_tree(entry.path());
      else is_empty = false;
    }
  }
  if (is_empty) return remove_tree(folder_ / run);
  if (!fs::exists(file)) return;
  Json description = read_json(file);
  description["time"] = last_request;
  write_file_atomically(file, dump_pretty(description));
}

std::optional<Json> Checkpoints::run(const std::string& run, const std::string& tenant) const {
  if (!is_plain(run) || !fs::is_directory(folder_ / run)) return {};
  const fs::path file = folder_ / run / kRun;
  Json description = fs::exists(file) ? read_json(file) : Json::object();  // none: of an older version
  if (description.value("tenant", "") != tenant) return {};
  return description;
}

std::vector<std::string> Checkpoints::runs(const std::string& tenant) const {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder_))
    if (const std::string name = entry.path().filename().string(); run(name, tenant)) names.push_back(name);
  return names;
}

void Checkpoints::check_readable(const std::string& path, const std::string& tenant,
                                 const std::string& field) const {
  const CheckpointName name = existing(path, "", field);
  if (!run(name.run, tenant) && !read_json(folder(name) / kTerms).value("public", false))
    refuse_path(path, field, kMissing);
}

void Checkpoints::remove_leftovers(const std::set<std::string>& runs) const {
  for (const auto& run : fs::directory_iterator(folder_)) {
    const std::string name = run.path().filename().string();
    if (name.front() == '.') continue;
    for (const char* kind : kKinds) {
      if (!fs::is_directory(run.path() / kind)) continue;
      for (const auto& entry : fs::directory_iterator(run.path() / kind)) {
        const std::string checkpoint = entry.path().filename().string();
        const bool is_left = checkpoint.starts_with(kSnapshot) && !runs.contains(name);
        if (is_left || is_temporary(checkpoint)) remove_tree(entry.path());
      }
    }
  }
}

fs::path Checkpoints::folder(const CheckpointName& name) const {
  return folder_ / name.run / name.kind / name.name;
}

CheckpointName Checkpoints::existing(const std::string& path, const std::string& kind,
                                     const std::string& field) const {
  constexpr std::string_view kScheme = "tinker://";
  const std::string expected = "tinker://RUN/" + (kind.empty() ? std::string("weights") : kind) + "/NAME";
  const auto refuse = [&](const std::string& why) { refuse_path(path, field, why); };
  const std::string rest = path.starts_with(kScheme) ? path.substr(kScheme.size()) : "";
  const size_t first = rest.find('/');
  const size_t second = first == std::string::npos ? first : rest.find('/', first + 1);
  if (second == std::string::npos) refuse("expected " + expected);
  const CheckpointName name =
      checked(rest.substr(0, first), rest.substr(first + 1, second - first - 1), rest.substr(second + 1));
  if (!kind.empty() && name.kind != kind) refuse("expected " + expected);
  if (!fs::exists(folder(name) / kTerms)) refuse(kMissing);
  return name;
}

void Checkpoints::publish(const CheckpointName& name, const Terms& terms,
                          const std::function<void(const fs::path&)>& write) const {
  const int64_t now = now_seconds();
  Json body = {{"time", now}, {"user_metadata", terms.user_metadata}, {"request", terms.request}};
  if (terms.ttl_seconds) body["expires_at"] = now + *terms.ttl_seconds;
  const fs::path temporary = folder_ / name.run / name.kind / ("." + name.name + kNew);
  remove_tree(temporary);
  make_directories(temporary);
  write(temporary);
  write_file_atomically(temporary / kTerms, dump_pretty(body));
  publish_directory(temporary, folder(name));
}

std::string Checkpoints::made_by(const CheckpointName& name) const {
  const fs::path file = folder(name) / kTerms;
  return fs::exists(file) ? read_json(file).value("request", "unknown") : "";
}

void Checkpoints::set_ttl(const CheckpointName& name, std::optional<int64_t> ttl_seconds) const {
  Json body = read_json(folder(name) / kTerms);
  body.erase("expires_at");
  if (ttl_seconds) body["expires_at"] = now_seconds() + *ttl_seconds;
  write_file_atomically(folder(name) / kTerms, dump_pretty(body));
}

void Checkpoints::set_public(const CheckpointName& name, bool is_public) const {
  Json body = read_json(folder(name) / kTerms);
  if (body.value("public", false) == is_public)
    throw ApiError(400, str(name.path(), is_public ? " is public already" : " is not public"));
  body["public"] = is_public;
  write_file_atomically(folder(name) / kTerms, dump_pretty(body));
}

std::map<std::string, int64_t> Checkpoints::files(const CheckpointName& name) const {
  std::map<std::string, int64_t> sizes;
  for (const auto& entry : fs::directory_iterator(folder(name)))
    if (entry.is_regular_file() && entry.path().filename() != kTerms)
      sizes[entry.path().filename().string()] = static_cast<int64_t>(entry.file_size());
  return sizes;
}

void Checkpoints::remove(const CheckpointName& name) const {
  remove_tree(folder(name));
}

Json Checkpoints::list(const std::string& run) const {
  std::vector<std::pair<int64_t, Json>> found;
  for (size_t kind = 0; kind < kKinds.size(); ++kind) {
    const fs::path of_kind = folder_ / run / kKinds[kind];
    if (!fs::is_directory(of_kind)) continue;
    for (const auto& entry : fs::directory_iterator(of_kind)) {
      if (!fs::exists(entry.path() / kTerms) || entry.path().filename().string().front() == '.') continue;
      const CheckpointName name{run, kKinds[kind], entry.path().filename().string()};
      int64_t bytes = 0;
      for (const auto& [file, size] : files(name)) bytes += size;
      const Json terms = read_json(entry.path() / kTerms);
      Json each = {{"checkpoint_id", name.kind + "/" + name.name},
                   {"checkpoint_type", kTypes[kind]},
                   {"time", iso_time(terms["time"].get<int64_t>())},
                   {"tinker_path", name.path()},
                   {"size_bytes", bytes},
                   {"public", terms.value("public", false)},
                   {"user_metadata", text_values(terms["user_metadata"])}};
      if (terms.contains("expires_at")) each["expires_at"] = iso_time(terms["expires_at"].get<int64_t>());
      found.emplace_back(terms["time"].get<int64_t>(), std::move(each));
    }
  }
  std::stable_sort(found.begin(), found.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  Json list = Json::array();
  for (auto& [time, each] : found) list.push_back(std::move(each));
  return list;
}

std::string Checkpoints::newest(const std::string& run) const {
  std::string path;
  if (!is_plain(run)) return path;
  for (const Json& each : list(run))
    if (each["checkpoint_type"] == "training") path = each["tinker_path"].get<std::string>();
  return path;
}

LoraSettings Checkpoints::adapter(const CheckpointName& name) const {
  const fs::path file = folder(name) / "adapter_config.json";
  if (!fs::exists(file)) return {};
  const Json config = read_json(file);
  try {
    LoraSettings adapter;
    adapter.rank = config.at("r").get<int64_t>();
    adapter.alpha = config.at("lora_alpha").get<double>();
    adapter.targets.clear();
    for (const Json& target : config.at("target_modules"))
      adapter.targets.push_back({target.get<std::string>()});
    return adapter;
  } catch (const Json::exception& error) {
    throw UserError(str(file.string(), ": no settings of an adapter: ", error.what()));
  }
}

void Checkpoints::remove_expired() const {
  const int64_t now = now_seconds();
  for (const auto& run : fs::directory_iterator(folder_))
    for (const char* kind : kKinds) {
      if (!fs::is_directory(run.path() / kind)) continue;
      for (const auto& entry : fs::directory_iterator(run.path() / kind)) try {
          const fs::path terms = entry.path() / kTerms;
          if (!fs::exists(terms) || read_json(terms).value("expires_at", now + 1) > now) continue;
          log_info(str("serve: ", entry.path().string(), " has expired and is removed"));
          remove_tree(entry.path());
        } catch (const std::exception& error) {
          log_warning(str("serve: ", entry.path().string(), ": ", error.what()));
        }
    }
}

}  // namespace bough
