// Scratch memory of one call.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include "kernels/common/op.h"

namespace bough {

// Scratch from the tensors' allocator, which reuses and counts the memory. Uninitialized, aligned to a cache
// line.
template <class T>
class Workspace {
 public:
  explicit Workspace(int64_t elements)
      : memory_(at::empty({elements * static_cast<int64_t>(sizeof(T))}, at::kByte)),
        data_(static_cast<T*>(memory_.mutable_data_ptr())) {}
  T* get() const { return data_; }

 private:
  at::Tensor memory_;
  T* data_;
};

// Small scratch of one thread's task. Uninitialized, aligned to a cache line.
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

// Sums over rows. Rows are divided into parts, each part is summed by one thread, and the parts are added in
// order. The result therefore has the same bits every time for a fixed number of threads.
template <class A>
class PartialSums {
 public:
  // Each part has at least `least_rows` rows.
  PartialSums(int64_t num_rows, int64_t least_rows, int64_t width)
      : num_rows_(num_rows),
        width_(width),
        num_parts_(std::clamp<int64_t>(num_rows / least_rows, 1, at::get_num_threads())),
        sums_(num_parts_ * width) {}

  // Calls visit(begin, end, sums) for each part: its range of rows, and sums[width], set to zero, to add to.
  template <class Visit>
  void for_parts(Visit&& visit) const {
    at::parallel_for(0, num_parts_, 1, [&](int64_t first, int64_t last) {
      for (int64_t part = first; part < last; ++part) {
        A* const sums = sums_.get() + part * width_;
        std::fill_n(sums, width_, A{0});
        visit(num_rows_ * part / num_parts_, num_rows_ * (part + 1) / num_parts_, sums);
      }
    });
  }
  // out[i] += the sum of sums[begin + i] of all parts, for i in [0, count). Call it only once for each
  // element of the sums, because it overwrites the first part's sums.
  void add_to(A* out, int64_t begin, int64_t count) const {
    for (int64_t part = 1; part < num_parts_; ++part)
      for (int64_t i = begin; i < begin + count; ++i) sums_.get()[i] += sums_.get()[part * width_ + i];
    for (int64_t i = 0; i < count; ++i) out[i] += sums_.get()[begin + i];
  }

 private:
  int64_t num_rows_, width_, num_parts_;
  Workspace<A> sums_;
};

}  // namespace bough
