// Tells the thread sanitizer what libgomp does. A parallel region begins after the work that its caller did
// before the region. It ends before the caller's next work. libgomp is not instrumented, so without this file
// every region looks like a race with the code around it. Races between the threads of one region are still
// reported.
//
// This library comes before libgomp in link order, so all calls of GOMP_parallel come here, also libtorch's.
#include <dlfcn.h>
#include <sanitizer/tsan_interface.h>

namespace {

using Body = void (*)(void*);
using GompParallel = void (*)(Body, void*, unsigned, unsigned);

// Two addresses are needed. With one, a thread that ends early would be ordered before one that begins late.
struct Region {
  Body body;
  void* data;
  char begun = 0, ended = 0;
};

void run(void* region_pointer) {
  auto* region = static_cast<Region*>(region_pointer);
  __tsan_acquire(&region->begun);
  region->body(region->data);
  __tsan_release(&region->ended);
}

}  // namespace

extern "C" void GOMP_parallel(Body body, void* data, unsigned num_threads, unsigned flags) {
  static const auto next = reinterpret_cast<GompParallel>(dlsym(RTLD_NEXT, "GOMP_parallel"));
  Region region{body, data};
  __tsan_release(&region.begun);
  next(run, &region, num_threads, flags);
  __tsan_acquire(&region.ended);
}
