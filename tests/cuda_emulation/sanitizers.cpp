// Options of the sanitizers, for all programs on the emulated device.

// Each fiber would get a fake stack of its own. libtorch's globals are not freed.
extern "C" const char* __asan_default_options() {
  return "detect_stack_use_after_return=0:detect_leaks=0";
}
extern "C" const char* __ubsan_default_options() {
  return "print_stacktrace=1";
}
