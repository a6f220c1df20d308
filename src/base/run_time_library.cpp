#include "base/run_time_library.h"

#include <dlfcn.h>

#include <algorithm>
#include <string_view>

#include "base/error.h"
#include "base/file.h"

namespace bough {

namespace fs = std::filesystem;

namespace {
constexpr std::string_view kIdMark = "bough build id ";
constexpr size_t kIdLength = 16;
}  // namespace

fs::path program_folder() {
  std::error_code ignored;
  return fs::read_symlink("/proc/self/exe", ignored).parent_path();
}

fs::path find_run_time_library(const std::string& name) {
  const fs::path folder = program_folder();
  fs::path own_folder = folder;
  static const char address = 0;
  if (Dl_info info; dladdr(&address, &info) && info.dli_fname)
    own_folder = fs::path(info.dli_fname).parent_path();
  std::error_code ignored;
  for (const fs::path& candidate : {folder / name, folder.parent_path() / "lib" / name, own_folder / name})
    if (fs::is_regular_file(candidate, ignored)) return candidate;
  return {};
}

std::string build_id_of(const fs::path& library) {
  const std::string bytes = read_file(library);
  // The code that looks for the mark has the mark, too, without an id.
  for (size_t at = bytes.find(kIdMark); at != std::string::npos; at = bytes.find(kIdMark, at + 1)) {
    const std::string id = bytes.substr(at + kIdMark.size(), kIdLength);
    if (id.size() == kIdLength && id.find_first_not_of("0123456789abcdef") == std::string::npos) return id;
  }
  return {};
}

void* open_run_time_library(const RunTimeLibrary& library) {
  const std::string name = library.path.string(), found = build_id_of(library.path);
  if (found != library.build_id)
    throw UserError(str(library.purpose, ": ", quoted(name, 300), " is of another build: got ",
                        found.empty() ? "no build id" : str("build id ", found), ", expected ",
                        library.build_id, ", that of this program; build ", library.rebuild,
                        " from the same sources, or install both from the same wheel or bundle"));
  void* const opened = dlopen(library.path.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (opened) return opened;
  const char* const reason = dlerror();
  throw UserError(str(library.purpose, ": cannot open ", quoted(name, 300), ": ",
                      reason ? reason : "no reason", "; ", library.remedy));
}

}  // namespace bough
