// Tells the thread sanitizer what libgomp does: a parallel region begins after what its caller did before it,
// and ends before what the caller does next. libgomp itself is not instrumented, so that without this every
// region looks like a race with the code around it; races between the threads of one region are still seen.
//
// A library that stands before libgomp in link order: all calls of GOMP_parallel come here, also libtorch's.
#include <dlfcn.h>
#include <sanitizer/tsan_interface.h>

namespace {

using Body = void (*)(void*);
using GompParallel = void (*)(Body, void*, unsigned, unsigned);

// Two addresses, or a thread that ends early would be ordered before one that begins late.
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
