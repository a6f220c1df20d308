// Records which function calls which, for programs compiled with -finstrument-functions (preset `trace`).
// scripts/step_path compiles this file into a library and loads it with LD_PRELOAD.
//
// Calls of all threads form one tree: a node is a function under the stack of its callers. The tree also grows
// before the recording begins, because it holds the stacks on which the recorded calls happen.
//
//   TRACE_FILE    the file to write
//   TRACE_MARK    the offset of a function in the program, in hexadecimal. The recording begins when the first
//                 call of this function returns, and ends when the second one returns.
//
// The file has one line per node, parents first: parent's line number (0: none), object, offset of the function
// in the object, and the number of the node's first call in the recording (0: not called in it).
#include <dlfcn.h>
#include <link.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <vector>

namespace {

struct Node {
  void* function = nullptr;
  uint32_t parent = 0, first_child = 0, next_sibling = 0;
  uint64_t first_call = 0;
};

// The program is position-independent: the address of a function is this base plus the function's offset.
uintptr_t program_base() {
  uintptr_t base = 0;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* out) {
        *static_cast<uintptr_t*>(out) = info->dlpi_addr;
        return 1;  // the program comes first
      },
      &base);
  return base;
}

// Not destroyed: threads and destructors of static objects call functions until the process ends.
struct Trace {
  std::mutex mutex;
  std::vector<Node> nodes{Node{}};  // node 0 is the root
  uint64_t num_calls = 0;
  int num_marks = 0;
  void* mark = nullptr;

  Trace() {
    const char* offset = getenv("TRACE_MARK");
    if (offset) mark = reinterpret_cast<void*>(program_base() + strtoull(offset, nullptr, 16));
  }

  bool is_recording() const { return num_marks == 1; }

  uint32_t child(uint32_t parent, void* function) {
    for (uint32_t i = nodes[parent].first_child; i != 0; i = nodes[i].next_sibling)
      if (nodes[i].function == function) return i;
    const auto added = static_cast<uint32_t>(nodes.size());
    nodes.push_back({function, parent, 0, nodes[parent].first_child});
    nodes[parent].first_child = added;
    return added;
  }

  void write() const {
    const char* path = getenv("TRACE_FILE");
    FILE* file = path ? fopen(path, "w") : nullptr;
    if (!file) return;
    for (size_t i = 1; i < nodes.size(); ++i) {
      Dl_info object;
      if (dladdr(nodes[i].function, &object) == 0) object = {"?", nullptr, nullptr, nullptr};
      fprintf(file, "%u %s %tx %llu\n", nodes[i].parent, object.dli_fname,
              static_cast<char*>(nodes[i].function) - static_cast<char*>(object.dli_fbase),
              static_cast<unsigned long long>(nodes[i].first_call));
    }
    fclose(file);
  }
};

Trace& trace() {
  static auto* trace = new Trace;
  return *trace;
}

thread_local uint32_t current = 0;  // the node of the thread's innermost call

}  // namespace

extern "C" void __cyg_profile_func_enter(void* function, void*) {
  Trace& t = trace();
  const std::lock_guard lock(t.mutex);
  current = t.child(current, function);
  ++t.num_calls;
  if (t.is_recording() && t.nodes[current].first_call == 0) t.nodes[current].first_call = t.num_calls;
}

extern "C" void __cyg_profile_func_exit(void* function, void*) {
  Trace& t = trace();
  const std::lock_guard lock(t.mutex);
  while (current != 0 && t.nodes[current].function != function) current = t.nodes[current].parent;
  current = t.nodes[current].parent;
  if (function == t.mark && ++t.num_marks == 2) t.write();
}
