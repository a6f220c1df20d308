// A task's scratch: uninitialised, aligned to a cache line.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace bough {

template <class T>
class AlignedBuffer {
 public:
  explicit AlignedBuffer(int64_t count) {
    constexpr size_t kLine = 64;
    const size_t bytes = (static_cast<size_t>(count) * sizeof(T) + kLine - 1) / kLine * kLine;
    data_.reset(static_cast<T*>(std::aligned_alloc(kLine, bytes ? bytes : kLine)));
    if (!data_) throw std::bad_alloc();
  }
  T* get() const { return data_.get(); }

 private:
  struct Free {
    void operator()(T* data) const { std::free(data); }
  };
  std::unique_ptr<T, Free> data_;
};

}  // namespace bough
