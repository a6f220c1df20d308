#include "base/memory.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <map>
#include <optional>
#include <sstream>
#include <string_view>
#include <utility>
#include <vector>

namespace bough {

namespace fs = std::filesystem;

namespace {

// The number at the start of a file. nullopt if there is none: the file is missing, or holds "max".
std::optional<int64_t> read_number(const fs::path& path) {
  std::ifstream file(path);
  std::string word;
  int64_t value = 0;
  if (!(file >> word)) return {};
  // A number over 2^63 is no limit either.
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  if (error != std::errc() || end != word.data() + word.size()) return {};
  return value;
}

// Lines "name value" or "name: value unit", as in /proc/meminfo and memory.stat.
std::map<std::string, int64_t> read_table(const fs::path& path) {
  std::ifstream file(path);
  std::map<std::string, int64_t> table;
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string name;
    int64_t value = 0;
    if (!(words >> name >> value)) continue;
    if (name.back() == ':') name.pop_back();
    table[name] = value;
  }
  return table;
}

int64_t get(const std::map<std::string, int64_t>& table, const std::string& name, int64_t otherwise) {
  const auto found = table.find(name);
  return found == table.end() ? otherwise : found->second;
}

// mountinfo writes a space, tab, line break and backslash as a backslash and three octal digits.
std::string without_escapes(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    int code = 0;
    if (text[i] == '\\' && i + 3 < text.size() &&
        std::from_chars(text.data() + i + 1, text.data() + i + 4, code, 8).ptr == text.data() + i + 4) {
      out += static_cast<char>(code);
      i += 3;
    } else {
      out += text[i];
    }
  }
  return out;
}

bool has_word(std::string_view list, std::string_view word) {
  for (size_t begin = 0; begin <= list.size();) {
    const size_t end = std::min(list.find(',', begin), list.size());
    if (list.substr(begin, end - begin) == word) return true;
    begin = end + 1;
  }
  return false;
}

// A mounted hierarchy of control groups that may limit memory.
struct Hierarchy {
  bool version_2 = false;
  fs::path group;  // the group that is mounted at `point`: not "/" in a container without its own namespace
  fs::path point;
};

// Lines of mountinfo: id, parent, device, root, mount point, options, optional fields, "-", type, source,
// options of the file system.
std::vector<Hierarchy> read_hierarchies(const fs::path& root) {
  std::vector<Hierarchy> out;
  std::ifstream file(root / "proc/self/mountinfo");
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string skipped, group, point, type, options;
    if (!(words >> skipped >> skipped >> skipped >> group >> point)) continue;
    while (words >> skipped && skipped != "-") {
    }
    if (!(words >> type >> skipped >> options)) continue;
    if (type == "cgroup2" || (type == "cgroup" && has_word(options, "memory")))
      out.push_back({type == "cgroup2", without_escapes(group), without_escapes(point)});
  }
  return out;
}

// The group of this process in a hierarchy: lines "id:controllers:path" of /proc/self/cgroup, where version 2
// has no controllers. Empty if the process is in none.
fs::path read_group(const fs::path& root, bool version_2) {
  std::ifstream file(root / "proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (version_2 ? controllers.empty() : has_word(controllers, "memory")) return line.substr(second + 1);
  }
  return {};
}

struct Limit {
  int64_t bytes = 0;
  std::string file;  // without `root`
};

class Limits {
 public:
  explicit Limits(const fs::path& root) : root_(root) {
    const auto info = read_table(root / "proc/meminfo");
    const int64_t pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    memory_.limit = info.contains("MemTotal") ? info.at("MemTotal") * 1024 : pages * page;
    const int64_t free = get(info, "MemFree", memory_.limit / 1024) + get(info, "Cached", 0);
    memory_.available = std::min(get(info, "MemAvailable", free) * 1024, memory_.limit);
    memory_.limited_by = "/proc/meminfo";
  }

  // Applies the limits of a folder of a hierarchy and of the folders above it.
  void apply(const Hierarchy& hierarchy) {
    const fs::path own = read_group(root_, hierarchy.version_2);
    if (own.empty()) return;
    fs::path below = own.lexically_relative(hierarchy.group);
    // The process sees another tree than its group's: only the mounted group itself is known.
    if (below.empty() || *below.begin() == "..") below = ".";
    for (fs::path folder = (hierarchy.point / below).lexically_normal();; folder = folder.parent_path()) {
      if (folder.filename().empty()) folder = folder.parent_path();  // "…/." became "…/"
      hierarchy.version_2 ? apply_version_2(folder) : apply_version_1(folder);
      if (folder == hierarchy.point || folder == folder.parent_path()) return;
    }
  }

  const HostMemory& memory() const { return memory_; }

 private:
  fs::path on_host(const fs::path& folder) const { return root_ / folder.relative_path(); }

  void apply_version_2(const fs::path& folder) {
    for (const char* name : {"memory.max", "memory.high"})
      if (const auto bytes = read_number(on_host(folder) / name))
        apply({*bytes, (folder / name).string()}, folder, "memory.current", "inactive_file");
  }

  void apply_version_1(const fs::path& folder) {
    const auto bytes = read_number(on_host(folder) / "memory.limit_in_bytes");
    if (!bytes) return;
    apply({*bytes, (folder / "memory.limit_in_bytes").string()}, folder, "memory.usage_in_bytes",
          "total_inactive_file");
    // Also covers groups above the mounted one.
    const int64_t above =
        get(read_table(on_host(folder) / "memory.stat"), "hierarchical_memory_limit", *bytes);
    if (above < *bytes)
      apply({above, (folder / "memory.stat").string()}, folder, "memory.usage_in_bytes",
            "total_inactive_file");
  }

  void apply(const Limit& limit, const fs::path& folder, const char* usage, const char* cache) {
    const int64_t used = read_number(on_host(folder) / usage).value_or(0);
    const int64_t cached = get(read_table(on_host(folder) / "memory.stat"), cache, 0);
    memory_.limit = std::min(memory_.limit, limit.bytes);
    const int64_t available =
        std::max<int64_t>(0, limit.bytes - std::max<int64_t>(0, used - std::min(cached, used)));
    if (available >= memory_.available) return;
    memory_.available = available;
    memory_.limited_by = limit.file;
  }

  fs::path root_;
  HostMemory memory_;
};

}  // namespace

HostMemory host_memory(const fs::path& root) {
  Limits limits(root);
  for (const Hierarchy& hierarchy : read_hierarchies(root)) limits.apply(hierarchy);
  return limits.memory();
}

}  // namespace bough
