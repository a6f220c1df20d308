// Lists of sessions, runs and checkpoints, and downloads: what Tinker's RestClient and command line ask for.
#include <algorithm>
#include <charconv>
#include <fstream>

#include "base/clock.h"
#include "base/error.h"
#include "net/secrets.h"
#include "tinker/service_state.h"

namespace bough {

namespace {

constexpr int64_t kMostListed = 1000;
constexpr int64_t kLinkSeconds = 3600;  // how long a download link is valid

struct Page {
  int64_t limit = 0, offset = 0;
};

// Reads limit and offset, if the route has them, and access_scope, which makes no difference here.
Page read_page(const HttpRequest& request, int64_t limit) {
  OrderedJson query = OrderedJson::object();
  for (const auto& [name, value] : request.query) {
    int64_t number = 0;
    const char* const end = value.data() + value.size();
    const auto [stop, error] = std::from_chars(value.data(), end, number);
    const bool is_number = error == std::errc() && stop == end;
    query[name] = is_number ? OrderedJson(number) : OrderedJson(value);
  }
  Fields fields(query);
  Page page{limit, 0};
  if (limit > 0) {
    page.limit = fields.integer("limit", 1, kMostListed).value_or(limit);
    page.offset = fields.integer("offset", 0, kMostSeqId).value_or(0);
  }
  const std::string scope = fields.text("access_scope").value_or("owned");
  if (scope != "owned" && scope != "accessible") fields.wrong("access_scope", "owned or accessible");
  fields.done();
  return page;
}

// The page's part of a list.
Json cut(const Json& list, const Page& page) {
  Json part = Json::array();
  const auto total = std::ssize(list);
  for (int64_t i = page.offset; i < std::min<int64_t>(total, page.offset + page.limit); ++i)
    part.push_back(list[static_cast<size_t>(i)]);
  return part;
}

Json cursor(const Json& list, const Page& page) {
  return {{"offset", page.offset}, {"limit", page.limit}, {"total_count", list.size()}};
}

// Newest first by the entries' text at `key`, which is a time.
Json newest_first(std::vector<Json> entries, const char* key) {
  std::stable_sort(entries.begin(), entries.end(), [&](const Json& a, const Json& b) {
    return a[key].get<std::string>() > b[key].get<std::string>();
  });
  return entries;
}

}  // namespace

std::optional<Json> TrainingService::State::rest(const std::string& route, const HttpRequest& request,
                                                 const std::string& tenant) {
  constexpr std::string_view kRuns = "training_runs/", kSessions = "sessions/", kSamplers = "samplers/";
  if (route.starts_with(kRuns)) {
    const std::string after = route.substr(kRuns.size());
    const std::string id = after.substr(0, after.find('/'));
    const std::string rest = after.substr(std::min(after.size(), id.size() + 1));
    constexpr std::string_view kOne = "checkpoints/";
    if (!checkpoints.run(id, tenant))
      throw ApiError(404, str("training run ", quoted(id, 100), " does not exist"));
    if (request.method == "GET" && rest.empty()) {
      read_page(request, 0);
      return run(id, tenant);
    }
    if (request.method == "GET" && rest == "checkpoints") return Json{{"checkpoints", checkpoints.list(id)}};
    if (rest.starts_with(kOne)) return checkpoint(id, rest.substr(kOne.size()), request);
    return {};
  }
  if (request.method != "GET") return {};
  if (route == "healthz") return Json{{"status", "ok"}};
  if (route == "get_server_capabilities") return capabilities();
  if (route == "training_runs") return run_list(tenant, request);
  if (route == "checkpoints") return checkpoint_list(tenant, request);
  if (route == "sessions") return session_list(tenant, request);
  if (route.starts_with(kSamplers)) {
    const std::string id = route.substr(kSamplers.size());
    check_owner("sampling_session_id", id, tenant);
    return sampler(id);
  }
  if (route.starts_with(kSessions) && route.find('/', kSessions.size()) == std::string::npos) {
    const std::string id = route.substr(kSessions.size());
    check_owner("session_id", id, tenant);
    read_page(request, 0);
    return session(id);
  }
  return {};
}

Json TrainingService::State::run(const std::string& id, const std::string& tenant) {
  const Json description = checkpoints.run(id, tenant).value_or(Json::object());
  Json answer = {{"training_run_id", id},
                 {"base_model", description.value("base_model", shown_name)},
                 {"model_owner", tenant.empty() ? "local" : tenant},
                 {"is_lora", description.value("lora_rank", 1) > 0},
                 {"corrupted", false}};
  if (answer["is_lora"] && description.contains("lora_rank")) answer["lora_rank"] = description["lora_rank"];
  answer["user_metadata"] = text_values(description.value("user_metadata", Json()));
  int64_t last = description.value("time", int64_t{0});
  {
    const MutexLock lock(mutex);
    if (const auto found = models.find(id); found != models.end()) last = found->second.last_request;
  }
  answer["last_request_time"] = iso_time(last);
  for (const Json& each : checkpoints.list(id)) {  // oldest first
    if (each["checkpoint_type"] == "training") answer["last_checkpoint"] = each;
    if (each["checkpoint_type"] == "sampler") answer["last_sampler_checkpoint"] = each;
  }
  return answer;
}

Json TrainingService::State::run_list(const std::string& tenant, const HttpRequest& request) {
  const Page page = read_page(request, 20);
  std::vector<Json> runs;
  for (const std::string& id : checkpoints.runs(tenant)) runs.push_back(run(id, tenant));
  const Json list = newest_first(std::move(runs), "last_request_time");
  return {{"training_runs", cut(list, page)}, {"cursor", cursor(list, page)}};
}

Json TrainingService::State::checkpoint_list(const std::string& tenant, const HttpRequest& request) {
  const Page page = read_page(request, 100);
  std::vector<Json> all;
  for (const std::string& id : checkpoints.runs(tenant))
    for (Json& each : checkpoints.list(id)) all.push_back(std::move(each));
  const Json list = newest_first(std::move(all), "time");
  return {{"checkpoints", cut(list, page)}, {"cursor", cursor(list, page)}};
}

Json TrainingService::State::session_list(const std::string& tenant, const HttpRequest& request) {
  const Page page = read_page(request, 20);
  std::map<uint64_t, std::string, std::greater<>> newest;
  {
    const MutexLock lock(mutex);
    for (const auto& [id, session] : sessions)
      if (session.tenant == tenant) newest[session.number] = id;
  }
  Json list = Json::array();
  for (const auto& [number, id] : newest) list.push_back(id);
  return {{"sessions", cut(list, page)}};
}

Json TrainingService::State::session(const std::string& id) {
  const MutexLock lock(mutex);
  const auto found = sessions.find(id);
  if (found == sessions.end()) throw ApiError(404, str("session ", quoted(id, 100), " does not exist"));
  Json runs = Json::array(), samplers_of = Json::array();
  for (const auto& [model, each] : models)
    if (each.session == id) runs.push_back(model);
  for (const auto& [sampler, each] : sampling)
    if (each.session == id) samplers_of.push_back(sampler);
  Json answer = found->second.description;
  answer["user_metadata"] = text_values(answer["user_metadata"]);
  answer["training_run_ids"] = runs;
  answer["sampler_ids"] = samplers_of;
  return answer;
}

Json TrainingService::State::sampler(const std::string& id) {
  const MutexLock lock(mutex);
  const auto found = sampling.find(id);
  if (found == sampling.end()) throw ApiError(404, str("sampler ", quoted(id, 100), " does not exist"));
  Json answer = {{"sampler_id", id}, {"base_model", shown_name}};
  if (!found->second.model_path.empty()) answer["model_path"] = found->second.model_path;
  return answer;
}

// KIND/NAME: DELETE; /ttl: PUT; /publish: POST, DELETE; /external_weights_urls: GET.
Json TrainingService::State::checkpoint(const std::string& id, const std::string& rest,
                                        const HttpRequest& request) {
  const size_t slash = rest.find('/');
  const size_t end = slash == std::string::npos ? slash : rest.find('/', slash + 1);
  const std::string action = end == std::string::npos ? "" : rest.substr(end + 1);
  const std::string path = str("tinker://", id, "/", rest.substr(0, end));
  const std::string call = request.method + " " + action;
  const bool is_known = call == "DELETE " || call == "PUT ttl" || call == "POST publish" ||
                        call == "DELETE publish" || call == "GET external_weights_urls";
  if (!is_known)
    throw ApiError(404, str("unknown path training_runs/", quoted(id, 60), "/checkpoints/", quoted(rest, 80),
                            " for ", request.method, "; docs/tinker.md lists the paths"));
  const CheckpointName name = checkpoints.existing(path, "", "path");
  if (action == "external_weights_urls") return download_urls(name, request);
  if (action == "publish") {
    checkpoints.set_public(name, request.method == "POST");
  } else if (action == "ttl") {
    const OrderedJson body = parse_body(request);
    Fields fields(body);
    const auto ttl = fields.integer("ttl_seconds", kLeastTtl, kMostTtl);
    fields.done();
    checkpoints.set_ttl(name, ttl);
  } else {
    checkpoints.remove(name);
  }
  return nullptr;
}

// ---- Downloads

Json TrainingService::State::save_external(Fields& fields) {
  const std::string id = fields.required_text("model_id");
  const int64_t seq_id = fields.required_integer("seq_id", 1, kMostSeqId);
  const CheckpointName name = Checkpoints::checked(id, "external_weights", fields.required_text("path"));
  const Checkpoints::Terms terms = read_terms(fields);
  fields.only("age_encryption_recipients", nullptr, "files are not encrypted");
  fields.ignore({"type"});
  fields.done();
  return enqueue(id, seq_id, run_later([this, id, name, terms] {
                   checkpoints.publish(name, terms, [&](const std::filesystem::path& folder) {
                     training(id).save(folder, base.directory.string(), /*with_optimizer=*/false);
                   });
                   int64_t bytes = 0;
                   for (const auto& [file, size] : checkpoints.files(name)) bytes += size;
                   return FutureResult{
                       {{"path", name.path()}, {"size_bytes", bytes}, {"type", "save_weights_external"}}};
                 }));
}

Json TrainingService::State::download_urls(const CheckpointName& name, const HttpRequest& request) {
  const int64_t now = now_seconds();
  const std::string secret = random_hex(16);
  {
    const MutexLock lock(mutex);
    std::erase_if(downloads, [&](const auto& entry) {  // one link a checkpoint, so that they stay few
      return entry.second.expires <= now || entry.second.checkpoint.path() == name.path();
    });
    downloads[secret] = {name, now + kLinkSeconds};
  }
  const std::string host = request.header("host");
  Json urls = Json::object();
  for (const auto& [file, size] : checkpoints.files(name))
    urls[file] =
        str("http://", host.empty() ? http.url().substr(7) : host, "/api/v1/download/", secret, "/", file);
  return {{"urls", urls}, {"expires", iso_time(now + kLinkSeconds)}};
}

HttpResponse TrainingService::State::download(const std::string& route, const std::string& method) {
  constexpr size_t kStart = std::string_view("download/").size();
  const size_t slash = std::min(route.size(), route.find('/', kStart));
  const std::string secret = route.substr(kStart, slash - kStart),
                    file = route.substr(std::min(route.size(), slash + 1));
  if (method != "GET" && method != "HEAD")
    throw ApiError(405, str("download: got ", quoted(method, 20), ", expected GET"));
  std::optional<CheckpointName> name;
  {
    const MutexLock lock(mutex);
    const auto found = downloads.find(secret);
    if (found != downloads.end() && found->second.expires > now_seconds()) name = found->second.checkpoint;
  }
  if (!name) throw ApiError(404, "this download link does not exist or has expired; ask for another one");
  const std::filesystem::path folder = checkpoints.folder(*name);
  const auto files =
      std::filesystem::is_directory(folder) ? checkpoints.files(*name) : std::map<std::string, int64_t>();
  if (!files.contains(file))
    throw ApiError(404, str("download: ", name->path(), " has no file ", quoted(file, 100)));
  const auto stream = std::make_shared<std::ifstream>(folder / file, std::ios::binary);
  stream->seekg(0, std::ios::end);  // the size of the opened file, which may be newer than the list
  const int64_t bytes = stream->tellg();
  stream->seekg(0);
  if (!*stream) throw ApiError(404, str("download: ", name->path(), " cannot be read"));
  return {.content_type = "application/octet-stream", .stream = stream, .stream_bytes = bytes};
}

}  // namespace bough
